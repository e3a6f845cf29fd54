package conn

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// Who has a connection to a port where many share little has the rest of its own rate for
// all else that it does.
func TestWhatWaitsInOneLineHoldsUpNoOther(t *testing.T) {
	r := newRig(t,
		shaper.Limit{Name: "per-source", Key: shaper.KeySource, Rate: 8e6},
		shaper.Limit{Name: "reports", Match: shaper.Match{Port: []shaper.PortRange{{First: 9000, Last: 9000}}}, Rate: 80e3})
	add := func(source string, port uint16) *stream {
		s := &stream{rig: r, left: 1 << 40}
		s.unit = unit{owner: s, path: r.path(flowFrom(source, port)), bytes: 1448, credit: grantCredit}
		r.lines.submit(&s.unit, leaky.Second)
		return s
	}
	var reports []*stream
	for i := range 51 {
		reports = append(reports, add(fmt.Sprintf("10.0.0.%d", i+1), 9000))
	}
	mixed, alone := add("10.0.0.1", 5432), add("10.0.1.1", 5432)
	r.advance(101*leaky.Second, onTime)
	// One unit of it in 51 is of the mixed one, and holds nobody up for longer than it takes.
	if alone.moved < 99.9e6 || mixed.moved < alone.moved*99/100 {
		t.Errorf("a source moved %d bytes beside its reports, one without any %d", mixed.moved, alone.moved)
	}
	for i, s := range reports {
		if s.moved < 1_000_000/51-2*1448 {
			t.Errorf("source %d moved %d bytes of reports, want a 51st of 1,000,000", i+1, s.moved)
		}
	}
}

// Small units that wait for their time leave others all of a line but what they use, and have
// that: a large one goes before them though it is not over in time.
func TestSmallUnitsThatAreBookedLeaveTheRestToLargeOnes(t *testing.T) {
	const rate, slow = 100_000_000, 50_000 // bytes/s
	ports := func(first, last uint16) shaper.Match {
		return shaper.Match{Port: []shaper.PortRange{{First: first, Last: last}}}
	}
	for _, sources := range []uint64{1, 20} {
		r := newRig(t,
			shaper.Limit{Name: "all", Rate: 8 * rate},
			shaper.Limit{Name: "slow", Key: shaper.KeySource, Rate: 8 * slow, Match: ports(1, 2)},
			shaper.Limit{Name: "second", Rate: 8 * rate, Match: ports(2, 2)})
		begin := func(source string, port uint16, size uint64) *stream {
			s := &stream{rig: r, left: 1 << 40}
			s.unit = unit{owner: s, path: r.path(flowFrom(source, port)), bytes: size, credit: grantCredit}
			r.lines.submit(&s.unit, leaky.Second)
			return s
		}
		large := begin("10.1.0.1", 0, 70_000)
		var small []*stream
		for i := range sources {
			source := fmt.Sprintf("10.0.0.%d", i+1)
			small = append(small, begin(source, 1, 64), begin(source, 2, 64))
		}
		r.advance(2*leaky.Second, onTime)
		var moved uint64
		for _, s := range small {
			moved += s.moved
		}
		if moved < sources*slow*95/100 || large.moved+moved < rate*99/100 {
			t.Errorf("%d sources moved %d bytes of %d in small units, one in large ones %d beside them", sources, moved, sources*slow, large.moved)
		}
		if r.lines.turn < sources*100 {
			t.Errorf("only %d units were booked", r.lines.turn)
		}
	}
}

// crossed is streams of a few sources under random limits that cross.
type crossed struct {
	*rig
	rnd     *rand.Rand
	ports   int
	flows   uint64
	streams []*stream
}

func newCrossed(t *testing.T, rnd *rand.Rand) *crossed {
	rate := func(from, to int) uint64 { return 8 << (from + rnd.IntN(to-from+1)) }
	ports := 1 + rnd.IntN(4)
	limits := []shaper.Limit{{Name: "all", Rate: rate(12, 20)}}
	add := func(name string, key shaper.Fields, first, last uint16) {
		limits = append(limits, shaper.Limit{
			Name: name, Key: key, Rate: rate(10, 20),
			Match: shaper.Match{Port: []shaper.PortRange{{First: first, Last: last}}},
		})
	}
	if rnd.IntN(3) > 0 {
		add("per-source", shaper.KeySource, 0, 9)
	}
	if rnd.IntN(2) > 0 {
		add("two", 0, 0, 1)
	}
	for p := range uint16(ports) {
		if rnd.IntN(2) > 0 {
			add(fmt.Sprint("port", p), 0, p, p)
		}
	}
	return &crossed{rig: newRig(t, limits...), rnd: rnd, ports: ports}
}

// open begins a flow that always has as much as depth queued, in units of size bytes.
func (c *crossed) open(source int, size, depth uint64) *stream {
	c.flows++
	f := flowFrom(fmt.Sprintf("10.0.0.%d", source), uint16(c.rnd.IntN(c.ports)))
	f.Connection = c.flows
	first := &stream{rig: c.rig, left: 1 << 50}
	path := c.path(f)
	for queued := uint64(0); queued < depth; queued += size {
		s := first
		if queued > 0 {
			s = &stream{rig: c.rig, left: 1 << 50}
		}
		s.unit = unit{owner: s, path: path, bytes: size, credit: grantCredit}
		c.lines.submit(&s.unit, c.now)
		c.streams = append(c.streams, s)
	}
	return first
}

// Each flow has at least a good part of what it would have if all its lines were shared
// equally by those that are there, whatever others of its source and other sources wait for.
func TestFlowsHaveTheirPartOfLinesThatCross(t *testing.T) {
	const seconds = 20
	for _, tt := range []struct {
		name   string
		sizes  []uint64
		rounds int
		part   float64
	}{
		// Who lets others by takes turns with them unit by unit.
		{"units of one size", []uint64{1000}, 60, 0.3},
		{"units of many sizes", []uint64{64, 1000, 16000}, 15, 0.02},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rnd := newRand(t)
			for range tt.rounds {
				c := newCrossed(t, rnd)
				for source := range 1 + rnd.IntN(12) {
					for range 1 + rnd.IntN(4) {
						size := tt.sizes[rnd.IntN(len(tt.sizes))]
						c.open(source, size, tt.sizes[len(tt.sizes)-1])
					}
				}
				c.advance((1+seconds)*leaky.Second, onTime)
				moved, there := map[*node]uint64{}, map[*line]map[*share]map[*node]bool{}
				for _, s := range c.streams {
					moved[s.path[0].leaf] += s.moved
					for _, at := range s.path {
						if there[at.line] == nil {
							there[at.line] = map[*share]map[*node]bool{}
						}
						if there[at.line][at.share] == nil {
							there[at.line][at.share] = map[*node]bool{}
						}
						there[at.line][at.share][at.leaf] = true
					}
				}
				for _, s := range c.streams {
					part := 1e18
					for _, at := range s.path {
						flows := len(there[at.line]) * len(there[at.line][at.share])
						part = min(part, c.left[at.line].rate*float64(seconds*leaky.Second)/float64(flows))
					}
					if got := float64(moved[s.path[0].leaf] + 32000); got < tt.part*part {
						t.Errorf("a flow of %v moved %.0f bytes in %d s, its part is %.0f", s.path[0].share.source, got, seconds, part)
					}
				}
			}
		})
	}
}

// Whatever leaves its lines early, with others behind it and a time booked, leaves nothing of
// it there, and holds up nobody.
func TestWithdrawFromLinesThatCross(t *testing.T) {
	rnd := newRand(t)
	booked := 0
	for range 40 {
		c := newCrossed(t, rnd)
		late := func() leaky.Time { return leaky.Time(rnd.Uint64N(uint64(leaky.Second / 500))) }
		for range 300 {
			if len(c.streams) < 60 {
				c.open(rnd.IntN(5), 64+rnd.Uint64N(1400), 3000)
			}
			c.advance(c.now+leaky.Time(rnd.Uint64N(uint64(leaky.Second/20))), late)
			s := c.streams[rnd.IntN(len(c.streams))]
			for _, other := range c.streams {
				if other.booked {
					booked++
					if rnd.IntN(4) == 0 {
						s = other
					}
				}
			}
			c.lines.withdraw(c.now, &s.unit)
			if rnd.IntN(2) == 0 {
				c.lines.submit(&s.unit, c.now)
			} else {
				c.streams = slices.DeleteFunc(c.streams, func(other *stream) bool { return other == s })
			}
			if rnd.IntN(20) == 0 {
				limits := make([]shaper.Limit, 0, 8)
				for j := range c.policy.Len() {
					l := *c.policy.Limit(j)
					l.Rate = l.Rate/2 + rnd.Uint64N(l.Rate)
					limits = append(limits, l)
				}
				c.policy = policy(t, c.shaper, limits...)
				c.shaper.Swap(c.policy, 0)
				for l := range c.left {
					c.lines.refresh(l, c.now)
				}
				c.lines.run(c.now)
			}
		}
		for _, s := range c.streams {
			s.left = min(s.left, 3000)
		}
		c.advance(c.now+leaky.FromDuration(24*time.Hour), late)
		for l := range c.left {
			if l.root.active() || l.streams != 0 || len(l.bookings)+len(l.late) != 0 || l.passing != nil || l.held != nil {
				t.Fatalf("%s has %d grants, %d bookings, %d late", l.state.Name, l.streams, len(l.bookings), len(l.late))
			}
			for _, sh := range l.shares {
				for _, ln := range sh.lanes {
					if ln.beyond != 0 || ln.barred {
						t.Fatalf("%s: %d bytes of a lane have gone on", l.state.Name, ln.beyond)
					}
				}
			}
		}
	}
	if booked == 0 {
		t.Error("nothing was ever booked")
	}
}
