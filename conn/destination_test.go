package conn

import (
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// byDestination is one connection, or flow, to each address.
func byDestination(protocol shaper.Protocol) shaper.Limit {
	return shaper.Limit{
		Name: "per-server", Key: shaper.KeyDestination, IPv4Prefix: 32, IPv6Prefix: 128, MaxConnections: 1,
		Match: shaper.Match{Protocol: protocol}, RefuseWith: map[shaper.Protocol]shaper.RefuseWith{shaper.UDP: shaper.RefuseDrop}[protocol],
	}
}

// A destination is the address that a client connects to, at a port of one address and at one of all.
func TestKeyDestination_TCP(t *testing.T) {
	for _, at := range []string{"127.0.0.1", "0.0.0.0"} {
		t.Run(at, func(t *testing.T) {
			echo := testutil.ServeTCP(t, testutil.Echo)
			r := start(t, shaper.TCP, echo)
			port := testutil.FreePort(t, "tcp")
			address := func(a string) shaper.Address {
				return addressOf(shaper.TCP, netip.AddrPortFrom(netip.MustParseAddr(a), port))
			}
			r.listen.Addresses = []shaper.Address{address(at)}
			if at != "0.0.0.0" {
				r.listen.Addresses = append(r.listen.Addresses, address("127.0.0.2"))
			}
			r.apply(byDestination(shaper.TCP))
			to := func(a string) bool { return answers(t, netip.AddrPortFrom(netip.MustParseAddr(a), port).String()) }
			if !to("127.0.0.1") || !to("127.0.0.2") {
				t.Fatal("the first connection to an address is refused")
			}
			if to("127.0.0.1") || to("127.0.0.2") {
				t.Error("a second connection to an address is admitted")
			}
		})
	}
}

// answers reports whether a connection to addr, which stays open, is admitted.
func answers(t *testing.T, addr string) bool {
	t.Helper()
	c, err := net.Dial("tcp4", addr)
	if err != nil {
		return false
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(testTimeout))
	c.Write([]byte("x"))
	_, err = io.ReadFull(c, make([]byte, 1))
	return err == nil
}

func TestKeyDestination_UDP(t *testing.T) {
	server := testutil.ListenUDP(t, "127.0.0.1:0")
	testutil.EchoUDP(t, server)
	r := start(t, shaper.UDP, server.LocalAddr().String())
	port := testutil.FreePort(t, "udp")
	r.listen.Addresses = []shaper.Address{addressOf(shaper.UDP, netip.AddrPortFrom(netip.IPv4Unspecified(), port))}
	r.listen.UDPIdleTimeout = time.Minute
	r.apply(byDestination(shaper.UDP))
	send := func(to string) net.Conn {
		c, err := net.Dial("udp4", netip.AddrPortFrom(netip.MustParseAddr(to), port).String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.Write([]byte("x"))
		return c
	}
	for _, to := range []string{"127.0.0.1", "127.0.0.2"} {
		c := send(to)
		c.SetDeadline(time.Now().Add(testTimeout))
		if _, err := c.Read(make([]byte, 10)); err != nil {
			t.Fatalf("the first flow to %s: %v", to, err)
		}
	}
	send("127.0.0.1") // no flow is idle yet
	state := r.shaper.Policy().State(0)
	testutil.WaitFor(t, "the second flow to an address to be refused or to replace the first", func() bool {
		counts := r.shaper.Listener("l")
		return state.Connections[shaper.Refuse][shaper.ByConnections].Load()+counts.FlowsEvicted.Load() == 1
	})
}

// The destination in a PROXY header is that of the client.
func TestKeyDestination_InProxyHeader(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	r.listen.AcceptProxyFrom = []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}
	r.apply(byDestination(shaper.TCP))
	through := func(to string) bool {
		c := dial(t, r.addr())
		c.Write(append(proxyHeaderBytes(t, 2, "192.0.2.1:1000", to), 'x'))
		_, err := io.ReadFull(c, make([]byte, 1))
		return err == nil
	}
	for i, want := range []bool{true, false} {
		for _, to := range []string{"198.51.100.1:80", "198.51.100.2:80"} {
			if through(to) != want {
				t.Errorf("connection %d to %s: admitted is %v", i, to, !want)
			}
		}
	}
}
