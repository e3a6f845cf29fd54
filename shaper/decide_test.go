package shaper

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// crossingKeys are keys of which some contain each other and some do not.
var crossingKeys = []Fields{
	0, KeySource, KeyPort, KeySource | KeyPort, KeyConnection, KeyListen, KeySource | KeyListen, KeyASN | KeyPort,
}

func randomLimits(rnd *rand.Rand, n int) (limits []Limit) {
	for i := range n {
		l := Limit{
			Name: fmt.Sprint("limit", i), Key: crossingKeys[rnd.IntN(len(crossingKeys))],
			IPv4Prefix: []int{16, 24, 32}[rnd.IntN(3)], IPv6Prefix: 64,
			MaxDelay: time.Duration(rnd.IntN(2)) * time.Duration(rnd.Int64N(int64(50*time.Millisecond))),
		}
		kinds := 1 + rnd.IntN(3)
		if kinds&1 != 0 {
			l.Rate = 1e5 + rnd.Uint64N(uint64(1e5)<<rnd.IntN(8))
			l.Burst = uint64(rnd.IntN(2) * rnd.IntN(6000))
			l.Overhead = rnd.IntN(2) * rnd.IntN(MaxOverhead)
		}
		if kinds&2 != 0 {
			l.Packets = Frequency{N: 10 + rnd.Uint64N(uint64(10)<<rnd.IntN(8)), Per: time.Second}
			l.BurstPackets = uint64(rnd.IntN(2) * rnd.IntN(8))
		}
		if rnd.IntN(4) == 0 {
			l.Match.Port = []PortRange{{0, 1}}
		}
		limits = append(limits, l)
	}
	return limits
}

func randomFlow(rnd *rand.Rand) *Flow {
	return &Flow{
		Source: ipv4Addr(10<<24 | rnd.Uint32N(2)<<16 | rnd.Uint32N(2)<<8 | rnd.Uint32N(3)),
		Port:   uint16(rnd.IntN(3)), Origin: uint16(rnd.IntN(2)), Protocol: UDP, Connection: rnd.Uint64N(20),
	}
}

var twoUDP = []Listener{{Name: "a", Addresses: []Address{{Protocol: UDP}}}, {Name: "b", Addresses: []Address{{Protocol: UDP}}}}

// drainTimes returns when the backlogs of bytes and of packets will have drained, each
// read by hiding the other with an unlimited burst.
func drainTimes(b leaky.Bucket, now leaky.Time) [2]leaky.Time {
	return [2]leaky.Time{
		b.Depart(&leaky.Shape{PacketsBurst: leaky.Forever}, now),
		b.Depart(&leaky.Shape{BytesBurst: leaky.Forever}, now),
	}
}

func (s *Shaper) allDrainTimes(p *Policy, f *Flow, set Set, now leaky.Time) (levels [][2]leaky.Time) {
	for i := range set.All {
		b, _ := s.lookupBucket(p, i, f)
		levels = append(levels, drainTimes(b, now))
	}
	return levels
}

func TestDecideAgainstOracle(t *testing.T) {
	rnd := testutil.Rand(t)
	policies, units := 150, 250
	if shortRun() {
		policies = 40
	}
	delayedBy, refusedBy := map[Fields]int{}, map[Fields]int{}
	refunded := 0
	exercised := func() bool {
		return len(delayedBy) >= len(crossingKeys)-1 && len(refusedBy) >= len(crossingKeys)-1 && refunded > 0
	}
	for n := 0; n < policies || n < 10*policies && !exercised(); n++ {
		s := New(10000)
		p := mustCompile(t, s, randomLimits(rnd, 1+rnd.IntN(6)), twoUDP)
		oracle := naiveShaper{policy: p, buckets: map[Key]*naiveBucket{}}
		var counts [MaxLimits][NumVerdicts]uint64
		now := leaky.Time(rnd.Uint64N(uint64(leaky.Second)))
		gap := leaky.FromDuration(time.Duration(10+rnd.IntN(5000)) * time.Microsecond)
		for range units {
			now += leaky.Time(rnd.Uint64N(uint64(gap)))
			f := randomFlow(rnd)
			r := p.Route(f)
			set, bytes, packets := r.ToDownstream, rnd.Uint64N(1500), 1+rnd.Uint64N(3)
			before := s.allDrainTimes(p, f, set, now)
			want := oracle.waits(f, r, set, now)
			got := s.Decide(p, f, r, set, bytes, packets, now)

			must, may := want.refusing(p, set)
			wait := got.Depart - now
			if got.Verdict == Refuse {
				i := got.Limit
				if got.Reason != QueueFull || may&(1<<i) == 0 || !want.close(i, wait) {
					t.Fatalf("%+v: refused after %d ticks; exact waits %v", got, wait, want.wait)
				}
				if first := bits.TrailingZeros64(uint64(must)); first < i {
					t.Fatalf("%+v: limit %d must refuse first", got, first)
				}
				if diff := cmp.Diff(before, s.allDrainTimes(p, f, set, now)); diff != "" {
					t.Fatalf("a refusal changed buckets: %s", diff)
				}
				refusedBy[p.Limit(i).Key]++
				counts[i][Refuse] += packets
				if i > bits.TrailingZeros64(uint64(set)) {
					refunded++
				}
				continue
			}
			if must != 0 {
				t.Fatalf("%+v: limits %b must refuse; exact waits %v", got, must, want.wait)
			}
			switch {
			case got.Verdict == Delay && got.Reason == ByRate && got.Limit >= 0 && wait > 0 && want.close(got.Limit, wait):
				delayedBy[p.Limit(got.Limit).Key]++
			case got == Decision{Verdict: Pass, Reason: None, Depart: now, Limit: -1}:
			default:
				t.Fatalf("%+v at %d; exact waits %v", got, now, want.wait)
			}
			for j, i := range slices.Collect(set.All) {
				if want.exceeds(i, wait) {
					t.Fatalf("%+v: left %d ticks later, before limit %d allows; exact waits %v", got, wait, i, want.wait)
				}
				v := Pass
				if b := before[j]; b[0].Sub(p.Shape(i).BytesBurst) > now || b[1].Sub(p.Shape(i).PacketsBurst) > now {
					v = Delay
				}
				counts[i][v] += packets
			}
			oracle.charge(f, r, set, bytes, packets, now)
		}
		for i := range p.Len() {
			for v := range Verdict(NumVerdicts) {
				var n uint64
				for r := range NumReasons {
					n += p.State(i).Packets[v][r].Load()
				}
				if n != counts[i][v] {
					t.Errorf("limit %d counted %d packets of verdict %v, want %d", i, n, v, counts[i][v])
				}
			}
		}
	}
	if !exercised() {
		t.Errorf("the test exercised nothing: delayed by %v, refused by %v, refunded %d", delayedBy, refusedBy, refunded)
	}
}

func TestDecide_IgnoresOrderOfConfiguration(t *testing.T) {
	rnd := testutil.Rand(t)
	var delayed, refused int
	for range 100 {
		limits := randomLimits(rnd, 2+rnd.IntN(5))
		shuffled := slices.Clone(limits)
		rnd.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		s1, s2 := New(10000), New(10000)
		p1, p2 := mustCompile(t, s1, limits, twoUDP), mustCompile(t, s2, shuffled, twoUDP)
		now := leaky.Second
		for range 300 {
			now += leaky.Time(rnd.Uint64N(uint64(leaky.Second / 1000)))
			f, n := randomFlow(rnd), rnd.Uint64N(1500)
			r1, r2 := p1.Route(f), p2.Route(f)
			d1 := s1.Decide(p1, f, r1, r1.ToDownstream, n, 1, now)
			d2 := s2.Decide(p2, f, r2, r2.ToDownstream, n, 1, now)
			if d1.Verdict != d2.Verdict || d1.Reason != d2.Reason || d1.Verdict != Refuse && d1.Depart != d2.Depart {
				t.Fatalf("%+v in one order, %+v in the other, of %+v", d1, d2, limits)
			}
			switch d1.Verdict {
			case Delay:
				delayed++
			case Refuse:
				refused++
			}
		}
	}
	if delayed == 0 || refused == 0 {
		t.Errorf("the test exercised nothing: delayed %d, refused %d", delayed, refused)
	}
}

func TestDecide_Counters(t *testing.T) {
	s := New(10)
	p := mustCompile(t, s, []Limit{
		{Name: "source", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 8000, MaxDelay: time.Second},
		{Name: "all", Rate: 80000, MaxDelay: 70 * time.Millisecond},
		{Name: "slots", MaxConnections: 1},
	}, udpOnly)
	f := fromIPv4(1)
	r := p.Route(f)
	var got []string
	for range 4 {
		d := s.Decide(p, f, r, r.ToDownstream, 600, 1, leaky.Second)
		got = append(got, fmt.Sprintf("%v %v %d +%v", d.Verdict, d.Reason, d.Limit, (d.Depart-leaky.Second).Duration()))
	}
	want := []string{
		"pass none -1 +0s", "delay rate 0 +600ms",
		"refuse queue-full 0 +1.2s", "refuse queue-full 0 +1.2s",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if d := s.Decide(p, fromIPv4(2), r, r.ToDownstream, 600, 1, leaky.Second); d.Verdict != Refuse || d.Limit != 1 {
		t.Errorf("the second source: %+v, want a refusal by limit 1", d)
	}
	for i, want := range []map[string]uint64{
		{"pass none": 600, "delay rate": 600, "refuse queue-full": 1200},
		{"pass none": 600, "delay rate": 600, "refuse queue-full": 600},
		{"pass none": 1200},
	} {
		got := map[string]uint64{}
		for v := range Verdict(NumVerdicts) {
			for r := range Reason(NumReasons) {
				if n := p.State(i).Bytes[v][r].Load(); n > 0 {
					got[v.String()+" "+r.String()] = n
				}
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("limit %q: %s", p.Limit(i).Name, diff)
		}
	}
}

// A limit without a rate must take no bucket: in a full table it would inherit the
// backlog of another key, and delay units without having a rate.
func TestDecide_LimitWithoutRateTakesNoBucket(t *testing.T) {
	s := New(1)
	p := mustCompile(t, s, []Limit{{Name: "slots", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, MaxConnections: 1}}, udpOnly)
	for i := range uint32(100) {
		f := fromIPv4(i)
		r := p.Route(f)
		if d := s.Decide(p, f, r, r.ToDownstream, 1000, 1, leaky.Second); d.Verdict != Pass {
			t.Fatalf("%+v", d)
		}
	}
	if got := s.TableUsage().Entries; got != 0 {
		t.Errorf("%d entries", got)
	}
}

func TestCompile_ObserveFlags(t *testing.T) {
	for _, tt := range []struct {
		name          string
		limit, daemon bool
		want          Set
	}{
		{"enforced", false, false, 0},
		{"the limit", true, false, 0b01},
		{"the daemon", false, true, 0b01},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := New(10)
			p, err := s.Compile([]Limit{
				{Name: "paced", Rate: 8000, Observe: tt.limit},
				{Name: "slots", MaxConnections: 1, Observe: tt.limit},
			}, udpOnly, nil, nil, tt.daemon)
			if err != nil {
				t.Fatal(err)
			}
			f := fromIPv4(1)
			r := p.Route(f)
			if got := p.Observed(r.Limits()); got != tt.want {
				t.Errorf("Observed = %b, want %b", got, tt.want)
			}
			for i := range p.Len() {
				if got, want := p.Limit(i).Observe, tt.limit || tt.daemon; got != want {
					t.Errorf("limit %d: Observe = %v, want %v", i, got, want)
				}
			}
			s.Decide(p, f, r, 0b01, 1000, 1, leaky.Second)
			if d := s.Decide(p, f, r, 0b01, 1000, 1, leaky.Second); d.Verdict != Refuse {
				t.Errorf("%+v: an observing limit must return its verdict", d)
			}
		})
	}
}
