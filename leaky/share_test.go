package leaky

import (
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

const whole = 1 << 20

func TestShareIsNeverFaster(t *testing.T) {
	rnd := testutil.Rand(t)
	periods := []time.Duration{time.Nanosecond, time.Second, 8 * time.Second, time.Minute, 366 * 24 * time.Hour}
	for range 20000 {
		// 2^37 units per ns are the most that a rate holds with 32 bits.
		n, per := 1+rnd.Uint64N(uint64(1)<<rnd.IntN(38)), periods[rnd.IntN(len(periods))]
		parts := uint32(1 + rnd.Uint64N(uint64(1)<<rnd.IntN(21)))
		r, units := NewRate(n, per).share(parts, whole), 1+rnd.Uint64N(uint64(1)<<rnd.IntN(41))
		got, want := rat(r.Cost(units)), ticks(units, n, per)
		want.Mul(want, big.NewRat(whole, int64(parts)))
		if want.Cmp(rat(Forever)) >= 0 {
			if r.Cost(units) != Forever {
				t.Fatalf("%d parts of %d every %v: %d units cost %d, want Forever", parts, n, per, units, r.Cost(units))
			}
			continue
		}
		bound := new(big.Rat).Mul(want, big.NewRat(1<<30+1, 1<<30))
		bound.Add(bound, big.NewRat(1, 1))
		if got.Cmp(want) < 0 || got.Cmp(bound) > 0 && r.Cost(units) != Forever {
			t.Fatalf("%d parts of %d every %v: %d units cost %s, want %s to %s", parts, n, per, units, got.FloatString(3), want.FloatString(3), bound.FloatString(3))
		}
	}
	if r := (Rate{}).share(1, whole); !r.Unlimited() {
		t.Errorf("a share of no limit is %+v", r)
	}
}

// ratOfRate is r in units a tick.
func ratOfRate(r Rate) *big.Rat {
	unit := new(big.Rat).SetFrac(new(big.Int).SetUint64(r.mult), new(big.Int).Lsh(big.NewInt(1), uint(r.shift)))
	return unit.Inv(unit)
}

// The credit in units, by exact arithmetic: that of before, or the new burst if that is less.
func TestReshareKeepsCredit(t *testing.T) {
	rnd := testutil.Rand(t)
	var grown, capped, owed int
	for range 20000 {
		bursts := [2]Time{0, Time(rnd.Uint64N(uint64(Second)))}
		s := Shape{Bytes: NewRate(8+rnd.Uint64N(1e12), 8*time.Second), BytesBurst: bursts[rnd.IntN(2)]}
		next := s
		if rnd.IntN(4) == 0 { // a reload of the limit
			next = Shape{Bytes: NewRate(8+rnd.Uint64N(1e12), 8*time.Second), BytesBurst: bursts[rnd.IntN(2)]}
		}
		now := Time(rnd.Uint64N(uint64(3600 * Second)))
		from, to := NewShare(&s, 1+rnd.Uint32N(whole), whole, 0), NewShare(&next, 1+rnd.Uint32N(whole), whole, now)
		var b Bucket
		if rnd.IntN(4) != 0 {
			b.bytes = now + Time(rnd.Uint64N(uint64(2*s.BytesBurst+Second/10)))
		}
		credit := func(sh *Share) *big.Rat {
			time := rat(sh.BytesBurst)
			time.Sub(time, rat(b.bytes.Sub(now)))
			return time.Mul(time, ratOfRate(sh.Bytes))
		}
		want := credit(&from)
		if limit := new(big.Rat).Mul(rat(to.BytesBurst), ratOfRate(to.Bytes)); want.Cmp(limit) > 0 {
			want = limit
			capped++
		} else if from.Parts < to.Parts {
			grown++
		}
		if want.Sign() < 0 {
			owed++
		}
		b.Reshare(&from, &to, now)
		got := credit(&to)
		// Rounding: three ticks of either rate.
		slack := new(big.Rat).Add(ratOfRate(from.Bytes), ratOfRate(to.Bytes))
		slack.Mul(slack, big.NewRat(3, 1))
		if got.Cmp(want) > 0 || slack.Add(slack, got).Cmp(want) < 0 && b.bytes-now < Forever {
			t.Fatalf("%+v to %+v: credit %s bytes, want %s", from, to, got.FloatString(6), want.FloatString(6))
		}
	}
	if grown == 0 || capped == 0 || owed == 0 {
		t.Errorf("the test exercised nothing: %d grew, %d were capped, %d owed", grown, capped, owed)
	}
}

// A bucket without parts lets nothing leave, stands still, and starts without credit.
func TestShareWithoutParts(t *testing.T) {
	for _, burst := range []time.Duration{0, time.Millisecond, time.Minute} { // at 1 MB/s
		s := Shape{Bytes: NewRate(8e6, 8*time.Second), BytesBurst: FromDuration(burst)}
		burstBytes := uint64(burst / time.Microsecond)
		all, none := NewShare(&s, whole, whole, 0), NewShare(&s, 0, whole, 10*Second)
		for _, tt := range []struct {
			name   string
			charge uint64
			want   time.Duration // from when it has parts again
		}{
			{"drained", 0, 0},
			{"half of the burst", burstBytes / 2, 0},
			{"more than the burst", burstBytes + 4000, 4 * time.Millisecond},
		} {
			var b Bucket
			b.Charge(&s, tt.charge, 1, 10*Second)
			b.Reshare(&all, &none, 10*Second)
			if got := none.Depart(&b, 3600*Second); got != Never {
				t.Errorf("%v, %s: departure at %v, want never", burst, tt.name, got.Duration())
			}
			other := NewShare(&s, 0, whole, 20*Second)
			b.Reshare(&none, &other, 3600*Second)
			again := NewShare(&s, whole, whole, 3600*Second)
			b.Reshare(&other, &again, 3600*Second)
			got := again.Depart(&b, 3600*Second) - 3600*Second
			if got < FromDuration(tt.want) || got > FromDuration(tt.want+time.Microsecond) {
				t.Errorf("%v, %s: departure %v after it has parts again, want %v", burst, tt.name, got.Duration(), tt.want)
			}
			b.Charge(&s, 1, 1, 3600*Second+got)
			if b.Depart(&s, 3600*Second+got) == 3600*Second+got {
				t.Errorf("%v, %s: a second byte leaves at once: it had credit", burst, tt.name)
			}
		}
	}
}

// sharedHost is one host with a bucket of a shared limit, and what wants to leave.
type sharedHost struct {
	bucket Bucket
	share  Share
	greedy bool
	ready  Time // not greedy: when the next unit comes
}

// departure is when a unit left any of the hosts.
type departure struct {
	at             Time
	bytes, packets uint64
}

// worstExcess returns by how much the departures exceed the rate in any interval, in units, with both
// ends included. A unit takes span ticks / rate.
func worstExcess(all []departure, units func(departure) uint64, rate uint64, span Time) *big.Rat {
	var sum, low, worst big.Int // sum of units * span - rate * time; its minimum so far
	low.SetInt64(0)
	for i, d := range all {
		line := mulInt(rate, uint64(d.at))
		before := new(big.Int).Sub(&sum, line)
		if i == 0 || before.Cmp(&low) < 0 {
			low.Set(before)
		}
		sum.Add(&sum, mulInt(units(d), uint64(span)))
		if excess := new(big.Int).Sub(&sum, line); excess.Sub(excess, &low).Cmp(&worst) > 0 {
			worst.Set(excess)
		}
	}
	return new(big.Rat).SetFrac(&worst, new(big.Int).SetUint64(uint64(span)))
}

func mulInt(a, b uint64) *big.Int {
	return new(big.Int).Mul(new(big.Int).SetUint64(a), new(big.Int).SetUint64(b))
}

// Whatever the history of their shares: all hosts together keep the envelope of one bucket, and one
// unit each.
func TestShares_SumKeepsEnvelope(t *testing.T) {
	rnd := testutil.Rand(t)
	var beyondBurst, full int
	for round := range 120 {
		const maxUnit = 1500
		bits, pps := 1e5+rnd.Uint64N(1e9), uint64(0)
		s := Shape{Bytes: NewRate(bits, 8*time.Second)}
		s.BytesBurst = s.Bytes.Cost(uint64(rnd.IntN(3)) * rnd.Uint64N(100_000))
		if rnd.IntN(2) == 0 {
			pps = 10 + rnd.Uint64N(bits/8000)
			s.Packets = NewRate(pps, time.Second)
			s.PacketsBurst = s.Packets.Cost(uint64(rnd.IntN(2)) * rnd.Uint64N(30))
		}
		wasteless := rnd.IntN(2) == 0 // the parts always add up to the whole, and all want to send
		hosts := make([]*sharedHost, 2+rnd.IntN(4))
		now := Time(rnd.Uint64N(uint64(Second)))
		start := now
		for i := range hosts {
			hosts[i] = &sharedHost{share: NewShare(&s, whole/uint32(len(hosts)), whole, now), greedy: true}
		}
		reshare := func(h *sharedHost, parts uint32) {
			next := NewShare(&s, parts, whole, now)
			h.bucket.Reshare(&h.share, &next, now)
			h.share = next
		}
		var all []departure
		total := uint64(0)
		mean := max(s.Bytes.Cost(maxUnit), s.Packets.Cost(1))
		change := now
		for range 4000 {
			// The next event: a change, or the first departure.
			at, next := change, (*sharedHost)(nil)
			for _, h := range hosts {
				from := now
				if !h.greedy {
					from = max(now, h.ready)
				}
				if depart := h.share.Depart(&h.bucket, from); depart < at {
					at, next = depart, h
				}
			}
			now = at
			if next != nil {
				d := departure{now, 1 + rnd.Uint64N(maxUnit), 1}
				next.bucket.Charge(&next.share.Shape, d.bytes, d.packets, now)
				all = append(all, d)
				total += d.bytes
				next.ready = now + Time(rnd.Uint64N(uint64(4*mean)))
				continue
			}
			change = now + Time(rnd.Uint64N(uint64(mean)<<rnd.IntN(8)))
			from, to := hosts[rnd.IntN(len(hosts))], hosts[rnd.IntN(len(hosts))]
			moved := uint32(0)
			if from.share.Parts > 0 {
				moved = min(1+uint32(rnd.Uint64N(uint64(1)<<rnd.IntN(21))), from.share.Parts)
			}
			reshare(from, from.share.Parts-moved)
			free := uint32(whole)
			for _, h := range hosts {
				free -= h.share.Parts
			}
			if wasteless || rnd.IntN(3) > 0 {
				reshare(to, to.share.Parts+free)
			}
			if h := hosts[rnd.IntN(len(hosts))]; !wasteless {
				h.greedy, h.ready = !h.greedy, now
			}
		}
		excess := worstExcess(all, func(d departure) uint64 { return d.bytes }, bits, 8*Second)
		burst := new(big.Rat).Mul(rat(s.BytesBurst), new(big.Rat).SetFrac(new(big.Int).SetUint64(bits), mulInt(8, uint64(Second))))
		bound := new(big.Rat).Add(burst, big.NewRat(int64(maxUnit*len(hosts)), 1))
		if excess.Cmp(bound) > 0 {
			t.Fatalf("round %d, %d hosts: %s bytes beyond the rate, want at most %s", round, len(hosts), excess.FloatString(1), bound.FloatString(1))
		}
		if excess.Cmp(new(big.Rat).Add(burst, big.NewRat(maxUnit, 1))) > 0 {
			beyondBurst++
		}
		if pps > 0 {
			excess := worstExcess(all, func(d departure) uint64 { return d.packets }, pps, Second)
			burst := new(big.Rat).Mul(rat(s.PacketsBurst), new(big.Rat).SetFrac(new(big.Int).SetUint64(pps), mulInt(1, uint64(Second))))
			if bound := burst.Add(burst, big.NewRat(int64(len(hosts)), 1)); excess.Cmp(bound) > 0 {
				t.Fatalf("round %d, %d hosts: %s packets beyond the rate, want at most %s", round, len(hosts), excess.FloatString(3), bound.FloatString(3))
			}
		} else if wasteless {
			full++
			// What a share loses: the credit that is beyond its burst.
			if passed := float64(s.Bytes.Cost(total)); passed < 0.98*float64(now-start) {
				t.Errorf("round %d: %.1f %% of the rate left, want all of it", round, 100*passed/float64(now-start))
			}
		}
	}
	if beyondBurst == 0 || full == 0 {
		t.Errorf("the test exercised nothing: %d rounds beyond the burst and a unit, %d at the full rate", beyondBurst, full)
	}
}

// BenchmarkShare times a change of the share of a bucket.
func BenchmarkShare(b *testing.B) {
	s := Shape{Bytes: NewRate(10e9, 8*time.Second), Packets: NewRate(1e6, time.Second), BytesBurst: Second / 100}
	rnd := rand.New(rand.NewPCG(1, 2))
	shares := slices.Collect(func(yield func(Share) bool) {
		for range 64 {
			yield(NewShare(&s, rnd.Uint32N(whole), whole, Second))
		}
	})
	var bucket Bucket
	share := shares[0]
	i := 0
	b.ReportAllocs()
	for b.Loop() {
		i++
		next := NewShare(&s, shares[i%64].Parts, whole, Second)
		bucket.Reshare(&share, &next, Second)
		share = next
	}
}
