package conn

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// classRig has streams that always have something to send, of sources in several classes.
type classRig struct {
	*rig
	limits  []shaper.Limit
	flows   []*shaper.Flow
	streams []*stream
}

func newStreams(t *testing.T, classes []shaper.TrafficClass, limits ...shaper.Limit) *classRig {
	return &classRig{rig: newClassRig(t, classes, limits...), limits: limits}
}

func (r *classRig) add(source string, port uint16) *stream {
	f := flowFrom(source, port)
	f.Connection = uint64(len(r.flows))
	s := &stream{rig: r.rig, left: 1 << 40}
	s.unit = unit{owner: s, path: r.path(f), bytes: 1448, credit: grantCredit}
	r.flows, r.streams = append(r.flows, f), append(r.streams, s)
	r.scheduler.submit(&s.unit, r.now)
	return s
}

// reload changes the classes, as a policy does for connections.
func (r *classRig) reload(limits []shaper.Limit, classes ...shaper.TrafficClass) {
	r.policy = policyOf(r.t, r.shaper, classes, limits...)
	r.shaper.Swap(r.policy, r.now)
	for i, s := range r.streams {
		spec := r.spec(r.flows[i], false)
		if r.scheduler.keepsPath(s.path, spec, r.now) {
			continue
		}
		r.scheduler.withdraw(r.now, &s.unit)
		s.path = r.scheduler.replacePath(&account{}, s.path, r.scheduler.newPath(spec), false, nil, r.now)
		r.scheduler.submit(&s.unit, r.now)
	}
}

// Sources share a bucket by the weights of their classes, whatever number of connections they have: within 2 % over 10 s.
func TestClasses_ShareByWeight(t *testing.T) {
	r := newStreams(t, []shaper.TrafficClass{classOf("10.0.1.0/24", 20), classOf("10.0.2.0/24", 5)}, shaper.Limit{Name: "all", Rate: 80e6})
	sources := map[string]float64{"10.0.1.1": 20, "10.0.2.1": 5, "10.0.2.2": 5, "10.0.3.1": 1}
	moved := map[string][]*stream{}
	for i, source := range []string{"10.0.1.1", "10.0.2.1", "10.0.2.2", "10.0.3.1"} {
		for range 1 + 3*i {
			moved[source] = append(moved[source], r.add(source, 1))
		}
	}
	r.advance(r.now+10*leaky.Second, onTime)
	for source, weight := range sources {
		var sum float64
		for _, s := range moved[source] {
			sum += float64(s.moved)
		}
		if want := 100e6 * weight / 31; sum < 0.98*want || sum > 1.02*want {
			t.Errorf("%s of weight %v moved %.0f bytes in 10 s, want %.0f", source, weight, sum, want)
		}
	}
}

// Classes without traffic take nothing from the others.
func TestClasses_EmptyOnesTakeNothing(t *testing.T) {
	r := newStreams(t, []shaper.TrafficClass{classOf("10.0.1.0/24", 100), classOf("10.0.2.0/24", 3)}, shaper.Limit{Name: "all", Rate: 8e6})
	a, b := r.add("10.0.2.1", 1), r.add("10.0.3.1", 1)
	r.advance(r.now+4*leaky.Second, onTime)
	if a.moved+b.moved < 3.99e6 || a.moved < 3*b.moved-6*1448 || a.moved > 3*b.moved+6*1448 {
		t.Errorf("of 4 MB %d and %d bytes moved, want all, 3 to 1", a.moved, b.moved)
	}
}

// A source with connections of two classes is a source of each. One that leaves and comes back, with all that it has, gains nothing.
func TestClasses_ReconnectingGainsNothing(t *testing.T) {
	const weight = 10
	r := newFairRig(t, t.Fatalf, classOf("10.0.0.1/32", weight))
	r.open("10.0.0.1", slicesOf(1448, 100_000))
	var flows []*fairFlow
	for end := r.now + 5*leaky.Second; r.now < end; {
		for i := 0; i < len(flows); i++ {
			if len(flows[i].left) == 0 {
				flows[i].close()
				flows = append(flows[:i], flows[i+1:]...)
				i--
			}
		}
		for len(flows) < 3 {
			flows = append(flows, r.open("10.0.0.2", []uint64{1448}))
		}
		r.advance(r.now+leaky.Second/1e5, onTime)
	}
	a, b := r.sources.served["10.0.0.1"], r.sources.served["10.0.0.2"]
	if off := (a - weight*b) / 1448; off < -2*weight || off > 2*weight {
		t.Errorf("the source of weight %d got %.0f bytes, one of weight 1 that reconnects %.0f: %.1f units off", weight, a, b, off)
	}
}

// Whatever weights and classes a reload changes under a backlog: the bucket leaves no burst, no stream is lost, and from then on
// service is by the new weights. What a source may gain by a change is a unit.
func TestClasses_ReloadUnderBacklog(t *testing.T) {
	rnd := testutil.Rand(t)
	limit := shaper.Limit{Name: "all", Rate: 80e6}
	sources := []string{"10.0.1.1", "10.0.1.2", "10.0.2.1", "10.0.3.1"}
	r := newStreams(t, nil, limit)
	for _, source := range sources {
		r.add(source, 1)
	}
	changed, moved := 0, make([]float64, len(sources))
	for range 200 {
		var classes []shaper.TrafficClass
		for i, prefix := range []string{"10.0.1.0/24", "10.0.2.0/24", "10.0.1.2/32"} {
			if rnd.IntN(3) > 0 {
				c := classOf(prefix, 1+rnd.IntN(20))
				c.Name = fmt.Sprint("class", rnd.IntN(3), i) // it may have another name
				classes = append(classes, c)
			}
		}
		rnd.Shuffle(len(classes), func(i, j int) { classes[i], classes[j] = classes[j], classes[i] })
		r.reload([]shaper.Limit{limit}, classes...)
		sum := 0.0
		for i, s := range r.streams {
			moved[i] = float64(s.moved)
			sum += float64(r.weightOf(sources[i]))
		}
		r.advance(r.now+leaky.Second/4, onTime)
		all := 0.0
		for i, s := range r.streams {
			got, weight := float64(s.moved)-moved[i], float64(r.weightOf(sources[i]))
			all += got
			want := 80e6 / 8 / 4 * weight / sum
			if most := (3 + 2*harmonicOf(weight, len(sources))) * 1448; got < want-most || got > want+most {
				t.Fatalf("%s of weight %v of %v moved %.0f bytes in 250 ms, want %.0f within %.0f", sources[i], weight, sum, got, want, most)
			}
		}
		changed += len(classes)
		if all < 2.5e6-2*1448 {
			t.Fatalf("%.0f bytes moved in 250 ms, want 2.5 MB", all)
		}
	}
	for q, sent := range r.departures {
		if sent.max > 4*1448 {
			t.Errorf("%s: a burst of %.0f bytes", q.state.Name, sent.max)
		}
	}
	if changed == 0 {
		t.Error("no class was ever there")
	}
	for i, s := range r.streams {
		r.scheduler.withdraw(r.now, &s.unit)
		r.scheduler.releasePath(r.streams[i].path, r.now)
	}
	if n := len(r.scheduler.byKey); n != 0 {
		t.Errorf("%d queues are left", n)
	}
}

// A flood of forged sources in a class gets what one source of the class gets, and none of what classes by source get.
func TestClasses_ForgedSourcesAreOne(t *testing.T) {
	port := shaper.TrafficClass{Name: "dns", Match: shaper.Match{Port: []shaper.PortRange{{First: 53, Last: 53}}}, Weight: 2}
	r := newStreams(t, []shaper.TrafficClass{classOf("10.0.0.0/8", 100), port}, shaper.Limit{Name: "all", Rate: 8e6, MaxDelay: time.Second})
	own := r.add("192.0.2.1", 1) // weight 1
	now := r.now
	for i := range 4000 {
		f := flowFrom(netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)}).String(), 53)
		f.Protocol = shaper.UDP
		r.flood(r.pathOf(f, true), 1, 1448, now)
		now += leaky.Second / 1000
		r.advance(now, onTime)
	}
	if want := 4e6 / 3; float64(own.moved) < 0.98*want || float64(own.moved) > 1.02*want {
		t.Errorf("beside the flood a source of weight 1 moved %d bytes in 4 s, want %.0f", own.moved, want)
	}
}

// A source of much weight that sends less than its part, in bursts, loses nothing to a flood of others: it has as much of the queue, too.
func TestClasses_FloodCostsNothing(t *testing.T) {
	r := newClassRig(t, []shaper.TrafficClass{classOf("10.0.1.0/24", 9)}, shaper.Limit{Name: "all", Rate: 8e6, MaxDelay: 100 * time.Millisecond})
	own, others := r.path(flowFrom("10.0.1.1", 1)), r.path(flowFrom("10.0.2.1", 1))
	worst, lost := leaky.Time(0), 0
	for range 100 { // of 1000 datagrams/s, 800 in bursts of 80, where 100 may wait
		r.flood(others, 500, 1000, r.now)
		for range 80 {
			r.polite(own, &worst, &lost, r.now)
		}
		r.advance(r.now+leaky.Second/10, onTime)
	}
	if most := leaky.FromDuration(92 * time.Millisecond); lost > 0 || worst == 0 || worst > most || r.refused == 0 {
		t.Errorf("%d of 8000 datagrams were lost, and they waited up to %v; the flood lost %d", lost, worst.Duration(), r.refused)
	}
}

// What a source was served before the rate is raised, by a reload or when a quota begins again, costs it no more than a unit: not the time
// that the unit took at the old rate, in which the others would send a million.
func TestClasses_RateChangeFavorsNoSource(t *testing.T) {
	for _, reserve := range []int{0, 30} {
		limits := func(rate uint64) []shaper.Limit {
			l := shaper.Limit{Name: "all", Rate: rate}
			if reserve > 0 {
				l.Reserve = []shaper.Reserve{{Class: "10.0.1.0/24", Percent: reserve}}
			}
			return []shaper.Limit{l}
		}
		classes := []shaper.TrafficClass{classOf("10.0.1.0/24", 1)}
		r := newStreams(t, classes, limits(8e3)...)
		for i := range 4 {
			r.add(fmt.Sprintf("10.0.%d.1", 1+i), 1)
		}
		for round := range leaky.Time(12) {
			r.advance(r.now+(4+round/3)*leaky.Second, onTime)
			r.reload(limits(80e6), classes...)
			var before []float64
			for _, s := range r.streams {
				before = append(before, moved(s))
			}
			r.advance(r.now+leaky.Second/10, onTime)
			for i, s := range r.streams {
				part := max(25, float64(reserve))
				if i > 0 {
					part = (100 - part) / 3
				}
				near(t, fmt.Sprintf("source %d of 4 after change %d with %d%%", i, round, reserve), moved(s)-before[i], 1e6*part/100)
			}
			r.reload(limits(8e3), classes...)
		}
	}
}
