package conn

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// A bucket of which a gate is reserved for a waiter that waits elsewhere can be shown.
func TestReserve_Inspect(t *testing.T) {
	a := reserving(shaper.Limit{Name: "a", Match: shaper.Match{Port: []shaper.PortRange{{First: 1, Last: 2}}}, MaxConnections: 1}, shaper.Reserve{Class: "10.0.1.0/24", Percent: 100})
	b := reserving(shaper.Limit{Name: "b", Match: shaper.Match{Port: []shaper.PortRange{{First: 2, Last: 3}}}, MaxConnections: 1}, shaper.Reserve{Class: "10.0.1.0/24", Percent: 100})
	r := newClassAdmissionRig(t, []shaper.TrafficClass{priorityOfPrefix("10.0.1.0/24", 1)}, a, b)
	in := map[uint16]*visitor{}
	keep := func(source string, port uint16) {
		r.visitPort(source, port, func(v *visitor) { in[port] = v })
	}
	keep("10.0.3.1", 1)
	keep("10.0.3.1", 3)
	low := r.visitPort("10.0.2.1", 2, nil)
	for i := range 40 {
		port := uint16(1 + 2*(i%2))
		r.sleep(10 * time.Millisecond)
		keep(fmt.Sprint("10.0.4.", port), port)
		in[port].finish()
		if low.queue != nil && low.queue.reservedAt != 0 {
			break
		}
	}
	if low.queue == nil || low.queue.reservedAt == 0 {
		t.Fatal("there was no reservation")
	}
	p := &worker{Proxy: &Proxy{shaper: r.shaper}, admission: r.admission, loop: &loop{scheduler: newScheduler(r.admission.sharing), sharing: r.admission.sharing}}
	reserved := 0
	for _, gt := range r.admission.byKey {
		i := r.admission.policy.IndexOf(gt.state)
		if p.bucket(r.admission.policy, i, gt.limitKey(), r.now).Reserved {
			reserved++
		}
	}
	if reserved != 1 {
		t.Errorf("%d buckets are shown as reserved, want 1", reserved)
	}
}

func grantedOf(list []*visitor) (n int) {
	for _, v := range list {
		if v.granted {
			n++
		}
	}
	return n
}

// Slots that a reload adds are given by turns.
func TestTurns_ReloadAddsSlots(t *testing.T) {
	limit := shaper.Limit{Name: "all", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 1000, Turns: byPrefix}
	r := newClassAdmissionRig(t, nil, limit)
	r.must("10.9.9.9")
	var site, others []*visitor
	for i := range 256 {
		site = append(site, r.visit(fmt.Sprint("10.1.0.", i), nil))
	}
	for i := range 20 {
		others = append(others, r.visit(fmt.Sprintf("10.2.%d.1", i), nil))
	}
	limit.MaxConnections = 11
	r.swapClasses(nil, limit)
	if got := grantedOf(site); got > 2 {
		t.Errorf("256 sources of a prefix got %d of 10 new slots, 20 others %d", got, grantedOf(others))
	}
}

// Slots that a reload adds are given to the class first that is owed.
func TestReserve_ReloadAddsSlots(t *testing.T) {
	low, high := "10.0.1.0/24", "10.0.2.0/24"
	limit := reserving(shaper.Limit{Name: "all", MaxConnections: 4}, shaper.Reserve{Class: low, Percent: 50})
	classes := []shaper.TrafficClass{priorityOfPrefix(low, 0), priorityOfPrefix(high, 9)}
	r := newClassAdmissionRig(t, classes, limit)
	for i := range 4 {
		r.must(fmt.Sprint("10.0.2.", i))
	}
	var l, h []*visitor
	for i := range 20 {
		l = append(l, r.visit(fmt.Sprint("10.0.1.", i), nil))
		h = append(h, r.visit(fmt.Sprint("10.0.2.", 20+i), nil))
	}
	limit.MaxConnections = 8
	r.swapClasses(classes, limit)
	if got := grantedOf(l); got != 4 {
		t.Errorf("the class that is owed 4 of 8 slots got %d of the 4 new ones, that of a higher priority %d", got, grantedOf(h))
	}
}

// ::1 does not wait with flows of which the sources may be forged.
func TestClasses_LoopbackIsNotForged(t *testing.T) {
	r := newClassAdmissionRig(t, nil, shaper.Limit{Name: "all", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 1000})
	first := r.must("10.9.9.9")
	for i := range 50 {
		r.enter(fmt.Sprint("10.1.0.", i), 1, true, nil)
	}
	v := r.visit("::1", nil)
	first.finish()
	served := 0
	for ; !v.granted && served < 60; served++ {
		for x := range r.in {
			x.finish()
			break
		}
	}
	if served > 3 {
		t.Errorf("::1 waits behind %d forged flows", served)
	}
}

func (r *proxyRig) applyClasses(classes []shaper.TrafficClass, limits ...shaper.Limit) {
	r.t.Helper()
	if err := r.proxy.Apply(r.t.Context(), []shaper.Listener{r.listen}, policyOf(r.t, r.shaper, classes, limits...), nil); err != nil {
		r.t.Fatal(err)
	}
}

// classOfPrefix is a class of the sources of a prefix.
func classOfPrefix(name, prefix string, priority int) shaper.TrafficClass {
	return shaper.TrafficClass{Name: name, Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix(prefix)}}, Weight: 1, Priority: priority}
}

// dialUDPFrom is a socket at a source.
func dialUDPFrom(t *testing.T, source, addr string) net.Conn {
	d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(source)}}
	c, err := d.Dial("udp4", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// The slot of a flow is of the class of its source once it was answered.
func TestClasses_FlowAfterAnswer(t *testing.T) {
	t.Parallel()
	server := testutil.ListenUDP(t, "127.0.0.1:0")
	testutil.EchoUDP(t, server)
	r := start(t, shaper.UDP, server.LocalAddr().String())
	r.listen.UDPIdleTimeout = 20 * time.Second
	limit := shaper.Limit{Name: "slots", MaxConnections: 10, QueueTimeout: time.Minute, MaxQueue: 100, Reserve: []shaper.Reserve{{Class: "voip", Percent: 20}}}
	r.applyClasses([]shaper.TrafficClass{classOfPrefix("voip", "127.0.0.0/8", 0)}, limit)
	for i := range 5 {
		c := dialUDPFrom(t, fmt.Sprint("127.0.0.", 10+i), r.addr())
		for range 3 {
			c.Write([]byte("q"))
			c.SetReadDeadline(time.Now().Add(testTimeout))
			if _, err := c.Read(make([]byte, 10)); err != nil {
				t.Fatal(err)
			}
		}
	}
	r.proxy.home.loop.call(func(leaky.Time) {
		for _, f := range r.proxy.home.flows {
			if name := f.slots.precedence.name(); name != "voip" {
				t.Errorf("the slot of an answered flow is of class %q", name)
			}
		}
		for _, gt := range r.proxy.home.admission.byKey {
			voip := r.shaper.Policy().ClassState(0)
			if gt.owed(voip) {
				t.Errorf("5 of 10 slots are of voip, and it is owed 2 more")
			}
		}
	})
	limit.MaxConnections = 11
	r.applyClasses([]shaper.TrafficClass{classOfPrefix("voip", "127.0.0.0/8", 0)}, limit)
	testutil.WaitFor(t, "all flows to be of their class after a reload", func() (all bool) {
		r.proxy.home.loop.call(func(leaky.Time) {
			all = true
			for _, f := range r.proxy.home.flows {
				all = all && f.slots.precedence.name() == "voip"
			}
		})
		return all
	})
}

// No connection ends for a source that would not get its slot.
func TestYield_Priority(t *testing.T) {
	t.Parallel()
	for _, reserve := range []bool{false, true} {
		t.Run(fmt.Sprint(reserve), func(t *testing.T) {
			t.Parallel()
			r := start(t, shaper.TCP, slowAnswers(t))
			limit := shaper.Limit{Name: "slots", Match: shaper.Match{Protocol: shaper.TCP}, MaxConnections: 6, YieldAfter: 200 * time.Millisecond, QueueTimeout: time.Minute, MaxQueue: 100}
			prio := 9
			if reserve {
				prio = 0
				limit.Reserve = []shaper.Reserve{{Class: "high", Percent: 100}}
			}
			r.applyClasses([]shaper.TrafficClass{classOfPrefix("high", "127.0.0.2/32", prio)}, limit)
			for range 6 {
				c := dialFrom(t, "127.0.0.2", r.addr())
				if !asks(c, testTimeout) {
					t.Fatal("no answer")
				}
			}
			for range 30 { // more of the same source wait
				dialFrom(t, "127.0.0.2", r.addr())
			}
			time.Sleep(100 * time.Millisecond)
			low := dialFrom(t, "127.0.0.3", r.addr())
			ok := asks(low, 4*time.Second)
			n := r.proxy.listeners["l"].counts.Ended[shaper.Yielded].Load()
			if !ok && n > 0 {
				t.Errorf("%d connections were ended for a source that got none of their slots", n)
			}
		})
	}
}
