package conn

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// instances are proxies that listen at one address.
type instances struct {
	testing.TB
	protocol shaper.Protocol
	proxies  []*proxyRig
}

// echoingInstances starts n proxies in front of a server that echoes.
func echoingInstances(t *testing.T, protocol shaper.Protocol, n int) *instances {
	var downstream string
	if protocol == shaper.TCP {
		downstream = testutil.ServeTCP(t, func(c *net.TCPConn) { _, _ = c.ReadFrom(c) })
	} else {
		server := serveUDP(t)
		downstream = server.LocalAddr().String()
		go func() {
			b := make([]byte, 100)
			for {
				n, from, err := server.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = server.WriteTo(b[:n], from)
			}
		}()
	}
	return startInstances(t, protocol, downstream, n)
}

func startInstances(t testing.TB, protocol shaper.Protocol, downstream string, n int, limits ...shaper.Limit) *instances {
	all := &instances{TB: t, protocol: protocol}
	addr := addressOf(protocol, netip.MustParseAddrPort(testutil.FreeAddr(t, protocol.String())))
	for range n {
		r := start(t, protocol, downstream)
		r.listen.Addresses, r.listen.Instances, r.listen.MaxFlows = []shaper.Address{addr}, n, 1000
		r.apply(limits...)
		all.proxies = append(all.proxies, r)
	}
	return all
}

// ask sends something from a source, and returns the index of the proxy that forwarded it.
func (in *instances) ask(source netip.Addr) int {
	in.Helper()
	before := in.counts()
	local := map[shaper.Protocol]net.Addr{
		shaper.TCP: net.TCPAddrFromAddrPort(netip.AddrPortFrom(source, 0)), shaper.UDP: net.UDPAddrFromAddrPort(netip.AddrPortFrom(source, 0)),
	}[in.protocol]
	c, err := (&net.Dialer{LocalAddr: local}).Dial(in.protocol.String(), in.proxies[0].addr())
	if err != nil {
		in.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(testTimeout))
	b := []byte("hello")
	if _, err := c.Write(b); err != nil {
		in.Fatal(err)
	}
	if _, err := c.Read(b); err != nil {
		in.Fatal(source, err)
	}
	after, at := in.counts(), -1
	for i := range after {
		if after[i] == before[i] {
			continue
		}
		if at >= 0 || after[i] != before[i]+1 {
			in.Fatalf("connections at the instances were %d, and are %d after one", before, after)
		}
		at = i
	}
	if at < 0 && in.protocol == shaper.UDP { // the port is that of an earlier flow
		return in.ask(source)
	}
	if at < 0 {
		in.Fatal("no instance had the connection")
	}
	return at
}

// counts returns how many connections each proxy has had.
func (in *instances) counts() (n []uint64) {
	for _, r := range in.proxies {
		n = append(n, r.proxy.nextID.Load())
	}
	return n
}

// TestInstances has each source at one of several proxies, whatever its port, and about as many sources at each.
func TestInstances(t *testing.T) {
	for _, protocol := range []shaper.Protocol{shaper.TCP, shaper.UDP} {
		t.Run(protocol.String(), func(t *testing.T) {
			const n, sources = 3, 150
			in := echoingInstances(t, protocol, n)
			at, of := map[netip.Addr]int{}, make([]int, n)
			for i := range sources {
				source := netip.AddrFrom4([4]byte{127, byte(i % 3), byte(i / 3), 1})
				at[source] = in.ask(source)
				of[at[source]]++
			}
			if slices.Min(of) < sources/n/2 {
				t.Errorf("%d of %d sources are at each instance", of, sources)
			}
			for source, was := range at {
				if is := in.ask(source); is != was {
					t.Errorf("%v was at instance %d, and is at %d", source, was, is)
				}
			}

			// When one is gone the others have its sources.
			in.proxies[1].proxy.Close()
			in.proxies = slices.Delete(in.proxies, 1, 2)
			for source := range at {
				in.ask(source)
			}
		})
	}
}

// TestInstances_Reload has one of two proxies permit the other when it is reloaded.
func TestInstances_Reload(t *testing.T) {
	for _, protocol := range []shaper.Protocol{shaper.TCP, shaper.UDP} {
		t.Run(protocol.String(), func(t *testing.T) {
			in := echoingInstances(t, protocol, 1)
			first, second := in.proxies[0], start(t, protocol, in.proxies[0].listen.Downstream[0].String())
			try := func() error {
				listen := second.listen
				listen.Addresses, listen.Instances = first.listen.Addresses, 2
				return second.proxy.Apply(t.Context(), []shaper.Listener{second.listen, named(listen, "shared")}, policy(t, second.shaper), nil)
			}
			if err := try(); err == nil {
				t.Fatal("the second one listens where the first one is alone")
			}
			first.listen.Instances = 2
			first.apply()
			if err := try(); err != nil {
				t.Fatal(err)
			}
			in.proxies = append(in.proxies, second)
			at := map[netip.Addr]int{}
			for i := range 40 {
				source := netip.AddrFrom4([4]byte{127, 0, byte(i), 1})
				at[source] = in.ask(source)
			}
			for source, was := range at {
				if is := in.ask(source); is != was {
					t.Errorf("%v was at instance %d, and is at %d", source, was, is)
				}
			}
			if got := len(at); slices.Max(in.counts()) > uint64(2*got-10) {
				t.Errorf("%d connections of %d at each instance", in.counts(), 2*got)
			}
			first.listen.Instances = 1
			if err := first.proxy.Apply(t.Context(), []shaper.Listener{first.listen}, policy(t, first.shaper), nil); err == nil || !strings.Contains(err.Error(), "instances: one instance needs a restart") {
				t.Errorf("a reload to one instance, while there are two: %v", err)
			}
		})
	}
}

// TestInstances_FailedApply has a second instance that fails to open one of its ports, again and again: the first one has all
// connections.
func TestInstances_FailedApply(t *testing.T) {
	in := echoingInstances(t, shaper.TCP, 1)
	first, second := in.proxies[0], start(t, shaper.TCP, in.proxies[0].listen.Downstream[0].String())
	first.listen.Instances = 2
	first.apply()
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	failing := second.listen
	failing.Instances = 2
	failing.Addresses = []shaper.Address{first.listen.Addresses[0], addressOf(shaper.TCP, netip.MustParseAddrPort(taken.Addr().String()))}
	for range 50 { // where ports share the addresses of others, they are in no particular order
		failing.Addresses = append(failing.Addresses, addressOf(shaper.TCP, netip.MustParseAddrPort(testutil.FreeAddr(t, "tcp"))))
	}
	ctx, end := context.WithCancel(t.Context())
	var tried atomic.Int64
	done := make(chan bool)
	go func() {
		defer close(done)
		for ; ctx.Err() == nil; tried.Add(1) {
			if err := second.proxy.Apply(ctx, []shaper.Listener{failing}, policy(t, second.shaper), nil); err == nil {
				t.Error("the second instance has a port that is taken")
			}
		}
	}()
	for i := 0; i < 400 || tried.Load() < 10; i++ {
		in.ask(netip.AddrFrom4([4]byte{127, 0, byte(i), 1}))
	}
	end()
	<-done
}

func named(l shaper.Listener, name string) shaper.Listener {
	l.Name = name
	return l
}

// TestInstances_Strangers has a program that permits others fail to listen where an instance that does not is.
func TestInstances_Strangers(t *testing.T) {
	r := start(t, shaper.UDP, "127.0.0.1:9")
	fd, err := sock.OpenUDP(r.listen.Endpoints()[0].Addr, false, true, 0)
	if err == nil {
		t.Errorf("descriptor %d has the address of a listener", fd)
	}
	if got := fmt.Sprint(err); got != "address already in use" {
		t.Errorf("the error is %q", got)
	}
}
