package testutil

import (
	"net"
	"testing"
)

// TestFreeAddr checks that addresses are unique and can be listened on.
func TestFreeAddr(t *testing.T) {
	seen := map[string]bool{}
	for _, network := range []string{"tcp", "udp", "tcp"} {
		at := FreeAddr(t, network)
		if seen[at] {
			t.Errorf("%s was returned twice", at)
		}
		seen[at] = true
		if network == "udp" {
			c, err := net.ListenPacket(network, at)
			if err != nil {
				t.Fatal(err)
			}
			c.Close()
			continue
		}
		l, err := net.Listen(network, at)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		c, err := net.Dial(network, at)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if from := c.LocalAddr().(*net.TCPAddr).IP.String(); from != "127.0.0.1" {
			t.Errorf("a connection to it has source %s", from)
		}
	}
}
