package shaper

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"pgregory.net/rapid"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// check verifies that tags, slots and the number of entries are consistent.
func (t *table) check() error {
	entries := 0
	seen := map[Key]bool{}
	for i := range t.slots {
		s := &t.slots[i]
		group := uint32(i / groupSize)
		tag := t.tags[group][i%groupSize/8] >> (i % 8 * 8) & 0xff
		if tag == 0 {
			if *s != (slot{}) {
				return fmt.Errorf("empty slot %d holds %+v", i, *s)
			}
			continue
		}
		entries++
		p := t.probe(&s.key)
		if tag != p.tag&0xff || group != p.first && group != p.second {
			return fmt.Errorf("slot %d holds %+v with probe %+v under tag %#x", i, s.key, p, tag)
		}
		if t.lookup(&s.key, p) != s || seen[s.key] {
			return fmt.Errorf("slot %d holds a duplicate of %+v", i, s.key)
		}
		seen[s.key] = true
	}
	if entries != t.entries {
		return fmt.Errorf("%d slots are used, entries is %d", entries, t.entries)
	}
	n := 0
	t.each(func(k *Key, _ *leaky.Bucket) {
		if seen[*k] {
			n++
		}
	})
	if n != entries {
		return fmt.Errorf("each yields %d of %d entries", n, entries)
	}
	return nil
}

func numbered(n uint64) Key {
	return Key{Connection: n, Address: [16]byte{15: byte(n)}, Port: uint16(n)}
}

var oneUnit = leaky.Shape{Bytes: leaky.NewRate(8000, 8*time.Second), MaxDelay: leaky.Second}

// A table that is not full behaves like a map.
func TestTable_BehavesLikeMap(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		tb := newTable(rapid.IntRange(40, 400).Draw(rt, "capacity"))
		want := map[Key]leaky.Bucket{}
		now := leaky.Second
		for range rapid.IntRange(1, 300).Draw(rt, "operations") {
			now += leaky.Time(rapid.Uint64Range(0, uint64(leaky.Second/100)).Draw(rt, "step"))
			if rapid.IntRange(0, 9).Draw(rt, "reshape") == 0 {
				from := &leaky.Shape{Bytes: leaky.NewRate(rapid.Uint64Range(1, 1e6).Draw(rt, "from"), time.Second)}
				to := &leaky.Shape{Bytes: leaky.NewRate(rapid.Uint64Range(1, 1e6).Draw(rt, "to"), time.Second)}
				r := shareChange{leaky.NewShare(from, Whole, Whole, now), leaky.NewShare(to, Whole, Whole, now), nil, nil, rapid.Bool().Draw(rt, "enforce")}
				tb.startMigration(map[uint32]shareChange{1: r}, now)
				for k, b := range want {
					if k.Limit == 1 {
						b.Rescale(from, to, now)
						if r.enforce {
							b.CapToBurst(to, now)
						}
						want[k] = b
					}
				}
			}
			if rapid.IntRange(0, 9).Draw(rt, "migrate") == 0 {
				tb.migrateSome()
			}
			k := numbered(rapid.Uint64Range(0, 30).Draw(rt, "key"))
			k.Limit = uint32(k.Connection % 2)
			if rapid.IntRange(0, 2).Draw(rt, "remove") == 0 {
				got := tb.remove(&k, tb.probe(&k), now)
				if got != want[k] {
					rt.Fatalf("remove %d: %+v, want %+v", k.Connection, got, want[k])
				}
				delete(want, k)
				continue
			}
			s := tb.lookupOrInsert(&k, tb.probe(&k), now)
			if s.key != k || s.bucket != want[k] {
				rt.Fatalf("lookupOrInsert %d: %+v, want %+v", k.Connection, *s, want[k])
			}
			s.bucket.Charge(&oneUnit, rapid.Uint64Range(0, 100).Draw(rt, "bytes"), 1, now)
			want[k] = s.bucket
		}
		if err := tb.check(); err != nil {
			rt.Fatal(err)
		}
		for k, b := range want {
			if s := tb.lookup(&k, tb.probe(&k)); s == nil || s.bucket != b {
				rt.Fatalf("lookup %d: %+v, want %+v", k.Connection, s, b)
			}
		}
		if tb.entries != len(want) || tb.evictedDrained+tb.evictedBacklogged != 0 {
			rt.Fatalf("%d entries, want %d; %d and %d evicted", tb.entries, len(want), tb.evictedDrained, tb.evictedBacklogged)
		}
	})
}

// trackedBucket returns the bucket of k, or the one it would get.
func (t *table) trackedBucket(k *Key) leaky.Bucket {
	p := t.probe(k)
	if s := t.lookup(k, p); s != nil {
		return s.bucket
	}
	return t.newBucket(k, p, 0)
}

// In a table that is far too small, and with buckets checked out at any time, no key's
// backlog is smaller than its charges.
func TestTable_NoKeyOwesLessThanCharged(t *testing.T) {
	rnd := testutil.Rand(t)
	shapes := []leaky.Shape{
		{Bytes: leaky.NewRate(8e6, 8*time.Second)},
		{Packets: leaky.NewRate(1000, time.Second)},
		{Bytes: leaky.NewRate(4e6, 8*time.Second), Packets: leaky.NewRate(2000, time.Second)},
	}
	var evicted, inherited, checkedOut uint64
	for range 20 {
		tb := newTable(20 + rnd.IntN(100))
		keys := 100 + rnd.IntN(1000)
		truth := make([]leaky.Bucket, keys)
		out := map[int]leaky.Bucket{}
		gap := leaky.FromDuration(time.Duration(1+rnd.IntN(40)) * time.Microsecond)
		now := leaky.Second
		for range 20000 {
			now += leaky.Time(rnd.Uint64N(uint64(gap)))
			i := rnd.IntN(keys)
			k, shape := numbered(uint64(i)), &shapes[i%len(shapes)]
			n := rnd.Uint64N(1500)
			b, isOut := out[i]
			switch {
			case isOut && rnd.IntN(4) == 0:
				delete(out, i)
				if !b.Drained(now) {
					tb.lookupOrInsert(&k, tb.probe(&k), now).bucket.Merge(b)
				}
			case isOut:
				b.Charge(shape, n, 1, now)
				out[i] = b
				truth[i].Charge(shape, n, 1, now)
			case rnd.IntN(4) == 0:
				out[i] = tb.remove(&k, tb.probe(&k), now)
				checkedOut++
			default:
				tb.lookupOrInsert(&k, tb.probe(&k), now).bucket.Charge(shape, n, 1, now)
				truth[i].Charge(shape, n, 1, now)
			}
			for _, j := range []int{i, rnd.IntN(keys)} {
				k := numbered(uint64(j))
				got, isOut := out[j]
				if !isOut {
					got = tb.trackedBucket(&k)
				}
				g, w := drainTimes(got, now), drainTimes(truth[j], now)
				if g[0] < w[0] || g[1] < w[1] {
					t.Fatalf("key %d drains at %v, its charges at %v", j, g, w)
				}
				if g != w {
					inherited++
				}
			}
		}
		if err := tb.check(); err != nil {
			t.Fatal(err)
		}
		evicted += tb.evictedBacklogged
	}
	if evicted == 0 || inherited == 0 || checkedOut == 0 {
		t.Errorf("the test exercised nothing: %d evicted with a backlog, %d inherited, %d checked out", evicted, inherited, checkedOut)
	}
}

// An empty slot holds the zero Key, which is a valid key but must not be found there,
// whatever its tag and the tag of the key in the next slot are.
func TestTable_ZeroKeyNotInEmptySlot(t *testing.T) {
	var zero Key
	lowest := uint64(1 << 8)
	for range 2000 {
		tb := newTable(1) // one group
		lowest = min(lowest, tb.probe(&zero).tag/lowBits)
	}
	if lowest != minTag {
		t.Errorf("lowest tag %d, want %d", lowest, minTag)
	}
	for tag := lowest; tag < 1<<8; tag++ {
		tb := newTable(1)
		p := probe{tag: tag * lowBits}
		k := numbered(1)
		tb.lookupOrInsert(&k, p, leaky.Second)
		if tb.lookup(&zero, p) != nil {
			t.Errorf("zero key found with tag %d", tag)
		}
	}
}

func TestTable_EvictsDrainedBucketsFirst(t *testing.T) {
	tb := newTable(1) // one group
	now := leaky.Second
	for i := range uint64(groupSize) {
		k := numbered(i)
		tb.lookupOrInsert(&k, tb.probe(&k), now).bucket.Charge(&oneUnit, 100*(i+1), 1, now)
	}
	for i := range uint64(groupSize) {
		now = leaky.Second + oneUnit.Bytes.Cost(100*(i+1)) // number i has just drained
		k := numbered(100 + i)
		s := tb.lookupOrInsert(&k, tb.probe(&k), now)
		if !s.bucket.Drained(now) || tb.evictedDrained != i+1 || tb.evictedBacklogged != 0 {
			t.Fatalf("new key %d has a backlog of %d ticks; evicted %d drained, %d backlogged", i, s.bucket.DrainedAt().Sub(now), tb.evictedDrained, tb.evictedBacklogged)
		}
		s.bucket.Charge(&oneUnit, 1e6, 1, now)
	}
	k := numbered(200)
	s := tb.lookupOrInsert(&k, tb.probe(&k), now)
	if want := leaky.Second + oneUnit.Bytes.Cost(100) + oneUnit.Bytes.Cost(1e6); s.bucket.DrainedAt() != want || tb.evictedBacklogged != 1 {
		t.Errorf("new key in a full table drains at %d, want the smallest backlog, %d", s.bucket.DrainedAt(), want)
	}
}

// fill charges n new random keys, of which none drains within a second.
func (t *table) fill(rnd *rand.Rand, n int, now leaky.Time) {
	for range n {
		k := Key{Address: [16]byte{15: byte(rnd.Uint32())}, Connection: rnd.Uint64()}
		t.lookupOrInsert(&k, t.probe(&k), now).bucket.Charge(&oneUnit, 1000, 1, now)
	}
}

// The promised number of keys fits, with rare exceptions, into a new table and into one
// full of drained keys. Groups of eight slots evicted 1 in 500 in the first round, and
// counting drained slots as used 1 in 40 in the next.
func TestTable_HoldsPromisedCapacity(t *testing.T) {
	rnd := testutil.Rand(t)
	for _, tt := range []struct{ keys, tables, rounds int }{
		{10_000, 5, 4}, {30_000, 5, 3}, {100_000, 2, 3}, {1_000_000, 1, 1},
	} {
		if shortRun() && tt.keys > 100_000 {
			continue
		}
		t.Run(fmt.Sprint(tt.keys), func(t *testing.T) {
			for range tt.tables {
				tb := newTable(tt.keys)
				for round := range tt.rounds {
					tb.fill(rnd, tt.keys, leaky.Time(1+2*round)*leaky.Second)
					if bound := uint64(tt.keys / 5000); tb.evictedBacklogged > bound {
						t.Errorf("round %d: %d keys with a backlog evicted, want at most %d", round, tb.evictedBacklogged, bound)
					}
				}
			}
		})
	}
}

func TestTable_FloodAllocatesNothing(t *testing.T) {
	rnd := testutil.Rand(t)
	const keys = 10_000
	s := New(keys)
	p := mustCompile(t, s, []Limit{{
		Name: "source", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 8e5, MaxDelay: 100 * time.Millisecond,
	}}, udpOnly)
	honest := fromIPv4(1)
	r := p.Route(honest)
	s.Decide(p, honest, r, r.ToDownstream, 1000, 1, leaky.Second)
	mine := s.CheckOut(p.Key(0, honest, r), leaky.Second)
	unchanged := mine

	flood := 1_000_000
	if shortRun() {
		flood = 100_000
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	now := leaky.Second
	for range flood {
		now += leaky.Second / 1_000_000
		f := Flow{Source: ipv4Addr(2 + rnd.Uint32N(1<<32-2)), Port: 53, Protocol: UDP}
		s.Decide(p, &f, r, r.ToDownstream, 1000, 1, now)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 64<<10 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
	got := s.TableUsage()
	if got.Entries > got.Capacity || got.EvictedBacklogged == 0 || uint64(got.Entries)+got.EvictedDrained+got.EvictedBacklogged < uint64(flood)*9/10 {
		t.Errorf("%+v after %d keys", got, flood)
	}
	if mine != unchanged {
		t.Error("a bucket that was checked out changed")
	}
	mine.Charge(p.Shape(0), 100_000, 1, now)
	s.CheckIn(p.Key(0, honest, r), mine, now)
	if b, ok := s.lookupBucket(p, 0, honest); !ok || b.DrainedAt() < mine.DrainedAt() {
		t.Errorf("after CheckIn the bucket drains at %d, before %d", b.DrainedAt(), mine.DrainedAt())
	}
	if err := s.table.check(); err != nil {
		t.Error(err)
	}
}

func TestCheckOutAndIn(t *testing.T) {
	s := New(100)
	p := mustCompile(t, s, []Limit{{Name: "l", Rate: 8000, MaxDelay: time.Hour}}, udpOnly)
	f := fromIPv4(1)
	k := p.Key(0, f, Route{})
	now := leaky.Second

	b := s.CheckOut(k, now)
	if b != (leaky.Bucket{}) {
		t.Errorf("CheckOut of a new key: %+v", b)
	}
	s.CheckIn(k, b, now)
	if got := s.TableUsage().Entries; got != 0 {
		t.Errorf("a drained bucket was inserted: %d entries", got)
	}
	b.Charge(p.Shape(0), 1000, 1, now)
	s.CheckIn(k, b, now)
	if got := s.TableUsage().Entries; got != 1 {
		t.Errorf("%d entries, want 1", got)
	}
	if got := s.CheckOut(k, now); got != b {
		t.Errorf("CheckOut = %+v, want %+v", got, b)
	}
	if got := s.TableUsage().Entries; got != 0 {
		t.Errorf("%d entries after CheckOut, want 0", got)
	}
	// After a charge by another caller the larger backlog wins.
	s.Decide(p, f, Route{}, 1, 5000, 1, now)
	s.CheckIn(k, b, now)
	got := s.CheckOut(k, now)
	if want := now + p.Shape(0).Bytes.Cost(5000); got.DrainedAt() != want {
		t.Errorf("drains at %d, want %d", got.DrainedAt(), want)
	}
	s.CheckIn(k, b, b.DrainedAt())
	if got := s.TableUsage().Entries; got != 0 {
		t.Errorf("a bucket that has drained by now was inserted: %d entries", got)
	}
}

// After a flood of sources whose backlogs under one limit take hours to drain, new keys of
// another limit inherit no more than its own maximum, and no key of it loses backlog.
func TestTable_NewBucketInheritsAtMostItsOwnMaximum(t *testing.T) {
	s := New(256)
	p := mustCompile(t, s, []Limit{
		{Name: "slow", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, NewConnections: Frequency{N: 5, Per: time.Hour}, QueueTimeout: time.Second, MaxQueue: 1},
		{Name: "queue", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 80e6, MaxDelay: 200 * time.Millisecond},
		{Name: "burst", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 80e6, Burst: 1 << 20},
		{Name: "strict", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Packets: Frequency{N: 10, Per: time.Second}},
	}, udpOnly)
	now := leaky.Second
	s.Swap(p, now)
	keyOf := func(limit string, source uint32) Key {
		f := fromIPv4(source)
		return p.Key(p.Find(limit), f, p.Route(f))
	}
	for source := range uint32(5000) {
		k := keyOf("slow", source)
		k.Limit++
		now += leaky.Second / 1000
		b := s.CheckOut(k, now)
		b.Charge(p.NewConnections(p.Find("slow")), 0, 1, now)
		s.CheckIn(k, b, now)
	}
	if n := s.TableUsage().EvictedBacklogged; n < 4000 {
		t.Fatalf("only %d evicted with a backlog: the table had room", n)
	}
	for _, tt := range []struct {
		limit string
		bound time.Duration
	}{
		{"queue", 200 * time.Millisecond},
		{"burst", 105*time.Millisecond + 145*time.Microsecond},
		{"strict", 100 * time.Millisecond},
	} {
		worst := leaky.Time(0)
		for source := range uint32(100) {
			b := s.CheckOut(keyOf(tt.limit, 1e6+source), now)
			worst = max(worst, b.DrainedAt().Sub(now))
		}
		if worst.Duration() > tt.bound || worst == 0 {
			t.Errorf("new keys of %q have backlogs of up to %v, want more than 0 and at most %v", tt.limit, worst.Duration(), tt.bound)
		}
	}
	// A key with the maximum backlog that is evicted and comes back still has it.
	i, k := p.Find("queue"), keyOf("queue", 7)
	for range 100 {
		b := s.CheckOut(k, now)
		for ok := true; ok; {
			_, ok = b.Offer(p.Shape(i), fullUnit, 1, now)
		}
		s.CheckIn(k, b, now)
		for source := range uint32(500) {
			other := keyOf("slow", 2e6+source)
			other.Limit++
			var b leaky.Bucket
			b.Charge(p.NewConnections(p.Find("slow")), 0, 1, now)
			s.CheckIn(other, b, now)
		}
		if got, _ := s.Peek(k, now); got.DrainedAt().Sub(now) < p.Shape(i).MaxDelay {
			t.Fatalf("its backlog is %v after the eviction, want %v", got.DrainedAt().Sub(now).Duration(), p.Shape(i).MaxDelay.Duration())
		}
		now += leaky.Second / 1000
	}
}

// fullUnit is the payload of a full packet.
const fullUnit = 1448
