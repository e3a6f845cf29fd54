package conn

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

func reserving(l shaper.Limit, reserve ...shaper.Reserve) shaper.Limit {
	l.QueueTimeout, l.MaxQueue, l.Reserve = time.Minute, 100, reserve
	return l
}

// What is reserved for a class is lent while it does not need it, all of it; when it does, each slot that is freed goes to it until it
// has its part, before those of a higher priority; beyond that the others go first.
func TestReserve_LentAndGivenBack(t *testing.T) {
	low, high := "10.0.1.0/24", "10.0.2.0/24"
	r := newClassAdmissionRig(t, []shaper.TrafficClass{priorityOfPrefix(low, 0), priorityOfPrefix(high, 9)},
		reserving(shaper.Limit{Name: "all", MaxConnections: 10}, shaper.Reserve{Class: low, Percent: 30}))
	var lent []*visitor
	for i := range 10 {
		lent = append(lent, r.must(fmt.Sprint("10.0.2.", i)))
	}
	var waiting []*visitor
	for i := range 20 {
		waiting = append(waiting, r.visit(fmt.Sprint("10.0.2.", 20+i), nil))
	}
	var class []*visitor
	for i := range 5 {
		class = append(class, r.visit(fmt.Sprint("10.0.1.", i), nil))
	}
	served := func(list []*visitor) (n int) {
		for _, v := range list {
			if v.granted {
				n++
			}
		}
		return n
	}
	for n := 1; n <= 10; n++ {
		lent[n-1].finish()
		r.consistent()
		if got, want := served(class), min(n, 3); got != want || served(waiting) != n-want {
			t.Fatalf("after %d connections have ended %d of the class are served, and %d others, want %d", n, got, served(waiting), want)
		}
	}
	class[0].finish() // it is owed again
	if served(class) != 4 {
		t.Error("its slot did not stay with the class")
	}
	class[4].leave() // nobody of the class waits any more: what is reserved is lent
	class[1].finish()
	if len(r.in) != 10 || served(waiting) != 8 {
		t.Errorf("%d are in flight, %d others were served: a slot is kept for nobody", len(r.in), served(waiting))
	}
}

// A new connection of a class that is owed passes a gate at which others wait for what it does not need.
func TestReserve_NewcomerIsOwed(t *testing.T) {
	low := "10.0.1.0/24"
	paced := shaper.Limit{Name: "all", MaxConnections: 2, NewConnections: shaper.Frequency{N: 1, Per: time.Second}}
	r := newClassAdmissionRig(t, []shaper.TrafficClass{priorityOfPrefix(low, 0)}, reserving(paced, shaper.Reserve{Class: low, Percent: 50}))
	first := r.must("10.0.2.1")
	other := r.visit("10.0.2.2", nil)
	owed := r.visit("10.0.1.1", nil)
	r.sleep(1100 * time.Millisecond)
	if !owed.granted || other.granted {
		t.Error("the class that is owed was not first")
	}
	r.sleep(1100 * time.Millisecond)
	r.consistent()
	if other.granted {
		t.Error("more were served than there are slots")
	}
	first.finish()
	r.consistent()
	if !other.granted {
		t.Error("the other one was not served")
	}
}

// A class of low priority with a part of the slots is served at that rate at least, whatever those of higher priority ask for, and
// though more of them wait than may.
func TestReserve_HoldsAgainstPriority(t *testing.T) {
	low := "10.0.1.0/24"
	limit := reserving(shaper.Limit{Name: "all", MaxConnections: 20}, shaper.Reserve{Class: low, Percent: 20})
	limit.QueueTimeout = time.Second
	r := newClassAdmissionRig(t, []shaper.TrafficClass{priorityOfPrefix(low, 0), priorityOfPrefix("10.0.0.0/8", 50)}, limit)
	sources, every := []string{}, map[string]time.Duration{}
	for i := range 3 { // 4 slots of 100 ms: 40/s of these 60/s
		source := fmt.Sprint("10.0.1.", i)
		sources, every[source] = append(sources, source), 50*time.Millisecond
	}
	for i := range 400 {
		source := fmt.Sprintf("10.1.%d.%d", i/200, i%200)
		sources, every[source] = append(sources, source), time.Second
	}
	served, _ := r.load(sources, every, 100*time.Millisecond, 5*time.Minute)
	sum, all := 0, 0
	for i, source := range sources {
		if all += served[source]; i < 3 {
			sum += served[source]
		}
	}
	if rate := float64(sum) / 300; rate < 38 || rate > 42 {
		t.Errorf("%.1f/s of the class were served, want 40", rate)
	}
	if rate := float64(all) / 300; rate < 190 {
		t.Errorf("%.1f/s were served in all, want nearly 200", rate)
	}
}

// Whatever comes, ends, leaves and is reloaded, under crossing limits with other parts each: the caps hold, no slot is kept free for
// nobody or is lost, none of a class passes that is owed nothing while one waits at the same gate alone that is, and all is idle in the end.
func TestReserve_AgainstChaos(t *testing.T) {
	rnd := testutil.Rand(t)
	rounds := 300
	if raceEnabled {
		rounds = 60
	}
	var served, gaveBack, reloads int
	for range rounds {
		slotFor := []shaper.SlotFor{shaper.PerConnection, shaper.PerTurn}[rnd.IntN(2)]
		classes, limits := randomReserves(rnd, slotFor)
		r := newClassAdmissionRig(t, classes, limits...)
		var waiting []*visitor
		for range 300 {
			switch n := rnd.IntN(20); {
			case n < 8:
				source := fmt.Sprintf("10.0.%d.%d", rnd.IntN(5), rnd.IntN(3))
				v := r.visitPort(source, uint16(1+rnd.IntN(3)), nil)
				if v.queue != nil {
					waiting = append(waiting, v)
				}
			case n < 16:
				owed := r.owedAlone()
				for v := range r.in {
					v.finish()
					break
				}
				for _, v := range waiting {
					if v.granted && v.at == r.now && r.in[v] && len(owed) > 0 {
						gaveBack++
					}
				}
				for gt, class := range owed { // what was freed there went to it, or nothing was freed
					if gt.owed(class) && gt.inFlight < gt.slots && gt.first() != nil && gt.reserved.queue == nil {
						t.Fatalf("%s: class %s is owed, waits, and there is a free slot", gt.state.Name, class.Name)
					}
				}
			case n < 17 && len(waiting) > 0:
				if v := waiting[rnd.IntN(len(waiting))]; v.queue != nil {
					v.leave()
				}
			case n < 18 && rnd.IntN(4) == 0:
				classes, next := randomReserves(rnd, slotFor)
				r.swapClasses(classes, next...)
				reloads++
			default:
				r.sleep(time.Duration(rnd.IntN(50)) * time.Millisecond)
			}
			r.consistent()
			r.countsByClass()
		}
		for len(r.in) > 0 {
			for v := range r.in {
				served++
				v.finish()
				break
			}
			r.sleep(time.Millisecond)
		}
		for _, v := range waiting {
			if v.queue != nil {
				t.Fatalf("a waiter was lost: %+v", v.flow)
			}
		}
		r.idle()
	}
	if served == 0 || gaveBack == 0 || reloads == 0 {
		t.Errorf("%d served, %d when a class was owed, %d reloads", served, gaveBack, reloads)
	}
}

// owedAlone returns the gates at which a class waits that is owed, with one such class.
func (r *admissionRig) owedAlone() map[*gate]*shaper.ClassState {
	owed := map[*gate]*shaper.ClassState{}
	for _, gt := range r.admission.byKey {
		if first := gt.first(); first != nil && gt.owed(first.key.class) {
			owed[gt] = first.key.class
		}
	}
	return owed
}

// countsByClass checks that gates count the connections of each class that they have.
func (r *admissionRig) countsByClass() {
	r.t.Helper()
	type at struct {
		gate  *gate
		class *shaper.ClassState
	}
	want := map[at]int{}
	for v := range r.in {
		for _, gt := range v.held {
			want[at{gt, v.precedence.class}]++
		}
	}
	for _, gt := range r.admission.byKey {
		sum := 0
		for i := range gt.lines {
			l := &gt.lines[i]
			if l.inFlight != want[at{gt, l.class}] || l.inFlight == 0 && len(l.queued) == 0 {
				r.t.Fatalf("%s counts %d of class %s, want %d", gt.state.Name, l.inFlight, l.class.Name, want[at{gt, l.class}])
			}
			if percent := gt.limit.ReservedFor(l.class.Name); l.reserved != percent {
				r.t.Fatalf("%s reserves %d%% for class %s, want %d%%", gt.state.Name, l.reserved, l.class.Name, percent)
			}
			sum += l.inFlight
		}
		if sum != gt.inFlight {
			r.t.Fatalf("%s counts %d in its classes, %d in all", gt.state.Name, sum, gt.inFlight)
		}
	}
}

// randomReserves draws classes and crossing limits with parts for them.
func randomReserves(rnd *rand.Rand, slotFor shaper.SlotFor) (classes []shaper.TrafficClass, limits []shaper.Limit) {
	for _, i := range rnd.Perm(4)[:1+rnd.IntN(4)] {
		c := priorityOfPrefix(fmt.Sprintf("10.0.%d.0/24", i), rnd.IntN(3))
		c.Name = fmt.Sprint("class", i)
		classes = append(classes, c)
	}
	for i, key := range []shaper.Fields{0, shaper.KeyPort, shaper.KeySource}[:1+rnd.IntN(3)] {
		l := reserving(shaper.Limit{Name: fmt.Sprint("limit", i), Key: key, IPv4Prefix: 24, IPv6Prefix: 64, MaxConnections: 2 + rnd.IntN(6)})
		if l.SlotFor = slotFor; slotFor.InTurns() {
			l.Match.Protocol, l.TurnGap = shaper.TCP, time.Millisecond
		}
		if key != shaper.KeySource {
			l.Turns = [][]shaper.TurnBy{nil, byPrefix}[rnd.IntN(2)]
		}
		left := 100
		for _, c := range classes {
			if percent := rnd.IntN(left + 1); percent*l.MaxConnections >= 100 && rnd.IntN(3) > 0 {
				l.Reserve = append(l.Reserve, shaper.Reserve{Class: c.Name, Percent: percent})
				left -= percent
			}
		}
		limits = append(limits, l)
	}
	return classes, limits
}

// Connections that open, leave and come back do not keep others from a slot for longer than they wait themselves.
func TestReserve_ComingAndGoingKeepsNothingFree(t *testing.T) {
	low := "10.0.1.0/24"
	r := newClassAdmissionRig(t, []shaper.TrafficClass{priorityOfPrefix(low, 0)},
		reserving(shaper.Limit{Name: "all", MaxConnections: 4}, shaper.Reserve{Class: low, Percent: 100}))
	rnd := testutil.Rand(t)
	busy, total := leaky.Time(0), leaky.Time(0)
	for i := range 5000 {
		r.visit(fmt.Sprintf("10.0.2.%d", i%50), nil)
		if v := r.visit(fmt.Sprintf("10.0.1.%d", rnd.IntN(50)), nil); v.granted {
			v.finish()
		} else {
			v.leave()
		}
		before := r.now
		r.sleep(time.Duration(rnd.IntN(3)) * time.Millisecond)
		total += r.now - before
		if len(r.in) == 4 {
			busy += r.now - before
		}
		if rnd.IntN(2) == 0 {
			for v := range r.in {
				v.finish()
				break
			}
		}
		r.consistent()
	}
	if busy < total*9/10 {
		t.Errorf("all slots were in use for %v of %v", busy.Duration(), total.Duration())
	}
}
