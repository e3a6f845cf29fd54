package conn

import (
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// A limit that sheds a part refuses that part of what it matches, and of nothing else.
func TestShed(t *testing.T) {
	bulk := shaper.Limit{Name: "bulk", Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix("10.0.0.2/32")}}, Shed: shaper.Shed{CPU: 90, Order: 1}}
	r := newAdmissionRig(t, bulk, shaper.Limit{Name: "slots", MaxConnections: 1000})
	state := r.admission.policy.State(r.admission.policy.Find("bulk"))
	enter := func(source string, n int) (in int) {
		for range n {
			if v := r.visit(source, nil); v.granted {
				in++
				v.finish()
			}
		}
		return in
	}
	if n := enter("10.0.0.2", 100); n != 100 {
		t.Errorf("%d of 100 got in before anything was looked at", n)
	}
	state.Shed.Store(&shaper.ShedStatus{Share: 0.3})
	if n := enter("10.0.0.2", 10000); n < 6700 || n > 7300 { // 6 standard deviations
		t.Errorf("%d of 10000 got in, want 7000", n)
	}
	shed := state.Connections[shaper.Refuse][shaper.ShedLoad].Load()
	if n := enter("10.0.0.3", 100); n != 100 {
		t.Errorf("%d of 100 of another source got in", n)
	}
	state.Shed.Store(&shaper.ShedStatus{Share: 1})
	if n := enter("10.0.0.2", 100); n != 0 {
		t.Errorf("%d of 100 got in, all are to be shed", n)
	}
	if n := state.Connections[shaper.Refuse][shaper.ShedLoad].Load(); n != shed+100 {
		t.Errorf("%d counted as shed, want %d", n, shed+100)
	}
	bulk.Observe = true
	r.swap(bulk)
	if n := enter("10.0.0.2", 100); n != 100 {
		t.Errorf("%d of 100 got in while the limit only observes", n)
	}
	if n := state.Connections[shaper.Refuse][shaper.ShedLoad].Load(); n != shed+200 {
		t.Errorf("%d counted as shed, want %d", n, shed+200)
	}
	r.swap()
	r.idle()
}

// Connections that wait already, and open ones, are not shed, also when a new policy makes them wait again.
func TestShed_NotThoseThatWait(t *testing.T) {
	slots := shaper.Limit{Name: "slots", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 10}
	bulk := shaper.Limit{Name: "bulk", Shed: shaper.Shed{CPU: 90, Order: 1}}
	r := newAdmissionRig(t, slots, bulk)
	open := r.must("10.0.0.2")
	waits := r.visit("10.0.0.2", nil)
	r.admission.policy.State(r.admission.policy.Find("bulk")).Shed.Store(&shaper.ShedStatus{Share: 1})
	r.swap(bulk, slots)
	open.finish()
	if !waits.granted {
		t.Error("a connection that waited is shed")
	}
	waits.finish()
	r.swap()
	r.idle()
}

// Who is blocked is not shed.
func TestShed_Blocked(t *testing.T) {
	block := shaper.Limit{Name: "block", Block: true}
	r := newAdmissionRig(t, block, shaper.Limit{Name: "bulk", Shed: shaper.Shed{CPU: 90, Order: 1}})
	r.admission.policy.State(r.admission.policy.Find("bulk")).Shed.Store(&shaper.ShedStatus{Share: 1})
	if v := r.visit("10.0.0.2", nil); v.granted || v.refusedFor != shaper.Blocked {
		t.Errorf("%v", v.refusedFor)
	}
}

// New UDP flows are shed, all of their datagrams or none, and open ones are not.
func TestShed_UDP(t *testing.T) {
	t.Parallel()
	addr := echoUDP(t, 0)
	bulk := shaper.Limit{Name: "bulk", Match: shaper.Match{Protocol: shaper.UDP}, Shed: shaper.Shed{CPU: 90, Order: 1}}
	r := start(t, shaper.UDP, addr.String())
	r.listen.UDPIdleTimeout = time.Minute
	r.apply(bulk)
	state := r.shaper.Policy().State(0)
	echoes := func(c interface {
		Write([]byte) (int, error)
		Read([]byte) (int, error)
		SetReadDeadline(time.Time) error
	}, d time.Duration,
	) bool {
		c.Write([]byte("q"))
		c.SetReadDeadline(time.Now().Add(d))
		_, err := c.Read(make([]byte, 10))
		return err == nil
	}
	open := dialUDP(t, r)
	if !echoes(open, testTimeout) {
		t.Fatal("no echo")
	}
	state.Shed.Store(&shaper.ShedStatus{Share: 0.5})
	answered := 0 // flows; others may be answered late
	for range 40 {
		c, got := dialUDP(t, r), false
		for range 3 {
			got = echoes(c, 50*time.Millisecond) || got
		}
		if got {
			answered++
		}
	}
	shed := &state.Connections[shaper.Refuse][shaper.ShedLoad]
	for end := time.Now().Add(testTimeout); shed.Load()%3 != 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if n := int(shed.Load()); n%3 != 0 || n < 3*5 || n > 3*35 || answered > 40-n/3 {
		t.Errorf("%d datagrams shed, of 3 in each of 40 flows, and %d flows answered", n, answered)
	}
	state.Shed.Store(&shaper.ShedStatus{Share: 1})
	if !echoes(open, testTimeout) {
		t.Error("an open flow is shed")
	}
}
