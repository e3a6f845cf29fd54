package conn

import (
	"fmt"
	"maps"
	"math/bits"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// cycle keeps one connection of source to port open, each for d. It returns the count of admissions.
func (r *admissionRig) cycle(source string, port uint16, d time.Duration) *int {
	served := new(int)
	var visit func()
	visit = func() {
		r.visitPort(source, port, func(v *visitor) {
			if !v.granted {
				r.after(d, visit)
				return
			}
			*served++
			r.after(d, func() { v.finish(); visit() })
		})
	}
	visit()
	return served
}

// crossing returns two limits that overlap, neither within the other: on one port, and on one network.
func crossing(limit shaper.Limit) (port, network shaper.Limit) {
	limit.QueueTimeout, limit.MaxQueue = time.Hour, 100
	port, network = limit, limit
	port.Name, port.Match.Port = "port", []shaper.PortRange{{First: 80, Last: 80}}
	network.Name, network.Match.Source = "network", []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
	return port, network
}

// A source that needs two slots, both always taken by sources that need only one, is served too. (It
// never was, since both are never free at one instant.)
func TestCrossingGates_NoStarvation(t *testing.T) {
	for name, limit := range map[string]shaper.Limit{
		"caps":  {MaxConnections: 1},
		"paces": {NewConnections: shaper.Frequency{N: 100, Per: time.Second}},
	} {
		t.Run(name, func(t *testing.T) {
			port, network := crossing(limit)
			r := newAdmissionRig(t, port, network)
			const stays = 10 * time.Millisecond
			alone := []*int{r.cycle("10.2.0.1", 80, stays), r.cycle("10.2.0.2", 80, stays)}
			r.sleep(stays / 3)
			alone = append(alone, r.cycle("10.1.0.2", 81, stays), r.cycle("10.1.0.3", 82, stays))
			both := r.cycle("10.1.0.1", 80, stays)
			r.sleep(time.Minute)
			if *both < 1000 {
				t.Errorf("the source that needs both was served %d times, of 6000 at each", *both)
			}
			for i, n := range alone {
				if *n < 6000*3/4/2-*both/2-100 {
					t.Errorf("source %d of those that need one was served %d times", i, *n)
				}
			}
			r.consistent()
		})
	}
}

// crossroads are gates that overlap, none within another, and sources that return at once. A port is
// the set of gates that apply to it, as bits; the bit after those of the limits is the gate of the
// downstreams.
type crossroads struct {
	limits      []shaper.Limit
	downstreams int      // their capacity, or 0 for none
	ports       []uint16 // of one source each
	durations   func(*rand.Rand) time.Duration
	seed        uint64
}

const longestHold = 20 * time.Millisecond // of a connection, and between connections of a rate

// uniformDuration is the usual duration of a connection.
func uniformDuration(rnd *rand.Rand) time.Duration {
	return time.Duration(rnd.Int64N(int64(longestHold)))
}

// longestWait returns the longest wait of a source and the longest reservation within d.
func (c *crossroads) longestWait(t testing.TB, d time.Duration) (wait, reserved time.Duration) {
	pooled := uint16(1) << len(c.limits)
	for i := range c.limits {
		l := &c.limits[i]
		l.Name, l.QueueTimeout, l.MaxQueue = fmt.Sprint(i), time.Hour, 1000
		for port := range 2 * pooled {
			if port&(1<<i) != 0 {
				l.Match.Port = append(l.Match.Port, shaper.PortRange{First: port, Last: port})
			}
		}
	}
	r := newAdmissionRig(t, c.limits...)
	ln := r.newMultiListener(shaper.Listener{Downstream: []shaper.Downstream{{MaxConnections: c.downstreams}}, MaxQueue: 1000, ConnectTimeout: time.Hour}, "10.9.0.1")
	rnd := rand.New(rand.NewPCG(c.seed, 0))
	waiting := map[*visitor]bool{}
	for i, port := range c.ports {
		var visit func()
		visit = func() {
			if r.listener = nil; port&pooled != 0 {
				r.listener = ln
			}
			v := r.visitPort(fmt.Sprint("10.0.0.", i+1), port, func(v *visitor) {
				delete(waiting, v)
				wait = max(wait, (r.now - v.arrived).Duration())
				r.after(c.durations(rnd), func() { v.finish(); visit() })
			})
			if v.queue != nil {
				waiting[v] = true
			}
		}
		r.after(c.durations(rnd), visit)
	}
	since := map[*waitQueue]leaky.Time{}
	for end := r.now + leaky.FromDuration(d); r.step(end); {
		for _, q := range r.admission.queues {
			if was := since[q]; was != 0 && was != q.reservedAt {
				reserved = max(reserved, (r.now - was).Duration())
			}
			since[q] = q.reservedAt
		}
	}
	r.consistent()
	for v := range waiting {
		wait = max(wait, (r.now - v.arrived).Duration())
	}
	return wait, reserved
}

// check compares the waits to the bound of the package comment. The most ever seen is a third of it.
func (c *crossroads) check(t rapid.TB, wait, reserved time.Duration) {
	var same, several, each int
	for i := range len(c.limits) + 1 {
		here := 0
		for _, port := range c.ports {
			here += int(port >> i & 1)
		}
		same = max(same, here)
	}
	for _, port := range c.ports {
		if n := bits.OnesCount16(port); n > 1 {
			several, each = several+1, max(each, n)
		}
	}
	most := time.Duration(several) * longestHold
	if c.downstreams > 0 {
		most *= 2
	}
	if reserved > most {
		t.Errorf("a reservation lasts %v, want %v at most", reserved, most)
	}
	most = time.Duration(4*same+3*(each+4)*several)*longestHold/3 + 13*time.Duration(several)*reserved
	if wait > most {
		t.Errorf("a source waits for %v, want %v at most", wait, most)
	}
}

var (
	paced  = shaper.Limit{NewConnections: shaper.Frequency{N: 1, Per: longestHold}}
	single = shaper.Limit{MaxConnections: 1}
	double = shaper.Limit{MaxConnections: 2}
)

// However gates cross, and whenever slots become free, a source that needs several is served within
// the bound.
func TestCrossingGates_WaitIsBounded(t *testing.T) {
	stays := map[string]func(*rand.Rand) time.Duration{
		"evenly": uniformDuration,
		"long": func(rnd *rand.Rand) time.Duration {
			return longestHold - 1 - time.Duration(rnd.Int64N(int64(longestHold/50)))
		},
		"long or short": func(rnd *rand.Rand) time.Duration {
			if rnd.IntN(2) == 0 {
				return longestHold - 1 - time.Duration(rnd.Int64N(1000))
			}
			return time.Duration(rnd.Int64N(int64(longestHold / 4)))
		},
	}
	names := slices.Sorted(maps.Keys(stays))
	rapid.Check(t, func(rt *rapid.T) {
		c := crossroads{seed: rapid.Uint64().Draw(rt, "seed"), durations: stays[rapid.SampledFrom(names).Draw(rt, "stays")]}
		gates := rapid.IntRange(2, 3).Draw(rt, "gates")
		for range gates {
			c.limits = append(c.limits, rapid.SampledFrom([]shaper.Limit{paced, single, double}).Draw(rt, "limit"))
		}
		if c.downstreams = rapid.IntRange(0, 2).Draw(rt, "downstreams"); c.downstreams > 0 {
			gates++
		}
		for i := range gates {
			for range rapid.IntRange(1, 3).Draw(rt, "alone") {
				c.ports = append(c.ports, 1<<i)
			}
		}
		several := rapid.Uint16Range(3, 1<<gates-1).Filter(func(port uint16) bool { return port&(port-1) != 0 })
		for range rapid.IntRange(1, 5).Draw(rt, "several") {
			c.ports = append(c.ports, several.Draw(rt, "port"))
		}
		wait, reserved := c.longestWait(t, 150*longestHold)
		c.check(rt, wait, reserved)
	})
}

// One source had a gate reserved while its other gates were to be reserved for another one, which
// could not begin because it needed the first gate too. All sources that need several gates waited
// until the reservation had lapsed and the gate had rested: 2.8 s, of 30 turns each.
func TestReservation_NotBlockedByAnother(t *testing.T) {
	c := crossroads{
		limits:    []shaper.Limit{paced, double, single},
		ports:     []uint16{1, 1, 2, 2, 2, 4, 4, 4, 7, 6, 7, 7},
		durations: uniformDuration,
		seed:      0x2f,
	}
	if wait, _ := c.longestWait(t, 10*time.Second); wait > time.Second {
		t.Errorf("a source waits for %v, want %v at most", wait, time.Second)
	}
}

// across returns two limits: port 80 is under the first, 81 under the second, 82 under both.
func across(first, second shaper.Limit) []shaper.Limit {
	for i, l := range []*shaper.Limit{&first, &second} {
		l.Name, l.QueueTimeout, l.MaxQueue = []string{"a", "b"}[i], time.Hour, 100
		l.Match.Port = []shaper.PortRange{{First: 80 + uint16(i), Last: 80 + uint16(i)}, {First: 82, Last: 82}}
	}
	return []shaper.Limit{first, second}
}

// The reservation of a source is not lost while other connections of the source are served. (A
// connection that needed both gates waited forever.)
func TestReservation_KeptWhileSourceIsServed(t *testing.T) {
	r := newAdmissionRig(t, across(double, double)...)
	const ms, hog = time.Millisecond, "10.0.0.1"
	// keep has hog and other always waiting at a port. Two are admitted at once; one leaves after 9
	// ms, the other after 10 ms.
	keep := func(other string, port uint16) {
		var in []*visitor
		come := func(source string) { r.visitPort(source, port, func(v *visitor) { in = append(in, v) }) }
		for range 3 {
			come(hog)
			come(other)
		}
		var round func()
		round = func() {
			if len(in) < 2 {
				return // the one that needs both was admitted
			}
			a, b := in[0], in[1]
			in = in[2:]
			r.after(9*ms, func() { b.finish() })
			r.after(10*ms, func() {
				a.finish()
				come(hog)
				come(other)
				round()
			})
		}
		round()
	}
	keep("10.0.0.2", 80)
	r.sleep(5 * ms)
	keep("10.0.0.3", 81)
	both := r.visitPort(hog, 82, nil)
	r.sleep(10 * time.Second)
	if !both.granted {
		t.Error("it waits for 10 s, of 1000 services at each gate")
	}
}

// reserveNow makes the reservation for q that failed attempts would lead to.
func (r *admissionRig) reserveNow(q *waitQueue) {
	q.firstFailure, q.claimTicket = r.now, r.admission.lastTicket.Add(1)
	r.sleep(time.Millisecond)
	for i, gt := range q.gates {
		gt.reserved.claims.Push(&q.waits[i])
	}
	r.admission.reserve(q.gates[0], r.now)
	if q.reservedAt == 0 {
		r.t.Fatal("nothing is reserved")
	}
	q.lapse.Fire = func(leaky.Time) {}
}

// A source with a reservation does not overtake one with an earlier ticket, if both could be served at
// one instant.
func TestReservation_DoesNotOvertake(t *testing.T) {
	limits := across(paced, paced)
	c := single
	c.Name, c.QueueTimeout, c.MaxQueue = "c", time.Hour, 100
	c.Match.Port = []shaper.PortRange{{First: 83, Last: 84}}
	limits[0].Match.Port = append(limits[0].Match.Port, shaper.PortRange{First: 83, Last: 83})
	r := newAdmissionRig(t, append(limits, c)...)
	var order []string
	say := func(s string) func(*visitor) { return func(*visitor) { order = append(order, s) } }
	r.visitPort("10.0.0.9", 82, nil).finish() // both a and b admit the next one after 20 ms
	at84 := r.visitPort("10.0.0.8", 84, nil)
	r.visitPort("10.0.0.1", 83, say("first")) // waits for c
	q := r.visitPort("10.0.0.2", 82, say("second")).queue
	r.admission.moveTo(q, 1, shaper.ByNewConnections, r.now) // from a to b
	r.reserveNow(q)
	at84.finish() // the first one waits for a
	a := q.gates[0]
	r.wheel.Cancel(&a.timer)
	r.admission.armPacer(a, r.now) // after that of b
	r.sleep(longestHold)
	if len(order) == 0 || order[0] != "first" {
		t.Errorf("served: %v, want the first one, which has the earlier ticket", order)
	}
}

// A reservation ends with its queue, and others get the slot.
func TestReservation_EndsWithItsQueue(t *testing.T) {
	port, network := crossing(shaper.Limit{MaxConnections: 1})
	for name, end := range map[string]func(r *admissionRig, v *visitor){
		"it leaves":   func(_ *admissionRig, v *visitor) { v.leave() },
		"a reload":    func(r *admissionRig, _ *visitor) { r.swap(port, network) },
		"another cap": func(r *admissionRig, _ *visitor) { r.swap(network) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newAdmissionRig(t, port, network)
			var in []*visitor
			then := func(v *visitor) { in = append(in, v) }
			alone, other := r.must("10.2.0.1"), r.visitPort("10.1.0.2", 81, nil)
			alone.finish()
			r.visitPort("10.2.0.1", 80, then)
			both := r.visitPort("10.1.0.1", 80, nil)
			for both.queue.gates[0].reserved.queue == nil && both.queue.gates[1].reserved.queue == nil {
				r.visitPort("10.2.0.1", 80, then)
				r.visitPort("10.1.0.2", 81, func(v *visitor) { other = v })
				r.sleep(time.Millisecond)
				in[0].finish()
				in = in[1:]
				r.sleep(time.Millisecond)
				other.finish()
			}
			r.visitPort("10.2.0.3", 80, then)
			end(r, both)
			r.consistent()
			if both.queue != nil && len(in) == 0 {
				t.Error("the reserved slot was not granted")
			}
			for len(r.in) > 0 {
				for v := range r.in {
					v.finish()
				}
			}
			r.idle()
		})
	}
}

// A slot is reserved for at most a quarter of the time, however rarely the other slots become free,
// and not at all if they never do.
func TestReservation_CostsAtMostAQuarter(t *testing.T) {
	for name, free := range map[string]time.Duration{"never": 0, "seldom": time.Second / 10} {
		t.Run(name, func(t *testing.T) {
			port, network := crossing(shaper.Limit{MaxConnections: 1})
			r := newAdmissionRig(t, port, network)
			served := r.cycle("10.2.0.1", 80, time.Millisecond)
			r.cycle("10.2.0.2", 80, time.Millisecond)
			if free == 0 {
				r.visitPort("10.1.0.9", 81, nil)
			} else {
				r.cycle("10.1.0.9", 81, free)
				r.cycle("10.1.0.8", 81, free)
			}
			for i := range 10 {
				r.cycle(fmt.Sprint("10.1.1.", i), 80, time.Millisecond)
			}
			r.sleep(6 * time.Second)
			least := 3000 * 98 / 100
			if free > 0 {
				least = 3000 * 74 / 100
			}
			if *served < least {
				t.Errorf("a source was served %d times, want at least %d of 3000", *served, least)
			}
		})
	}
}
