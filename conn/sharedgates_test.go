package conn

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

func (r *admissionRig) setShares(s shaper.Shares) {
	r.admission.sharing.set(&s)
	r.wheel.Advance(r.now)
}

// A host admits new connections at its share of the rate, and waiters at once at another one.
func TestSharedNewConnections(t *testing.T) {
	limit := shaper.Limit{Name: "new", Shared: true, NewConnections: shaper.Frequency{N: 100, Per: time.Second}, QueueTimeout: time.Minute, MaxQueue: 1000}
	r := newAdmissionRig(t, limit)
	var visitors []*visitor
	for i := range 200 {
		visitors = append(visitors, r.visit(fmt.Sprint("10.0.0.", i), func(*visitor) {}))
	}
	admitted := func() (n int) {
		for _, v := range visitors {
			if v.granted {
				n++
			}
		}
		return n
	}
	key := shaper.Key{Limit: r.shaper.Policy().State(0).ID + 1}
	expect := func(what string, want int) {
		t.Helper()
		if n := admitted(); n != want {
			t.Errorf("%s: %d are admitted, want %d", what, n, want)
		}
	}
	expect("before any lease", 0)
	r.sleep(10 * time.Second)
	end := r.now + 3*leaky.Second
	r.setShares(shaper.Shares{Lease: shaper.Lease{End: end, AloneAt: end + leaky.Second, Cold: shaper.Whole / 4, Alone: shaper.Whole / 10}})
	expect("a quarter of the rate", 1)
	r.sleep(999 * time.Millisecond)
	expect("a quarter of the rate for a second", 25)
	r.setShares(shaper.Shares{Lease: r.admission.sharing.lease, Given: []shaper.KeyParts{{Key: key, Parts: shaper.Whole}}})
	r.sleep(100 * time.Millisecond) // the next one was due in a quarter of its time
	expect("the whole rate for 100 ms", 35)
	r.setShares(shaper.Shares{Lease: r.admission.sharing.lease, Given: []shaper.KeyParts{{Key: key, Parts: 0}}})
	r.sleep(time.Second)
	expect("without parts", 35)
	r.setShares(shaper.Shares{Lease: r.admission.sharing.lease, Cold: []shaper.Key{key}})
	r.until(end - 1)
	n := admitted()
	if n < 55 || n > 60 {
		t.Errorf("%d are admitted at the end of the lease, want a quarter of the rate for 0.9 s more", n)
	}
	r.until(end + leaky.Second - 1)
	expect("between", n)
	r.until(end + 2*leaky.Second)
	if m := admitted() - n; m < 9 || m > 11 {
		t.Errorf("%d are admitted in a second alone, want a tenth of the rate", m)
	}
}

// All hosts together admit no more new connections than one would, and one each, and one each that a late
// timer refunds.
func TestSharedNewConnections_SumOverHosts(t *testing.T) {
	rnd := testutil.Rand(t)
	for range 20 {
		limit := shaper.Limit{Name: "new", Shared: true, NewConnections: shaper.Frequency{N: 1000, Per: time.Second}, QueueTimeout: time.Hour, MaxQueue: 1 << 20}
		var admitted []leaky.Time
		hosts := make([]*admissionRig, 2+rnd.IntN(3))
		parts := make([]uint32, len(hosts))
		for i := range hosts {
			hosts[i] = newAdmissionRig(t, limit)
		}
		now := leaky.Second
		for range 1500 {
			now += leaky.Time(rnd.Uint64N(uint64(leaky.Second / 500)))
			for _, h := range hosts {
				h.until(now)
				for range rnd.IntN(3) {
					h.visit(fmt.Sprint("10.0.0.", rnd.IntN(20)), func(v *visitor) {
						if v.granted {
							admitted = append(admitted, v.at)
						}
					})
				}
			}
			i := rnd.IntN(len(hosts))
			parts[i] = 0
			free := uint32(shaper.Whole)
			for _, n := range parts {
				free -= n
			}
			if parts[i] = free; rnd.IntN(2) == 0 {
				parts[i] = rnd.Uint32N(free + 1)
			}
			hosts[i].setShares(shaper.Shares{Lease: steady(parts[i])})
		}
		slices.SortFunc(admitted, cmp.Compare)
		s := sigma{rate: 1000 / float64(leaky.Second)}
		for _, at := range admitted {
			s.add(at, 1)
		}
		if bound := 2*float64(len(hosts)) + 1e-6; s.max > bound {
			t.Errorf("%d hosts: %.2f connections beyond the rate, want at most %.0f", len(hosts), s.max, bound)
		}
		if used := float64(len(admitted)) / (1000 * (now - leaky.Second).Duration().Seconds()); used < 0.5 {
			t.Errorf("%.0f %% of the rate: the test exercises nothing", 100*used)
		}
	}
}

// The bucket of a hot key stays with its gate, which keeps its share, while no connection needs it.
func TestSharedNewConnections_HotWithoutConnections(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "new", Shared: true, NewConnections: shaper.Frequency{N: 100, Per: time.Second}, QueueTimeout: time.Minute, MaxQueue: 10})
	sg, key := r.admission.sharing, shaper.Key{Limit: r.shaper.Policy().State(0).ID + 1}
	r.setShares(shaper.Shares{Lease: steady(shaper.Whole), Given: []shaper.KeyParts{{Key: key, Parts: shaper.Whole / 100}}})
	r.sleep(time.Minute)
	visit := func() *visitor {
		v := r.visit("10.0.0.1", func(*visitor) {})
		if v.granted {
			delete(r.in, v)
			v.release(r.now)
		}
		return v
	}
	if !visit().granted {
		t.Error("the first is not admitted")
	}
	for range 3 {
		sg.report(nil, sg.beginReport(), r.now)
	}
	r.sleep(999 * time.Millisecond) // of the cost of a second at this share, and of 10 ms at that of a cold bucket
	if v := visit(); v.granted {
		t.Error("the next is admitted before its time")
	} else {
		r.admission.withdraw(&v.waiter, r.now)
	}
	r.sleep(2 * time.Millisecond)
	if !visit().granted {
		t.Error("the next is not admitted when it is due")
	}
	r.setShares(shaper.Shares{Lease: steady(shaper.Whole), Cold: []shaper.Key{key}})
	sg.report(nil, sg.beginReport(), r.now)
	sg.report(nil, sg.beginReport(), r.now)
	if n := len(r.admission.byKey) + len(sg.shares); n != 0 {
		t.Errorf("%d gates and shares are left", n)
	}
}

// Gates report what they admit and who waits.
func TestSharedNewConnections_Demand(t *testing.T) {
	r := newAdmissionRig(t, shaper.Limit{Name: "new", Key: shaper.KeyPort, Shared: true, NewConnections: shaper.Frequency{N: 100, Per: time.Second}, QueueTimeout: time.Minute, MaxQueue: 1000})
	sg := r.admission.sharing
	short := 0
	sg.onShort = func() { short++ }
	r.setShares(shaper.Shares{Lease: steady(shaper.Whole / 4)})
	r.sleep(time.Second)
	sg.beginReport()
	r.visitPort("10.0.0.1", 1, func(*visitor) {})
	if short != 0 {
		t.Error("short without a waiter")
	}
	for i := range 6 {
		r.visitPort(fmt.Sprint("10.0.0.", i%3), 1, func(*visitor) {})
	}
	r.visitPort("10.0.0.1", 2, func(*visitor) {})
	r.sleep(100 * time.Millisecond)
	span := sg.beginReport()
	all, _ := sg.report(nil, span, r.now)
	want := shaper.Demand{Key: shaper.Key{Limit: r.shaper.Policy().State(0).ID + 1, Port: 1}, Used: leaky.Second / 100 * 3, Waiting: 3}
	if len(all) != 1 || all[0].Key != want.Key || all[0].Waiting != want.Waiting || all[0].Used.Sub(want.Used) > 1000 || want.Used.Sub(all[0].Used) > 0 {
		t.Errorf("%+v is reported, want %+v", all, want)
	}
	if short != 1 {
		t.Errorf("told %d times, want once", short)
	}
	r.sleep(time.Second)
	for range 2 {
		sg.report(nil, sg.beginReport(), r.now)
	}
	for v := range r.in {
		delete(r.in, v)
		v.release(r.now)
	}
	if n := len(r.admission.byKey) + len(sg.shares); n != 0 {
		t.Errorf("%d gates and shares are left", n)
	}
}
