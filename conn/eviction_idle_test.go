package conn

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// addUDPListener makes r listen for datagrams too, from the next apply on. It returns the address.
func (r *proxyRig) addUDPListener(t *testing.T) string {
	t.Helper()
	at := addressOf(shaper.UDP, netip.MustParseAddrPort(testutil.FreeAddr(t, "udp")))
	r.listen.Addresses = append(r.listen.Addresses, at)
	return at.Endpoints()[0].Addr.String()
}

// startDual listens for connections and datagrams, of which most are admitted at once to addr: by
// limits, or without limits by the downstream. It returns the address for datagrams.
func startDual(t *testing.T, addr string, most int, limits []shaper.Limit) (r *proxyRig, datagrams string) {
	t.Helper()
	r = start(t, shaper.TCP, addr)
	datagrams = r.addUDPListener(t)
	r.listen.UDPIdleTimeout, r.listen.ConnectTimeout = time.Hour, time.Minute
	if limits == nil {
		r.listen.Downstream[0].MaxConnections = most
	}
	r.apply(limits...)
	return r, datagrams
}

// Flows of sources that may be forged hold slots that TCP connections need: as many are evicted as
// connections wait. (An occasional datagram to each kept all connections out.)
func TestIdleFlowsMakeRoomForConnections(t *testing.T) {
	const most = 4
	for name, limits := range map[string][]shaper.Limit{
		"of a limit":      {{Name: "slots", MaxConnections: most, QueueTimeout: time.Minute, MaxQueue: 10}},
		"of a downstream": nil,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr := testutil.FreeAddr(t, "udp") // the kernel may have given the port of another address to someone
			l, err := net.Listen("tcp4", addr)
			if err != nil {
				t.Fatal(err)
			}
			testutil.Serve(t, l.(*net.TCPListener), testutil.Echo)
			testutil.ListenUDP(t, addr) // sends no replies
			r, datagrams := startDual(t, addr, most, limits)
			for i := range most {
				udpFrom(t, fmt.Sprintf("127.0.0.%d", 100+i), datagrams).Write([]byte("forged"))
			}
			counts := r.shaper.Listener("l")
			testutil.WaitFor(t, "flows", func() bool { return counts.Flows.Load() == most })
			for range 2 {
				c := dial(t, r.addr())
				c.Write([]byte{1})
				if _, err := c.Read(make([]byte, 1)); err != nil { // within 20 s, and flows expire after an hour
					t.Fatal("a connection waits for idle flows: ", err)
				}
			}
			if n := counts.FlowsEvicted.Load(); n != 2 {
				t.Errorf("%d flows were evicted for 2 connections", n)
			}
		})
	}
}

// A source whose own flow is evicted for its next one takes over the slots of that flow, and none of
// another source.
func TestNewFlowEvictsOnlyOwnFlow(t *testing.T) {
	for _, name := range []string{"of downstreams", "of a limit"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, shaper.UDP, echoUDP(t, 0).String())
			r.listen.UDPIdleTimeout, r.listen.MaxFlowsPerSource = time.Minute, 1
			if name == "of a limit" {
				r.apply(shaper.Limit{Name: "all", MaxConnections: 2})
			} else {
				other := netip.MustParseAddrPort(echoUDP(t, 0).String())
				r.listen.Downstream = append(r.listen.Downstream, shaper.Downstream{Host: other.Addr().String(), Port: other.Port()})
				for i := range r.listen.Downstream {
					r.listen.Downstream[i].MaxConnections = 1
				}
				r.apply()
			}
			const bystander, asker = "127.0.6.3", "127.0.6.4"
			if !getsReply(t, bystander, r.addr()) || !getsReply(t, asker, r.addr()) {
				t.Fatal("no reply")
			}
			had := r.flowsOf(bystander)
			time.Sleep((unansweredGrace + leaky.Second/10).Duration())
			if !getsReply(t, asker, r.addr()) {
				t.Error("no reply to the second query")
			}
			if has := r.flowsOf(bystander); !maps.Equal(has, had) {
				t.Error("the flow of another source was evicted too")
			}
		})
	}
}

// Two flows are evicted for a third. The end of the first admits a connection, which finds that the
// downstreams are unreachable, so that the second flow ends: it ends once. (The daemon crashed.)
func TestEvictedFlowClosesOnce(t *testing.T) {
	t.Parallel()
	server := echoUDP(t, 0)
	r := start(t, shaper.TCP, server.String())
	datagrams := r.addUDPListener(t)
	other := netip.MustParseAddrPort(echoUDP(t, 0).String())
	r.listen.Downstream = append(r.listen.Downstream, shaper.Downstream{Host: other.Addr().String(), Port: other.Port()})
	r.listen.EjectAfter, r.listen.EjectFor = 1, time.Minute
	r.listen.UDPIdleTimeout, r.listen.MaxFlowsPerSource = 10*time.Second, 1
	only := func(sources ...string) (m shaper.Match) {
		for _, s := range sources {
			m.Source = append(m.Source, netip.MustParsePrefix(s+"/32"))
		}
		return m
	}
	r.apply(
		shaper.Limit{Name: "a", Match: only("127.0.6.1"), MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 10},
		shaper.Limit{Name: "b", Match: only("127.0.6.1", "127.0.6.2"), MaxConnections: 2, QueueTimeout: time.Minute, MaxQueue: 10},
	)
	for _, source := range []string{"127.0.6.1", "127.0.6.2"} {
		c := udpFrom(t, source, datagrams)
		for range 2 { // it sends again after a reply
			c.Write([]byte("x"))
			c.SetReadDeadline(time.Now().Add(testTimeout))
			if _, err := c.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		}
	}
	time.Sleep(r.listen.UDPIdleTimeout/verifiedGraceDivisor + 100*time.Millisecond)
	dialFrom(t, "127.0.6.1", r.addr()) // waits for the slot of the first flow
	state := r.shaper.Policy().State(r.shaper.Policy().Find("a"))
	testutil.WaitFor(t, "a waiter", func() bool { return state.Waiting.Load() == 1 })
	r.proxy.home.loop.call(func(leaky.Time) {
		for _, d := range r.proxy.listeners["l"].downstreams {
			unreachable := netip.MustParseAddr("127.255.255.255") // a broadcast: connect(2) fails at once
			d.host.address.Store(&unreachable)
		}
	})
	udpFrom(t, "127.0.6.2", datagrams).Write([]byte("x"))
	counts := r.shaper.Listener("l")
	testutil.WaitFor(t, "the end of both flows", func() bool { return counts.Flows.Load() == 0 && state.InFlight.Load() == 0 })
	if n := counts.FlowsEvicted.Load(); n == 0 {
		t.Error("none was evicted")
	}
	r.settle()
}
