package conn

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// floorOracle knows what parts of all service classes must have.
type floorOracle struct {
	rig     *fairRig
	classes []*floorClass
	all     float64
	heavy   float64 // the most that all backlogged sources weighed at once
}

type floorClass struct {
	prefix   netip.Prefix
	part     float64
	members  *ideal
	served   float64
	lag, low float64 // what the class should have received less what it did, and the least of that since it became backlogged
}

func (o *floorOracle) classOf(source string) *floorClass {
	for _, c := range o.classes {
		if c.prefix.Contains(netip.MustParseAddr(source)) {
			return c
		}
	}
	return nil
}

// update is called after a source became backlogged, or is not any more.
func (o *floorOracle) update() {
	if o == nil {
		return
	}
	heavy := 0.0
	for name := range o.rig.sources.waiting {
		heavy += o.rig.sources.weight(name)
	}
	for _, c := range o.classes {
		for name := range c.members.waiting {
			heavy += c.members.weight(name)
		}
		if len(c.members.waiting) == 0 {
			c.low = c.lag
		}
	}
	o.heavy = max(o.heavy, heavy)
}

// serve records that a source received n. A class has its part of all service while it is backlogged, less one unit, and the part of
// one unit of each class, and of one more.
func (o *floorOracle) serve(source string, n float64) {
	if o == nil {
		return
	}
	o.all += n
	if own := o.classOf(source); own != nil {
		own.served += n
	}
	for _, c := range o.classes {
		c.lag = c.part*o.all - c.served
		if len(c.members.waiting) == 0 {
			c.low = c.lag
		}
		c.low = min(c.low, c.lag)
		if most := 1448 * (1 + c.part*float64(1+len(o.classes))); c.lag-c.low > most+1 {
			o.rig.sources.fatalf("class %v got %.2f units less than its part, want at most %.2f", c.prefix, (c.lag-c.low)/1448, most/1448)
		}
	}
}

// newFloorRig is a fairRig whose limit reserves parts for classes.
func newFloorRig(t *testing.T, fatalf func(string, ...any), reserve map[string]int, classes ...shaper.TrafficClass) *fairRig {
	limit := shaper.Limit{Name: "all", Rate: 8e6}
	o := &floorOracle{}
	for _, c := range classes {
		if reserve[c.Name] > 0 {
			limit.Reserve = append(limit.Reserve, shaper.Reserve{Class: c.Name, Percent: reserve[c.Name]})
			o.classes = append(o.classes, &floorClass{prefix: c.Match.Source[0], part: float64(reserve[c.Name]) / 100, members: newIdeal(fatalf)})
		}
	}
	r := &fairRig{rig: newClassRig(t, classes, limit), sources: newIdeal(fatalf), flows: map[string]*ideal{}, waits: map[string]map[*fairFlow]bool{}, floors: o}
	o.rig, r.sources.beside = r, &o.heavy
	return r
}

// Whatever sources and flows open, send, close and reset: a class has its part while it is backlogged, its sources share it fairly, and the
// sources of no such class differ by no more than without.
func TestReserveRate_AgainstIdeal(t *testing.T) {
	testChurnAgainstIdeal(t, func(rt *rapid.T) *fairRig {
		var classes []shaper.TrafficClass
		reserve, left := map[string]int{}, 100
		for _, prefix := range []string{"10.1.0.1/32", "10.1.0.2/31", "10.2.0.0/16", "10.0.0.1/32", "10.0.0.2/31"} {
			classes = append(classes, classOf(prefix, rapid.IntRange(1, 8).Draw(rt, "weight of "+prefix)))
			if rapid.Bool().Draw(rt, "reserves for "+prefix) {
				reserve[prefix] = rapid.IntRange(0, left).Draw(rt, "percent")
				left -= reserve[prefix]
			}
		}
		return newFloorRig(t, rt.Fatalf, reserve, classes...)
	})
}

// moved is what streams moved.
func moved(streams ...*stream) (sum float64) {
	for _, s := range streams {
		sum += float64(s.moved)
	}
	return sum
}

func near(t *testing.T, what string, got, want float64) {
	t.Helper()
	if got < 0.98*want-6*1448 || got > 1.02*want+6*1448 {
		t.Errorf("%s: %.0f bytes, want %.0f", what, got, want)
	}
}

// A class has the part of the rate that is reserved for it against any number of others, its sources share that, the others share the
// rest, and who sends alone has all.
func TestReserveRate_HoldsAgainstMany(t *testing.T) {
	limit := shaper.Limit{Name: "all", Rate: 80e6, Reserve: []shaper.Reserve{{Class: "10.0.1.0/24", Percent: 20}}}
	r := newStreams(t, []shaper.TrafficClass{classOf("10.0.1.0/24", 1)}, limit)
	var others, class []*stream
	for i := range 99 {
		others = append(others, r.add(fmt.Sprint("10.0.2.", i), 1))
	}
	r.advance(r.now+leaky.Second, onTime)
	near(t, "others while the class has nothing", moved(others...), 10e6)
	before := moved(others...)
	class = append(class, r.add("10.0.1.1", 1), r.add("10.0.1.2", 1), r.add("10.0.1.2", 1))
	r.advance(r.now+10*leaky.Second, onTime)
	near(t, "the class", moved(class...), 20e6)
	near(t, "a source with one connection", moved(class[0]), 10e6)
	near(t, "a source with two connections", moved(class[1:]...), 10e6)
	near(t, "99 others", moved(others...)-before, 80e6)
	for _, s := range others {
		near(t, "one of 99", moved(s), 90e6/99)
	}
	for _, s := range others {
		r.scheduler.withdraw(r.now, &s.unit)
	}
	before = moved(class...)
	r.advance(r.now+leaky.Second, onTime)
	near(t, "the class alone", moved(class...)-before, 10e6)
}

// A class that has more by its weights has that, and no more.
func TestReserveRate_IsLessThanWeights(t *testing.T) {
	limit := shaper.Limit{Name: "all", Rate: 80e6, Reserve: []shaper.Reserve{{Class: "10.0.1.0/24", Percent: 20}}}
	r := newStreams(t, []shaper.TrafficClass{classOf("10.0.1.0/24", 3)}, limit)
	class, other := r.add("10.0.1.1", 1), r.add("10.0.2.1", 1)
	r.advance(r.now+4*leaky.Second, onTime)
	near(t, "the class", moved(class), 30e6)
	near(t, "the other", moved(other), 10e6)
}

// A class whose source opens a connection for each unit, or comes and goes, has no more than its part by that.
func TestReserveRate_ReconnectingGainsNothing(t *testing.T) {
	for _, atOnce := range []int{1, 4} {
		r := newFloorRig(t, t.Fatalf, map[string]int{"10.1.0.0/16": 25}, classOf("10.1.0.0/16", 1))
		r.open("10.0.0.1", slicesOf(1448, 100_000))
		for i := range 9 {
			r.open(fmt.Sprint("10.0.1.", i), slicesOf(1448, 100_000))
		}
		var flows []*fairFlow
		served := 0.0
		for end := r.now + 5*leaky.Second; r.now < end; {
			for i := 0; i < len(flows); i++ {
				if len(flows[i].left) == 0 {
					flows[i].close()
					flows = append(flows[:i], flows[i+1:]...)
					i--
				}
			}
			for len(flows) < atOnce {
				flows = append(flows, r.open(netip.AddrFrom4([4]byte{10, 1, byte(r.ids >> 8), byte(r.ids)}).String(), []uint64{1448}))
			}
			r.advance(r.now+leaky.Second/1e5, onTime)
		}
		served = r.floors.classes[0].served
		part := 0.25
		if byWeight := float64(atOnce) / float64(10+atOnce); byWeight > part {
			part = byWeight
		}
		if want := part * r.floors.all; served > want+10*1448 || served < want-10*1448 {
			t.Errorf("%d at once: the class got %.0f bytes of %.0f, want %.0f", atOnce, served, r.floors.all, want)
		}
		for _, q := range r.scheduler.byKey {
			if n := len(q.sources); n > 200 {
				t.Errorf("%d idle sources are kept", n)
			}
		}
	}
}

// Datagrams of a class within its part are not lost, and wait for little, whatever number of others flood the bucket.
func TestReserveRate_FloodCostsNothing(t *testing.T) {
	limit := shaper.Limit{Name: "all", Rate: 8e6, MaxDelay: 100 * time.Millisecond, Reserve: []shaper.Reserve{{Class: "10.0.1.0/24", Percent: 20}}}
	r := newClassRig(t, []shaper.TrafficClass{classOf("10.0.1.0/24", 1)}, limit)
	own := r.path(flowFrom("10.0.1.1", 1))
	var others [][]hop
	for i := range 1000 {
		others = append(others, r.path(flowFrom(fmt.Sprintf("10.0.%d.%d", 2+i/200, i%200), 1)))
	}
	worst, lost := leaky.Time(0), 0
	for round := range 100 { // of 1000 datagrams/s, 200 in bursts of 20, where 100 may wait
		for i := range others {
			r.flood(others[(i+round)%len(others)], 1, 1000, r.now)
		}
		for range 20 {
			r.polite(own, &worst, &lost, r.now)
		}
		r.advance(r.now+leaky.Second/10, onTime)
	}
	if most := leaky.FromDuration(105 * time.Millisecond); lost > 0 || worst == 0 || worst > most || r.refused < 50_000 {
		t.Errorf("%d of 2000 datagrams were lost, and they waited up to %v; the flood lost %d", lost, worst.Duration(), r.refused)
	}
}

// Where so few datagrams may wait that the part of a class is less than one, one of a class that is owed may nevertheless. Small datagrams of
// others do not take its place.
func TestReserveRate_FewMayWait(t *testing.T) {
	for _, delay := range []time.Duration{time.Millisecond, 3 * time.Millisecond, 20 * time.Millisecond} {
		limit := shaper.Limit{Name: "all", Rate: 8e6, MaxDelay: delay, Reserve: []shaper.Reserve{{Class: "10.0.1.0/24", Percent: 20}}}
		r := newClassRig(t, []shaper.TrafficClass{classOf("10.0.1.0/24", 1)}, limit)
		own := r.path(flowFrom("10.0.1.1", 1))
		var others [][]hop
		for i := range 1000 {
			others = append(others, r.path(flowFrom(fmt.Sprintf("10.0.%d.%d", 2+i/200, i%200), 1)))
		}
		worst, lost := leaky.Time(0), 0
		for round := range 5000 {
			if round%7 == 0 { // 143 of 1000 datagrams/s
				r.polite(own, &worst, &lost, r.now)
			}
			for i := range 10 {
				r.flood(others[(10*round+i)%len(others)], 1, uint64(100+900*(round/500%2)), r.now)
			}
			r.advance(r.now+leaky.Second/1000, onTime)
		}
		if lost > 0 || r.refused < 10_000 {
			t.Errorf("max_delay %v: %d of 715 datagrams were lost, and %d of the flood", delay, lost, r.refused)
		}
	}
}

// Whatever parts a reload gives and takes under a backlog: each class has its part from then on, no stream is lost, and no burst leaves.
func TestReserveRate_ReloadUnderBacklog(t *testing.T) {
	rnd := testutil.Rand(t)
	prefixes := []string{"10.0.1.0/24", "10.0.2.0/24"}
	classes := []shaper.TrafficClass{classOf(prefixes[0], 1), classOf(prefixes[1], 2)}
	r := newStreams(t, classes, shaper.Limit{Name: "all", Rate: 80e6})
	members := map[string][]*stream{}
	for i := range 20 {
		r.add(fmt.Sprint("10.0.9.", i), 1)
	}
	for _, prefix := range prefixes {
		for i := range 2 {
			members[prefix] = append(members[prefix], r.add(prefix[:len(prefix)-4]+fmt.Sprint(1+i), 1))
		}
	}
	held := 0
	for range 100 {
		limit := shaper.Limit{Name: "all", Rate: 80e6}
		reserve := map[string]int{}
		for _, prefix := range prefixes {
			if percent := rnd.IntN(50); percent > 0 && rnd.IntN(3) > 0 {
				reserve[prefix] = percent
				limit.Reserve = append(limit.Reserve, shaper.Reserve{Class: prefix, Percent: percent})
			}
		}
		r.reload([]shaper.Limit{limit}, classes...)
		before := map[string]float64{}
		for prefix, streams := range members {
			before[prefix] = moved(streams...)
		}
		r.advance(r.now+leaky.Second/4, onTime)
		for prefix, streams := range members {
			got := moved(streams...) - before[prefix]
			if want := 2.5e6 * float64(reserve[prefix]) / 100; got < want-6*1448 {
				t.Fatalf("class %s with %d%% of 2.5 MB got %.0f bytes", prefix, reserve[prefix], got)
			} else if want > 1.5*2.5e6*4/26 {
				held++
				if got > 1.03*want+8*1448 { // where turns of others are in bunches it may have one between them
					t.Fatalf("class %s with %d%% of 2.5 MB got %.0f bytes", prefix, reserve[prefix], got)
				}
			}
		}
	}
	if held == 0 {
		t.Error("no part was ever more than what the weights give")
	}
	for q, sent := range r.departures {
		if sent.max > 4*1448 {
			t.Errorf("%s: a burst of %.0f bytes", q.state.Name, sent.max)
		}
	}
	for _, s := range r.streams {
		r.scheduler.withdraw(r.now, &s.unit)
		r.scheduler.releasePath(s.path, r.now)
	}
	if n := len(r.scheduler.byKey); n != 0 {
		t.Errorf("%d queues are left", n)
	}
}
