package shaper

import (
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// sharedBucket is a bucket whose share changes at once.
type sharedBucket struct {
	bucket leaky.Bucket
	share  leaky.Share
}

func (b *sharedBucket) change(to leaky.Share, now leaky.Time) {
	b.bucket.Reshare(&b.share, &to, now)
	b.share = to
}

// Whatever cold shares do, and whichever buckets are in the table, hot, or drained and forgotten: each
// has the backlog and the credit of one that no table ever held.
func TestSetCold_EqualsBucketsOfTheirOwn(t *testing.T) {
	rnd := testutil.Rand(t)
	var drained, fresh, indebted int
	for range 60 {
		limit := Limit{Name: "l", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Shared: true, Rate: 8e6, MaxDelay: time.Second}
		limit.Burst = uint64(rnd.IntN(2)) * 50_000
		s, now := New(1000), leaky.Second
		var p *Policy
		want := map[Key]*sharedBucket{}
		cold := uint32(0)
		swap := func() {
			p = mustCompile(t, s, []Limit{limit}, udpOnly)
			s.Swap(p, now)
			for _, b := range want {
				b.change(leaky.NewShare(p.Shape(0), cold, Whole, now), now)
			}
		}
		swap()
		for n := range uint32(40) {
			f := fromIPv4(n)
			want[p.Key(0, f, p.Route(f))] = &sharedBucket{share: leaky.NewShare(p.Shape(0), 0, Whole, now)}
		}
		seen := map[Key]bool{}
		for range 300 {
			now += leaky.Time(rnd.Uint64N(uint64(leaky.Second) << (8 * rnd.IntN(2)) / 50))
			switch rnd.IntN(8) {
			case 0:
				cold = uint32(rnd.IntN(4)) * (1 + rnd.Uint32N(Whole/4))
				s.SetCold(cold, now)
				for _, b := range want {
					b.change(leaky.NewShare(p.Shape(0), cold, Whole, now), now)
				}
				continue
			case 1:
				s.Migrate()
			case 2:
				if rnd.IntN(4) == 0 {
					limit.Rate = 8e5 + rnd.Uint64N(8e6)
					swap()
				}
			}
			f := fromIPv4(rnd.Uint32N(40))
			key := p.Key(0, f, p.Route(f))
			b := want[key]
			hot := leaky.NewShare(p.Shape(0), uint32(rnd.IntN(3))*rnd.Uint32N(Whole/2), Whole, now)
			forgotten := s.table.limit(key.Limit).fresh
			forgotten.Reshare(&s.table.limit(key.Limit).share, &hot, now)
			bucket := s.CheckOutShared(key, &hot, now)
			got, _ := bucket.DrainTimes(now)
			coldShare := b.share
			b.change(hot, now)
			// One that had drained while others still lacked credit is forgotten, and lacks as much as they do.
			exact, _ := b.bucket.DrainTimes(now)
			if lacks, _ := forgotten.DrainTimes(now); got != exact && (got < exact || got != lacks) {
				t.Fatalf("a backlog of %v after %d parts, want %v", got.Duration(), cold, exact.Duration())
			}
			if got != exact {
				b.bucket = bucket
			}
			if !seen[key] {
				fresh++
			}
			seen[key] = true
			if hot.Parts > 0 {
				n := rnd.Uint64N(40_000) >> (14 * rnd.IntN(2)) // some bytes are repaid in seconds, even by a bucket without parts
				bucket.Charge(&hot.Shape, n, 0, now)
				b.bucket.Charge(&hot.Shape, n, 0, now)
				now += leaky.Time(rnd.IntN(2)) * leaky.Time(rnd.Uint64N(uint64(leaky.Second/50)))
			}
			switch level, _ := bucket.DrainTimes(now); {
			case level == 0:
				drained++
			case level > hot.BytesBurst:
				indebted++
			}
			s.CheckInShared(key, bucket, &hot, now)
			b.change(coldShare, now)
		}
	}
	if drained == 0 || fresh == 0 || indebted == 0 {
		t.Errorf("the test exercised nothing: %d drained, %d new, %d owed", drained, fresh, indebted)
	}
}

// A limit that becomes shared keeps its credit as far as its share of the burst; one that hosts shared
// before has none at first, and a limit that is not shared is not touched by any of it.
func TestSetCold_FirstPolicy(t *testing.T) {
	one := Limit{Name: "one", Rate: 8e6, Burst: 100_000, MaxDelay: time.Second}
	shared := one
	shared.Name, shared.Shared = "shared", true
	s, now := New(10), leaky.Second
	s.Swap(mustCompile(t, s, []Limit{one, shared}, udpOnly), now)
	now += leaky.Second
	s.SetCold(Whole/4, now)
	for _, tt := range []struct {
		limit string
		want  time.Duration // until a unit leaves after one of 10,000 bytes
	}{
		{"one", 0},
		{"shared", 40 * time.Millisecond},
	} {
		p := s.Policy()
		i := p.Find(tt.limit)
		b, share := s.Peek(Key{Limit: p.State(i).ID}, now)
		b.Charge(&share.Shape, 10_000, 1, now)
		if got := (share.Depart(&b, now) - now).Duration(); got < tt.want || got > tt.want+time.Microsecond {
			t.Errorf("%s: the next unit waits %v, want %v", tt.limit, got, tt.want)
		}
	}
	one.Shared = true
	s.Swap(mustCompile(t, s, []Limit{one, shared}, udpOnly), now)
	p := s.Policy()
	b, share := s.Peek(Key{Limit: p.State(p.Find("one")).ID}, now)
	b.Charge(&share.Shape, 25_000, 1, now)
	if share.Parts != Whole/4 || share.Depart(&b, now) != now {
		t.Errorf("%d parts; the burst of the share is lost", share.Parts)
	}
	if b.Charge(&share.Shape, 1000, 1, now); share.Depart(&b, now) == now {
		t.Error("more than the burst of the share leaves at once")
	}
}

// What a bucket of a shared limit owes survives a restart, and its credit does not.
func TestRestore_SharedLimit(t *testing.T) {
	limits := []Limit{{Name: "l", Rate: 8e6, Burst: 100_000, MaxDelay: time.Second, Shared: true}}
	for _, tt := range []struct {
		name   string
		charge uint64
		want   time.Duration // until a unit leaves, at a quarter of 1 MB/s
	}{
		{"drained", 0, 0},
		{"some of the burst", 5_000, 0},
		{"more than the burst", 125_000, 400 * time.Millisecond},
	} {
		s, now := New(10), leaky.Second
		s.Swap(mustCompile(t, s, limits, udpOnly), now)
		s.SetCold(Whole/4, now)
		now += 10 * leaky.Second
		k := Key{Limit: s.Policy().State(0).ID}
		b, share := s.Peek(k, now)
		b.Charge(&share.Shape, tt.charge, 1, now)
		s.CheckIn(k, b, now)
		saved := s.Backlogs(10, now)

		s = New(10)
		p := mustCompile(t, s, limits, udpOnly)
		s.Restore(p, saved, 0, leaky.Second)
		s.Swap(p, leaky.Second)
		s.SetCold(Whole/4, 3*leaky.Second)
		b, share = s.Peek(k, 3*leaky.Second)
		if got := (share.Depart(&b, 3*leaky.Second) - 3*leaky.Second).Duration(); got < tt.want || got > tt.want+time.Millisecond {
			t.Errorf("%s: the next unit waits %v, want %v", tt.name, got, tt.want)
		}
		b.Charge(&share.Shape, 1, 1, 3*leaky.Second)
		if share.Depart(&b, 3*leaky.Second) == 3*leaky.Second {
			t.Errorf("%s: two units leave at once: there is credit", tt.name)
		}
	}
}
