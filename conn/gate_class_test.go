package conn

import (
	"fmt"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// priorityOfPrefix is a class of the sources of a prefix with a priority.
func priorityOfPrefix(prefix string, priority int) shaper.TrafficClass {
	c := classOf(prefix, 1)
	c.Priority = priority
	return c
}

// load makes sources come for slots that they keep for hold, each every `every` on average, until the rig's clock has
// advanced by d. It returns how many of the connections of each source were served, of how many.
func (r *admissionRig) load(sources []string, every map[string]time.Duration, hold, d time.Duration) (served, asked map[string]int) {
	rnd := testutil.Rand(r.t)
	served, asked = map[string]int{}, map[string]int{}
	random := func(mean time.Duration) time.Duration { return time.Duration(rnd.Int64N(int64(2 * mean))) }
	over := false
	var come func(source string)
	come = func(source string) {
		if over {
			return
		}
		asked[source]++
		r.visit(source, func(v *visitor) {
			if v.granted {
				served[source]++
				r.after(random(hold), v.finish)
			}
		})
		r.after(random(every[source]), func() { come(source) })
	}
	for _, source := range sources {
		r.after(random(every[source]), func() { come(source) })
	}
	r.sleep(d)
	over = true
	r.sleep(time.Minute)
	r.idle()
	return served, asked
}

// At twice the load that a limit can bear, a class of higher priority that asks for less than all is served, and the others share
// what it leaves.
func TestPriority_CriticalIsServedAtDoubleLoad(t *testing.T) {
	r := newClassAdmissionRig(t, []shaper.TrafficClass{priorityOfPrefix("10.0.1.0/24", 10)},
		shaper.Limit{Name: "all", MaxConnections: 20, QueueTimeout: 2 * time.Second, MaxQueue: 100})
	var sources []string
	every := map[string]time.Duration{}
	for i := range 10 { // 20 slots of 100 ms serve 200/s: these ask for 100/s
		source := fmt.Sprint("10.0.1.", i)
		sources, every[source] = append(sources, source), 100*time.Millisecond
	}
	for i := range 300 { // and these for 300/s
		source := fmt.Sprintf("10.1.%d.%d", i/200, i%200)
		sources, every[source] = append(sources, source), time.Second
	}
	served, asked := r.load(sources, every, 100*time.Millisecond, 5*time.Minute)
	var critical, others [2]int
	for i, source := range sources {
		of := &others
		if i < 10 {
			of = &critical
		}
		of[0] += served[source]
		of[1] += asked[source]
	}
	t.Logf("critical: %d of %d served; others: %d of %d", critical[0], critical[1], others[0], others[1])
	if float64(critical[0]) < 0.999*float64(critical[1]) {
		t.Errorf("%d of %d critical connections were served, want 99.9 %%", critical[0], critical[1])
	}
	if float64(others[0]) > 0.5*float64(others[1]) || critical[0]+others[0] < 190*300 {
		t.Errorf("others: %d of %d were served, %d in all, want less than half, and all slots in use", others[0], others[1], critical[0]+others[0])
	}
}

// A waiter of a higher priority displaces one of a lower one when no more may wait, and never the other way round, however few
// wait of each source.
func TestPriority_InFullWaitingLine(t *testing.T) {
	r := newClassAdmissionRig(t, []shaper.TrafficClass{priorityOfPrefix("10.0.1.0/24", 2), priorityOfPrefix("10.0.2.0/24", 1)},
		shaper.Limit{Name: "all", MaxConnections: 1, QueueTimeout: time.Second, MaxQueue: 4})
	first := r.must("10.0.3.9")
	var low []*visitor
	for i := range 4 {
		low = append(low, r.visit(fmt.Sprint("10.0.3.", i), nil))
	}
	high := []*visitor{r.visit("10.0.1.1", nil), r.visit("10.0.1.1", nil), r.visit("10.0.2.1", nil), r.visit("10.0.1.2", nil)}
	for _, v := range low {
		if v.refusedFor != shaper.WaitingFull {
			t.Errorf("one of priority 0 was refused for %v, want to make room", v.refusedFor)
		}
	}
	if v := r.visit("10.0.3.5", nil); v.refusedFor != shaper.WaitingFull {
		t.Error("one of priority 0 took the place of a higher one")
	}
	if v := r.visit("10.0.2.2", nil); v.refusedFor != shaper.WaitingFull {
		t.Error("one of priority 1 took the place of another with no more")
	}
	last := r.visit("10.0.1.3", nil)
	if high[2].refusedFor != shaper.WaitingFull || last.refusedFor != shaper.None {
		t.Error("one of priority 2 did not take the place of one of priority 1")
	}
	r.consistent()
	high[2] = last
	first.finish()
	for range high { // 10.0.1.1 came first, then it has had its turn
		served := 0
		for _, v := range high {
			if v.granted && r.in[v] {
				served++
				v.finish()
				break
			}
		}
		if served != 1 {
			t.Fatal("nothing was served")
		}
	}
	r.idle()
}

// A source of a low priority gains nothing by what it opens, closes and opens again while others of a higher one wait.
func TestPriority_ChurnGainsNothing(t *testing.T) {
	rnd := testutil.Rand(t)
	r := newClassAdmissionRig(t, []shaper.TrafficClass{priorityOfPrefix("10.0.1.0/24", 1)},
		shaper.Limit{Name: "all", MaxConnections: 3, QueueTimeout: time.Second, MaxQueue: 50},
		shaper.Limit{Name: "port", Key: shaper.KeyPort, MaxConnections: 2, QueueTimeout: time.Second, MaxQueue: 50})
	waiting, served := map[*visitor]bool{}, [2]int{}
	for range 20_000 {
		switch n := rnd.IntN(10); {
		case n < 1:
			v := r.visitPort("10.0.1.1", uint16(1+rnd.IntN(2)), nil)
			waiting[v] = true
		case n < 7: // new addresses, that come and go
			v := r.visitPort(fmt.Sprintf("10.9.%d.%d", rnd.IntN(250), rnd.IntN(250)), uint16(1+rnd.IntN(2)), func(v *visitor) {
				if v.granted {
					served[0]++
				}
			})
			if !v.granted && rnd.IntN(2) == 0 {
				v.leave()
			}
			if v.granted {
				for w := range waiting {
					open := true
					for _, gt := range r.admission.byKey {
						if gt.key.Port == w.flow.Port || gt.key.Port == 0 {
							open = open && gt.inFlight <= gt.slots-1
						}
					}
					if w.queue != nil && open && w.flow.Port == v.flow.Port {
						t.Fatal("one of priority 0 was served while one of priority 1 could have been")
					}
				}
			}
		default:
			for v := range r.in {
				v.finish()
				break
			}
		}
		for v := range waiting {
			if v.queue == nil {
				if delete(waiting, v); v.granted {
					served[1]++
				}
			}
		}
		r.sleep(time.Millisecond)
		r.consistent()
	}
	if served[0] == 0 || served[1] == 0 {
		t.Errorf("%v were served, want some of each", served)
	}
}

// A reload changes priorities under a backlog: no waiter is lost, none is refused for it, no slot is leaked, and the order is by the new ones.
func TestPriority_ReloadUnderBacklog(t *testing.T) {
	limit := shaper.Limit{Name: "all", MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 100}
	r := newClassAdmissionRig(t, []shaper.TrafficClass{priorityOfPrefix("10.0.1.0/24", 5)}, limit)
	first := r.must("10.0.9.9")
	var all []*visitor
	for i := range 30 {
		all = append(all, r.visit(fmt.Sprintf("10.0.%d.%d", 1+i%3, i), nil))
	}
	r.swapClasses([]shaper.TrafficClass{priorityOfPrefix("10.0.3.0/24", 7), priorityOfPrefix("10.0.2.0/24", 3)}, limit)
	r.consistent()
	first.finish()
	var order []int
	for range all {
		for i, v := range all {
			if v.refusedFor != shaper.None {
				t.Fatalf("a waiter was refused for %v", v.refusedFor)
			}
			if r.in[v] {
				order = append(order, i)
				v.finish()
				break
			}
		}
	}
	for n, i := range order {
		if want := []int{2, 1, 0}[n/10]; i%3 != want {
			t.Fatalf("served in the order %v, want those of 10.0.3.0/24 first, then 10.0.2.0/24", order)
		}
		if n%10 > 0 && order[n-1] > i {
			t.Fatalf("served in the order %v, want within a priority as they came", order)
		}
	}
	if len(order) != len(all) {
		t.Fatalf("%d of %d were served", len(order), len(all))
	}
	r.idle()
}

// A connection of a higher priority does not wait for what is reserved for one of a lower priority, and its claim ends that.
func TestPriority_EndsReservationsBelow(t *testing.T) {
	a := shaper.Limit{Name: "a", Match: shaper.Match{Port: []shaper.PortRange{{First: 1, Last: 2}}}, MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 100}
	b := shaper.Limit{Name: "b", Match: shaper.Match{Port: []shaper.PortRange{{First: 2, Last: 3}}}, MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 100}
	r := newClassAdmissionRig(t, []shaper.TrafficClass{priorityOfPrefix("10.0.1.0/24", 1)}, a, b)
	in := map[uint16]*visitor{}
	keep := func(source string, port uint16) {
		r.visitPort(source, port, func(v *visitor) { in[port] = v })
	}
	both := r.visitPort("10.0.2.1", 2, nil)
	both.finish()
	keep("10.0.3.1", 1)
	keep("10.0.3.1", 3)
	low := r.visitPort("10.0.2.1", 2, nil)
	for i := range 40 { // each limit is kept full by a source of its own, and they alternate
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
	free := uint16(0) // a limit that is kept free for it
	for _, gt := range r.admission.byKey {
		if gt.inFlight == 0 {
			free = map[string]uint16{"a": 1, "b": 3}[gt.state.Name]
		}
	}
	if free == 0 {
		t.Fatal("nothing is kept free")
	}
	if v := r.visitPort("10.0.5.1", free, nil); v.granted {
		t.Error("one of the same priority took what is reserved")
	}
	if v := r.visitPort("10.0.1.1", free, nil); !v.granted {
		t.Error("one of a higher priority waits for what is reserved for a lower one")
	}
	r.consistent()
}

// Where a connection of a higher priority uses the rate of a gate that is reserved for another one, those that wait there because of the
// reservation wait for the rate from then on.
func TestClasses_RateUsedDuringReservation(t *testing.T) {
	rate := shaper.Limit{Name: "rate", Match: shaper.Match{Port: []shaper.PortRange{{First: 1, Last: 2}}}, NewConnections: shaper.Frequency{N: 50, Per: time.Second}, QueueTimeout: time.Minute, MaxQueue: 100}
	slot := shaper.Limit{Name: "slot", Match: shaper.Match{Port: []shaper.PortRange{{First: 2, Last: 3}}}, MaxConnections: 1, QueueTimeout: time.Minute, MaxQueue: 100}
	r := newClassAdmissionRig(t, []shaper.TrafficClass{priorityOfPrefix("10.0.1.0/24", 1), priorityOfPrefix("10.0.3.0/24", 2)}, rate, slot)
	var holder *visitor
	hold := func(source string) {
		holder = r.visitPort(source, 3, nil)
		if !holder.granted {
			t.Fatal("the slot is not free")
		}
	}
	hold("10.0.2.1")
	mid := r.visitPort("10.0.1.1", 2, nil)
	for _, ms := range []time.Duration{30, 22} { // its turn comes at either gate when the other is shut
		r.visitPort("10.0.2.2", 1, nil)
		holder.finish()
		hold("10.0.3.1")
		r.sleep(ms * time.Millisecond)
	}
	if mid.queue == nil || mid.queue.reservedAt == 0 || mid.queue.gates[mid.queue.pos].state.Name != "slot" {
		t.Fatal("there is no reservation for one that waits for a slot")
	}
	low := r.visitPort("10.0.2.3", 1, nil)
	if low.granted {
		t.Fatal("one of a lower priority took what is reserved")
	}
	if !r.visitPort("10.0.3.2", 1, nil).granted {
		t.Fatal("one of a higher priority waits for what is reserved")
	}
	r.consistent()
}
