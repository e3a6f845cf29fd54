package conn

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// A source with a connection to a port that many sources share at a low rate can use the rest of its own rate
// for its other connections.
func TestUnitWaitingInOneQueueBlocksNoOther(t *testing.T) {
	r := newRig(t,
		shaper.Limit{Name: "per-source", Key: shaper.KeySource, Rate: 8e6},
		shaper.Limit{Name: "reports", Match: shaper.Match{Port: []shaper.PortRange{{First: 9000, Last: 9000}}}, Rate: 80e3})
	add := func(source string, port uint16) *stream {
		s := &stream{rig: r, left: 1 << 40}
		s.unit = unit{owner: s, path: r.path(flowFrom(source, port)), bytes: 1448, credit: grantCredit}
		r.scheduler.submit(&s.unit, leaky.Second)
		return s
	}
	var reports []*stream
	for i := range 51 {
		reports = append(reports, add(fmt.Sprintf("10.0.0.%d", i+1), 9000))
	}
	mixed, alone := add("10.0.0.1", 5432), add("10.0.1.1", 5432)
	r.advance(101*leaky.Second, onTime)
	// One of its units in 51 is of the mixed connection, and delays the others for no longer than it
	// takes.
	if alone.moved < 99.9e6 || mixed.moved < alone.moved*99/100 {
		t.Errorf("a source with reports moved %d bytes in its other connections, one without reports %d", mixed.moved, alone.moved)
	}
	for i, s := range reports {
		if s.moved < 1_000_000/51-2*1448 {
			t.Errorf("source %d moved %d bytes of reports, want a 51st of 1,000,000", i+1, s.moved)
		}
	}
}

// Small booked units get their part of a queue, and leave all the rest to others: a large unit goes
// before them even if it is not done in time.
func TestBooking_SmallUnitsDoNotStarveLarge(t *testing.T) {
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
			r.scheduler.submit(&s.unit, leaky.Second)
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
			t.Errorf("%d sources moved %d bytes of %d in small units, and another one %d in large units", sources, moved, sources*slow, large.moved)
		}
		if r.scheduler.lastBooking < sources*100 {
			t.Errorf("only %d units were booked", r.scheduler.lastBooking)
		}
	}
}

// crossingRig is streams of a few sources under random crossing limits.
type crossingRig struct {
	*rig
	rnd     *rand.Rand
	ports   int
	flows   uint64
	streams []*stream
}

func newCrossingRig(t *testing.T, rnd *rand.Rand) *crossingRig {
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
	return &crossingRig{rig: newRig(t, limits...), rnd: rnd, ports: ports}
}

// open starts a flow that always has up to depth bytes queued, in units of size bytes.
func (c *crossingRig) open(source int, size, depth uint64) *stream {
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
		c.scheduler.submit(&s.unit, c.now)
		c.streams = append(c.streams, s)
	}
	return first
}

// Each flow gets a good part of what it would get if all its queues were shared equally, whatever
// other flows of its source and other sources wait for.
func TestCrossingQueues_FairShare(t *testing.T) {
	const seconds = 20
	for _, tt := range []struct {
		name   string
		sizes  []uint64
		rounds int
		part   float64
	}{
		// Streams that yield alternate unit by unit.
		{"units of one size", []uint64{1000}, 60, 0.15},
		{"units of many sizes", []uint64{64, 1000, 16000}, 15, 0.01},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rnd := testutil.Rand(t)
			for range tt.rounds {
				c := newCrossingRig(t, rnd)
				for source := range 1 + rnd.IntN(12) {
					for range 1 + rnd.IntN(4) {
						size := tt.sizes[rnd.IntN(len(tt.sizes))]
						c.open(source, size, tt.sizes[len(tt.sizes)-1])
					}
				}
				c.advance((1+seconds)*leaky.Second, onTime)
				moved, there := map[*fairq.Node[unit]]uint64{}, map[*queue]map[*sourceQueue]map[*fairq.Node[unit]]bool{}
				for _, s := range c.streams {
					moved[s.path[0].flowQueue] += s.moved
					for _, h := range s.path {
						if there[h.queue] == nil {
							there[h.queue] = map[*sourceQueue]map[*fairq.Node[unit]]bool{}
						}
						if there[h.queue][h.source] == nil {
							there[h.queue][h.source] = map[*fairq.Node[unit]]bool{}
						}
						there[h.queue][h.source][h.flowQueue] = true
					}
				}
				for _, s := range c.streams {
					part := 1e18
					for _, h := range s.path {
						flows := len(there[h.queue]) * len(there[h.queue][h.source])
						part = min(part, c.departures[h.queue].rate*float64(seconds*leaky.Second)/float64(flows))
					}
					if got := float64(moved[s.path[0].flowQueue] + 32000); got < tt.part*part {
						t.Errorf("a flow of %v moved %.0f bytes in %d s, its share is %.0f", s.path[0].source.key.addr, got, seconds, part)
					}
				}
			}
		})
	}
}

// Units that leave their queues early, with others behind them and a booking, leave nothing behind,
// and delay no other.
func TestCrossingQueues_Withdraw(t *testing.T) {
	rnd := testutil.Rand(t)
	booked := 0
	for range 40 {
		c := newCrossingRig(t, rnd)
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
			c.scheduler.withdraw(c.now, &s.unit)
			if rnd.IntN(2) == 0 {
				c.scheduler.submit(&s.unit, c.now)
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
				for q := range c.departures {
					c.scheduler.refresh(q, c.now)
				}
				c.scheduler.run(c.now)
			}
		}
		for _, s := range c.streams {
			s.left = min(s.left, 3000)
		}
		c.advance(c.now+leaky.FromDuration(24*time.Hour), late)
		for q := range c.departures {
			if q.root.HasUnits() || q.grants != 0 || len(q.bookings)+len(q.booked) != 0 || q.forwarding != nil || q.blocked != nil {
				t.Fatalf("%s has %d grants, %d bookings, %d booked units", q.state.Name, q.grants, len(q.bookings), len(q.booked))
			}
			for _, sq := range q.sources {
				for _, ln := range sq.lanes {
					if ln.laterBytes != 0 || ln.Suspended() {
						t.Fatalf("%s: %d bytes of a lane are in later queues", q.state.Name, ln.laterBytes)
					}
				}
			}
		}
	}
	if booked == 0 {
		t.Error("nothing was ever booked")
	}
}
