package conn

import (
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"shaperd.dev/shaperd/conn/adaptive"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// adaptiveLimit is a limit that adapts from 1 to most.
func adaptiveLimit(most int) shaper.Limit {
	return shaper.Limit{
		Name: "bears", Match: shaper.Match{Protocol: shaper.TCP}, MaxConnections: most, MinConnections: 1, Adapt: shaper.AdaptOn,
		QueueTimeout: time.Minute, MaxQueue: 1000,
	}
}

// askAlways has n clients ask one question after the other, each of which is answered in 10 ms.
func (r *admissionRig) askAlways(n int) {
	var ask func(i int)
	ask = func(i int) {
		r.visit(fmt.Sprintf("10.0.1.%d", i), func(v *visitor) {
			if v.granted {
				r.after(10*time.Millisecond, func() {
					v.answered(leaky.Second/100, r.now)
					v.finish()
					ask(i)
				})
			}
		})
	}
	for i := range n {
		ask(i)
	}
}

// A limit with a key that becomes an adaptive one without, while connections are in flight, moves.
func TestAdapt_KeyTakenAway(t *testing.T) {
	limit := adaptiveLimit(100)
	keyed := limit
	keyed.Key, keyed.Adapt, keyed.MinConnections = shaper.KeySource, shaper.AdaptOff, 0
	r := newAdmissionRig(t, keyed)
	old := r.must("10.0.0.1")
	r.must("10.0.0.2")
	r.swap(limit)
	old.finish()
	r.askAlways(100)
	r.sleep(time.Minute)
	for _, gt := range r.admission.byKey {
		if gt.adapter == nil || gt.adapter.gate != gt || gt.slots < 50 {
			t.Errorf("limit %d after a minute; adapter %+v", gt.slots, gt.adapter)
		}
	}
}

// An adaptive limit that is not in use has the bounds of the policy, too.
func TestAdapt_IdleBounds(t *testing.T) {
	limit := adaptiveLimit(200)
	limit.MinConnections = 100
	r := newAdmissionRig(t, limit)
	r.must("10.0.0.1").finish()
	r.swap(adaptiveLimit(20))
	if st := r.admission.policy.State(0).Adaptive.Load(); st.Limit > 20 {
		t.Errorf("%+v", st)
	}
}

// Whatever is switched while connections are in flight and wait, nobody is lost, and nothing is left.
func TestAdapt_Toggles(t *testing.T) {
	on := adaptiveLimit(20)
	r := newAdmissionRig(t, on)
	for range 30 {
		r.visit("10.0.0.1", nil)
	}
	observing, watching, off, narrow := on, on, on, on
	observing.Observe = true
	watching.Adapt, watching.MinConnections = shaper.AdaptObserve, 0
	off.Adapt, off.MinConnections = shaper.AdaptOff, 0
	narrow.MinConnections, narrow.MaxConnections = 5, 5
	for _, l := range []shaper.Limit{on, observing, on, watching, off, on, narrow, on} {
		r.swap(l)
		r.sleep(2 * time.Second)
		st := r.admission.policy.State(0).Adaptive.Load()
		if adapts := l.Adapt != shaper.AdaptOff; adapts != (st != nil) || len(r.admission.adapters) > 1 || adapts && st.Observed != (l.Observe || l.Adapt == shaper.AdaptObserve) {
			t.Errorf("%+v: status %+v, %d adapters", l, st, len(r.admission.adapters))
		}
	}
	r.swap()
	if n := len(r.admission.adapters); n > 0 {
		t.Errorf("%d adapters are left", n)
	}
	r.swap(narrow)
	for len(r.in) > 0 {
		for v := range r.in {
			v.finish()
		}
		r.sleep(time.Second)
	}
	r.idle()
}

// server serves each connection with f.
func server(t *testing.T, f func(c *net.TCPConn)) string {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				f(c.(*net.TCPConn))
			}()
		}
	}()
	return l.Addr().String()
}

// A server that resets after each answer has not failed, and connections that ask nothing say nothing.
func TestAdapt_ResetsAndEmptyConnections(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, server(t, func(c *net.TCPConn) {
		b := make([]byte, 1)
		if _, err := io.ReadFull(c, b); err == nil {
			time.Sleep(20 * time.Millisecond)
			c.Write(b)
			time.Sleep(5 * time.Millisecond)
			c.SetLinger(0)
		}
	}), adaptiveLimit(40))
	for range 60 {
		dial(t, r.addr()).Close()
		time.Sleep(5 * time.Millisecond)
	}
	r.askAlways(t, 60)
	state := r.shaper.Policy().State(0)
	testutil.WaitFor(t, "the limit to grow", func() bool { st := state.Adaptive.Load(); return st != nil && st.Limit >= 8 })
	time.Sleep(3 * time.Second)
	st := state.Adaptive.Load()
	if st.Throughput == 0 {
		t.Error("no answer was counted")
	}
	for _, ch := range st.Changes {
		if ch.Reason == adaptive.Failures.String() || ch.Reason == adaptive.Silence.String() {
			t.Errorf("the limit went from %d to %d for %s", ch.From, ch.To, ch.Reason)
		}
	}
}

// Connections that cannot use a slot, as another limit keeps them, make none end.
func TestYield_ForNothing(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, slowAnswers(t))
	slots := shaper.Limit{Name: "slots", Match: shaper.Match{Protocol: shaper.TCP}, MaxConnections: 40, YieldAfter: time.Second, QueueTimeout: time.Minute, MaxQueue: 1000}
	r.apply(slots)
	for range 40 {
		c := dialFrom(t, "127.0.0.2", r.addr())
		if !asks(c, testTimeout) {
			t.Fatal("no answer")
		}
	}
	r.apply(slots, shaper.Limit{Name: "each", Match: shaper.Match{Protocol: shaper.TCP}, Key: shaper.KeySource | shaper.KeyPort, MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 1000})
	for range 40 {
		dialFrom(t, "127.0.0.3", r.addr())
	}
	yielded := &r.proxy.listeners["l"].counts.Ended[shaper.Yielded]
	testutil.WaitFor(t, "one to end", func() bool { return yielded.Load() > 0 })
	time.Sleep(4 * time.Second)
	ended := yielded.Load()
	if ended < 1 || ended > 2 { // one may end before it shows that the rest cannot use its slot
		t.Errorf("%d connections have ended for one slot", ended)
	}
}
