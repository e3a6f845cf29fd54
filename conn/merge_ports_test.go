package conn

import (
	"io"
	"net"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// A port that is new with the reload that joins the loops belongs to the loop that goes on, as do its connections.
func TestMerge_NewPort(t *testing.T) {
	for _, protocol := range []shaper.Protocol{shaper.TCP, shaper.UDP} {
		t.Run(protocol.String(), func(t *testing.T) {
			to := serveEcho(t, protocol)
			r := newLoopsRig(t, 2, protocol, to)
			r.apply([]string{"a", "b"})
			r.wantGroups("[[a] [b]]")
			all := []shaper.Listener{r.listener("a"), r.listener("b")}
			added := []string{"new at a", "new at b"}
			for i, name := range added {
				r.addr(name)
				all[i].Addresses = append(all[i].Addresses, addressOf(protocol, r.ports[name]))
			}
			policy, err := r.shaper.CompileRules(shaper.Rules{Limits: []shaper.Limit{{Name: "x", Rate: 80e6, IPv4Prefix: 32, IPv6Prefix: 64}}, Listeners: all})
			if err == nil {
				err = r.proxy.Apply(t.Context(), all, policy, nil)
			}
			if err != nil {
				t.Fatal(err)
			}
			r.wantGroups("[[a b]]")
			var last uint64
			for i, name := range added {
				c, err := net.Dial(protocol.String(), r.addr(name))
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { c.Close() })
				c.SetDeadline(time.Now().Add(testTimeout))
				c.Write([]byte("x"))
				if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
					t.Fatal(err)
				}
				var id uint64
				n := 0
				r.proxy.Connections(func(s *shaper.ConnectionStatus) { n, id = n+1, max(id, s.ID) })
				if n != i+1 {
					t.Errorf("%d connections are listed, want %d", n, i+1)
				}
				last = id
			}
			if !r.proxy.Kill(last) {
				t.Error("the last connection is unknown")
			}
		})
	}
}

// serveEcho starts a server that returns what it receives.
func serveEcho(t *testing.T, protocol shaper.Protocol) string {
	if protocol == shaper.TCP {
		return testutil.ServeTCP(t, func(c *net.TCPConn) { io.Copy(c, c) })
	}
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 2000)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			c.WriteTo(b[:n], from)
		}
	}()
	t.Cleanup(func() { c.Close(); <-done })
	return c.LocalAddr().String()
}
