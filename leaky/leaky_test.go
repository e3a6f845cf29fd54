package leaky

import (
	"math"
	"math/big"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

// ticks is the exact cost of n units at units every per.
func ticks(n, units uint64, per time.Duration) *big.Rat {
	cost := new(big.Rat).SetInt(new(big.Int).SetUint64(n))
	cost.Mul(cost, new(big.Rat).SetInt64(int64(per)*ticksPerNano))
	return cost.Quo(cost, new(big.Rat).SetInt(new(big.Int).SetUint64(units)))
}

func rat(t Time) *big.Rat { return new(big.Rat).SetInt(new(big.Int).SetUint64(uint64(t))) }

func TestCostIsExactOrATickAbove(t *testing.T) {
	rnd := testutil.Rand(t)
	bitRates := []uint64{8, 9, 1000, 12345, 1e6, 10e6, 8 * 10 << 20, 600e6, 1e9, 2.4e9, 10e9, 100e9, 1e12, 1<<31 - 1, 1 << 31, 1<<32 - 1, 1 << 32}
	sizes := []uint64{1, 20, 64, 512, 1448, 1500, 65507, 256 << 10, 1<<31 - 1, 1 << 31, 1 << 40}
	for range 200 {
		bitRates = append(bitRates, 8+rnd.Uint64N(uint64(1)<<(4+rnd.IntN(36))))
		sizes = append(sizes, 1+rnd.Uint64N(uint64(1)<<(1+rnd.IntN(40))))
	}
	for _, bits := range bitRates {
		r := NewRate(bits, 8*time.Second)
		for _, n := range sizes {
			got, want := rat(r.Cost(n)), ticks(n, bits, 8*time.Second)
			if want.Cmp(rat(Forever)) >= 0 {
				if r.Cost(n) != Forever {
					t.Errorf("%d bit/s, %d bytes: cost %v, want Forever", bits, n, r.Cost(n))
				}
				continue
			}
			bound := new(big.Rat).Mul(want, big.NewRat(1<<31+1, 1<<31))
			bound.Add(bound, big.NewRat(1, 1))
			if got.Cmp(want) < 0 || got.Cmp(bound) > 0 {
				t.Errorf("%d bit/s, %d bytes: cost %s ticks, want %s to %s", bits, n,
					got.FloatString(3), want.FloatString(3), bound.FloatString(3))
			}
		}
	}
}

func TestSmallUnitAtTenGigabit(t *testing.T) {
	const exact = 51.2 * ticksPerNano
	got := float64(NewRate(10e9, 8*time.Second).Cost(64))
	if off := got/exact - 1; off < 0 || off > 0.001 {
		t.Errorf("64 bytes at 10 Gbit/s cost %.3f ns, %.3f %% off", got/ticksPerNano, off*100)
	}
}

func TestUnitsInvertsCost(t *testing.T) {
	rnd := testutil.Rand(t)
	for range 10000 {
		r := NewRate(8+rnd.Uint64N(1e12), 8*time.Second)
		n := rnd.Uint64N(1 << 24)
		if got := r.Units(r.Cost(n)); got < n || r.Cost(got) > r.Cost(n)+r.Cost(1) {
			t.Fatalf("rate %+v: Units(Cost(%d)) = %d", r, n, got)
		}
	}
	if got := (Rate{}).Units(Second); got != 0 {
		t.Errorf("unlimited: Units = %d, want 0", got)
	}
}

// naiveBucket is a bucket that stores the backlog as an exact number of bytes and packets.
type naiveBucket struct {
	bytesRate, packetsRate *big.Rat // units a tick, nil is unlimited
	bytes, packets         *big.Rat // backlog
	at                     Time
}

func (b *naiveBucket) advance(now Time) {
	passed := rat(now - b.at)
	b.at = now
	for _, d := range []struct{ level, rate *big.Rat }{{b.bytes, b.bytesRate}, {b.packets, b.packetsRate}} {
		if d.rate == nil {
			continue
		}
		d.level.Sub(d.level, new(big.Rat).Mul(passed, d.rate))
		if d.level.Sign() < 0 {
			d.level.SetInt64(0)
		}
	}
}

// wait returns the ticks that the backlog beyond burst takes to drain.
func (b *naiveBucket) wait(s *Shape) *big.Rat {
	w := new(big.Rat)
	for _, d := range []struct {
		level, rate *big.Rat
		burst       Time
	}{{b.bytes, b.bytesRate, s.BytesBurst}, {b.packets, b.packetsRate, s.PacketsBurst}} {
		if d.rate == nil {
			continue
		}
		v := new(big.Rat).Quo(d.level, d.rate)
		v.Sub(v, rat(d.burst))
		if v.Cmp(w) > 0 {
			w = v
		}
	}
	return w
}

func TestOfferAgainstOracle(t *testing.T) {
	rnd := testutil.Rand(t)
	var delayed, refused, bytesBound, packetsBound int
	for range 300 {
		bits := 1000 + rnd.Uint64N(1e9)
		pps := 1 + rnd.Uint64N(100000)
		s := Shape{
			Bytes:        NewRate(bits, 8*time.Second),
			MaxDelay:     Time(rnd.Uint64N(uint64(Second / 10))),
			BytesBurst:   Time(rnd.Uint64N(2)) * Time(rnd.Uint64N(uint64(Second/100))),
			PacketsBurst: 0,
			Overhead:     rnd.Uint64N(2) * rnd.Uint64N(1000),
		}
		oracle := naiveBucket{
			bytesRate: new(big.Rat).Inv(ticks(1, bits, 8*time.Second)),
			bytes:     new(big.Rat), packets: new(big.Rat),
		}
		if rnd.IntN(2) == 0 {
			s.Packets = NewRate(pps, time.Second)
			oracle.packetsRate = new(big.Rat).Inv(ticks(1, pps, time.Second))
		}
		var b Bucket
		now := Time(rnd.Uint64N(uint64(Second)))
		oracle.at = now
		mean := s.Bytes.Cost(750+s.Overhead) + s.Packets.Cost(1)
		units, charged := 0, Time(0)
		for range 200 {
			now += Time(rnd.Uint64N(uint64(mean)))
			n := 1 + rnd.Uint64N(1500)
			oracle.advance(now)
			want := oracle.wait(&s)
			depart, ok := b.Offer(&s, n, 1, now)
			// Each charged unit may be rounded up by a tick and a part in 2^31, including
			// units that have drained since.
			tolerance := big.NewRat(int64(units)+2, 1)
			tolerance.Add(tolerance, new(big.Rat).Mul(rat(charged), big.NewRat(1, 1<<31)))
			off := new(big.Rat).Sub(rat(depart-now), want)
			if off.Sign() < 0 || off.Cmp(tolerance) > 0 {
				t.Fatalf("unit %d: wait %d ticks, want %s", units, depart-now, want.FloatString(2))
			}
			if ok != (depart-now <= s.MaxDelay) {
				t.Fatalf("unit %d: ok = %v with wait %d, max_delay %d", units, ok, depart-now, s.MaxDelay)
			}
			if !ok {
				refused++
				continue
			}
			if depart > now {
				delayed++
			}
			oracle.bytes.Add(oracle.bytes, big.NewRat(int64(n+s.Overhead), 1))
			charged += max(s.Bytes.Cost(n+s.Overhead), s.Packets.Cost(1))
			if oracle.packetsRate != nil {
				oracle.packets.Add(oracle.packets, big.NewRat(1, 1))
				if b.packets > b.bytes {
					packetsBound++
				} else {
					bytesBound++
				}
			}
			units++
		}
	}
	if delayed == 0 || refused == 0 || bytesBound == 0 || packetsBound == 0 {
		t.Errorf("the test exercised nothing: delayed %d, refused %d, bound by bytes %d, by packets %d",
			delayed, refused, bytesBound, packetsBound)
	}
}

func TestOffer_StaysWithinEnvelope(t *testing.T) {
	rnd := testutil.Rand(t)
	for _, burst := range []uint64{0, 3000, 64 << 10} {
		const bits = 10e6
		r := NewRate(bits, 8*time.Second)
		s := Shape{Bytes: r, BytesBurst: r.Cost(burst), MaxDelay: Second}
		var b Bucket
		var now, last Time
		// The largest excess over rate * t in any interval: C_k - rate * t_k less its running minimum.
		low, sigma, sent := 0.0, 0.0, 0.0
		for range 50000 {
			now += Time(rnd.Uint64N(uint64(r.Cost(800))))
			n := 64 + rnd.Uint64N(1437)
			depart, ok := b.Offer(&s, n, 1, now)
			if !ok {
				continue
			}
			if depart < last {
				t.Fatalf("unit leaves at %d, before the one ahead of it at %d", depart, last)
			}
			last = depart
			line := bits / 8 * float64(depart) / float64(Second)
			low = min(low, sent-line)
			sent += float64(n)
			sigma = max(sigma, sent-line-low)
		}
		if bound := float64(burst) + 1500; sigma > bound+1 || sigma < float64(burst)+64 {
			t.Errorf("burst %d: sigma %.1f bytes, want at most %.0f and the burst used", burst, sigma, bound)
		}
	}
}

func TestUnitLargerThanQueuePassesWhenEmpty(t *testing.T) {
	s := Shape{Bytes: NewRate(8, 8*time.Second), MaxDelay: FromDuration(time.Millisecond)}
	var b Bucket
	if _, ok := b.Offer(&s, 65507, 1, Second); !ok {
		t.Error("a unit larger than max_delay was refused by an empty bucket")
	}
	if depart, ok := b.Offer(&s, 1, 1, 2*Second); ok {
		t.Errorf("the next unit may leave at %v, want it refused", depart.Duration())
	}
}

func TestOffer_IdleGainsNoCredit(t *testing.T) {
	s := Shape{Bytes: NewRate(1e12, 8*time.Second), MaxDelay: Second}
	for _, idle := range []time.Duration{0, time.Nanosecond, 738 * time.Millisecond, time.Second, 30 * 24 * time.Hour, 8 * 365 * 24 * time.Hour} {
		b := Bucket{}
		now := Second
		b.Offer(&s, 1500, 1, now)
		now += Time(idle) * ticksPerNano
		first, _ := b.Offer(&s, 1500, 1, now)
		second, _ := b.Offer(&s, 1500, 1, now)
		if second-first < s.Bytes.Cost(1500) {
			t.Errorf("after %v idle two units leave %d ticks apart, want %d", idle, second-first, s.Bytes.Cost(1500))
		}
	}
}

func TestTime_Saturates(t *testing.T) {
	s := Shape{Bytes: NewRate(8, 8*time.Second), MaxDelay: Forever}
	var b Bucket
	for range 10 {
		b.Charge(&s, math.MaxUint64, 1, math.MaxUint64-5)
	}
	if b.DrainedAt() != math.MaxUint64 {
		t.Errorf("DrainedAt = %d, want the last instant", b.DrainedAt())
	}
	if got := FromDuration(math.MaxInt64); got != Forever {
		t.Errorf("FromDuration(292 years) = %d, want Forever", got)
	}
	if got := Time(1).Sub(2); got != 0 {
		t.Errorf("1 - 2 = %d, want 0", got)
	}
	if got := Time(math.MaxUint64).Duration(); got < 9*365*24*time.Hour {
		t.Errorf("the last instant is %v from the origin", got)
	}
}

func TestRescaleKeepsBacklog(t *testing.T) {
	rnd := testutil.Rand(t)
	for range 2000 {
		old := Shape{Bytes: NewRate(8+rnd.Uint64N(1e12), 8*time.Second), Packets: NewRate(1+rnd.Uint64N(1e6), time.Second)}
		next := Shape{Bytes: NewRate(8+rnd.Uint64N(1e12), 8*time.Second), Packets: NewRate(1+rnd.Uint64N(1e6), time.Second)}
		now := Time(rnd.Uint64N(uint64(3600 * Second)))
		n, p := 1+rnd.Uint64N(1<<20), 1+rnd.Uint64N(1000)
		var b Bucket
		b.Charge(&old, n, p, now)
		b.Rescale(&old, &next, now)
		if got := next.Bytes.Units(b.bytes - now); got < n && next.Bytes.Cost(n) < Forever {
			t.Fatalf("backlog %d bytes became %d", n, got)
		}
		if off := float64(b.bytes-now)/float64(next.Bytes.Cost(n)) - 1; off > 1e-3+2/float64(old.Bytes.Cost(n))+2/float64(next.Bytes.Cost(n)) {
			t.Fatalf("backlog of %d bytes takes %d ticks at the new rate, want %d", n, b.bytes-now, next.Bytes.Cost(n))
		}
		if got := next.Packets.Units(b.packets - now); got != p {
			t.Fatalf("backlog %d packets became %d", p, got)
		}
	}
}

func TestDrainedBucketEqualsFresh(t *testing.T) {
	rnd := testutil.Rand(t)
	s := Shape{Bytes: NewRate(10e6, 8*time.Second), BytesBurst: FromDuration(time.Millisecond), MaxDelay: Second / 10}
	drained := 0
	for range 1000 {
		var used Bucket
		now := Time(rnd.Uint64N(uint64(Second)))
		for range 10 {
			now += Time(rnd.Uint64N(uint64(Second / 1000)))
			used.Offer(&s, rnd.Uint64N(1500), 1, now)
		}
		now += Time(rnd.Uint64N(uint64(Second / 50)))
		if !used.Drained(now) {
			continue
		}
		drained++
		var fresh Bucket
		for range 20 {
			n := rnd.Uint64N(1500)
			d1, ok1 := used.Offer(&s, n, 1, now)
			d2, ok2 := fresh.Offer(&s, n, 1, now)
			if d1 != d2 || ok1 != ok2 {
				t.Fatalf("drained bucket %v %v, fresh one %v %v", d1, ok1, d2, ok2)
			}
			now += Time(rnd.Uint64N(uint64(Second / 2000)))
		}
	}
	if drained == 0 {
		t.Error("no bucket drained: the test exercised nothing")
	}
}

func TestCatchUp_BoundsBurst(t *testing.T) {
	const unit = 1000
	r := NewRate(8e6, 8*time.Second) // a unit a millisecond
	s := Shape{Bytes: r}
	slack := r.Cost(unit)
	for _, tt := range []struct {
		name  string
		stall Time // one wake-up is this late
		burst int  // units that leave at once after it
		lost  Time // time that the schedule is behind afterwards
	}{
		{"on time", 0, 1, 0},
		{"half a unit late", slack / 2, 1, 0},
		{"a unit late", slack, 2, 0},
		{"ten units late", 10 * slack, 2, 9 * slack},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b Bucket
			now := Second
			release := func(now Time) (n int) {
				for b.Depart(&s, now) <= now {
					b.Charge(&s, unit, 1, CatchUp(b.DrainedAt(), now, slack))
					n++
				}
				return n
			}
			b.Charge(&s, unit, 1, now)
			if n := release(now + slack + tt.stall); n != tt.burst {
				t.Errorf("%d units left at once, want %d", n, tt.burst)
			}
			next := b.DrainedAt()
			want := now + slack + tt.lost + Time(tt.burst)*slack
			if next != want {
				t.Errorf("next unit %d ticks from the schedule", int64(next)-int64(want))
			}
		})
	}
}

func BenchmarkOffer(b *testing.B) {
	s := Shape{Bytes: NewRate(10e9, 8*time.Second), Packets: NewRate(1e6, time.Second), MaxDelay: Second}
	var bucket Bucket
	now := Second
	for b.Loop() {
		now += 70
		bucket.Offer(&s, 64, 1, now)
	}
}
