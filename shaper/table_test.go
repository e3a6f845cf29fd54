package shaper

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"pgregory.net/rapid"

	"shaperd/leaky"
)

// check compares tags, slots and the count of entries with each other.
func (t *table) check() error {
	entries := 0
	seen := map[Key]bool{}
	for i := range t.slots {
		s := &t.slots[i]
		group := uint32(i / groupSize)
		tag := t.tags[group][i%groupSize/8] >> (i % 8 * 8) & 0xff
		if tag == 0 {
			if *s != (slot{}) {
				return fmt.Errorf("slot %d is empty and holds %+v", i, *s)
			}
			continue
		}
		entries++
		p := t.place(&s.key)
		if tag != p.tag&0xff || group != p.first && group != p.second {
			return fmt.Errorf("slot %d holds %+v of place %+v under tag %#x", i, s.key, p, tag)
		}
		if t.find(&s.key, p) != s || seen[s.key] {
			return fmt.Errorf("slot %d holds %+v a second time", i, s.key)
		}
		seen[s.key] = true
	}
	if entries != t.entries {
		return fmt.Errorf("%d slots are taken, entries is %d", entries, t.entries)
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
	return Key{Connection: n, Source: [16]byte{15: byte(n)}, Port: uint16(n)}
}

var oneUnit = leaky.Shape{Bytes: leaky.NewRate(8000, 8*time.Second), MaxDelay: leaky.Second}

// A table with room is a map.
func TestTableIsAMap(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		tb := newTable(rapid.IntRange(40, 400).Draw(rt, "capacity"))
		want := map[Key]leaky.Bucket{}
		now := leaky.Second
		for range rapid.IntRange(1, 300).Draw(rt, "operations") {
			now += leaky.Time(rapid.Uint64Range(0, uint64(leaky.Second/100)).Draw(rt, "step"))
			if rapid.IntRange(0, 9).Draw(rt, "reshape") == 0 {
				from := &leaky.Shape{Bytes: leaky.NewRate(rapid.Uint64Range(1, 1e6).Draw(rt, "from"), time.Second)}
				to := &leaky.Shape{Bytes: leaky.NewRate(rapid.Uint64Range(1, 1e6).Draw(rt, "to"), time.Second)}
				r := reshape{from, to, rapid.Bool().Draw(rt, "enforce")}
				tb.reshape(map[uint32]reshape{1: r}, now)
				for k, b := range want {
					if k.Limit == 1 {
						b.Rescale(from, to, now)
						if r.enforce {
							b.Enforce(to, now)
						}
						want[k] = b
					}
				}
			}
			if rapid.IntRange(0, 9).Draw(rt, "settle") == 0 {
				tb.settle()
			}
			k := numbered(rapid.Uint64Range(0, 30).Draw(rt, "key"))
			k.Limit = uint32(k.Connection % 2)
			if rapid.IntRange(0, 2).Draw(rt, "remove") == 0 {
				got := tb.remove(&k, tb.place(&k), now)
				if got != want[k] {
					rt.Fatalf("remove %d: %+v, want %+v", k.Connection, got, want[k])
				}
				delete(want, k)
				continue
			}
			s := tb.get(&k, tb.place(&k), now)
			if s.key != k || s.bucket != want[k] {
				rt.Fatalf("get %d: %+v, want %+v", k.Connection, *s, want[k])
			}
			s.bucket.Charge(&oneUnit, rapid.Uint64Range(0, 100).Draw(rt, "bytes"), 1, now)
			want[k] = s.bucket
		}
		if err := tb.check(); err != nil {
			rt.Fatal(err)
		}
		for k, b := range want {
			if s := tb.find(&k, tb.place(&k)); s == nil || s.bucket != b {
				rt.Fatalf("find %d: %+v, want %+v", k.Connection, s, b)
			}
		}
		if tb.entries != len(want) || tb.evictedDrained+tb.evictedIndebted != 0 {
			rt.Fatalf("%d entries, want %d; %d and %d evicted", tb.entries, len(want), tb.evictedDrained, tb.evictedIndebted)
		}
	})
}

// tracked is what the table holds against k.
func (t *table) tracked(k *Key) leaky.Bucket {
	p := t.place(k)
	if s := t.find(k, p); s != nil {
		return s.bucket
	}
	return t.newcomer(k, p, 0)
}

// Whatever passes through a table far too small, and whatever is taken out of it
// meanwhile, no key owes less than it was charged.
func TestNoKeyGetsAFresherBucket(t *testing.T) {
	rnd := newRand(t)
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
					tb.get(&k, tb.place(&k), now).bucket.Merge(b)
				}
			case isOut:
				b.Charge(shape, n, 1, now)
				out[i] = b
				truth[i].Charge(shape, n, 1, now)
			case rnd.IntN(4) == 0:
				out[i] = tb.remove(&k, tb.place(&k), now)
				checkedOut++
			default:
				tb.get(&k, tb.place(&k), now).bucket.Charge(shape, n, 1, now)
				truth[i].Charge(shape, n, 1, now)
			}
			for _, j := range []int{i, rnd.IntN(keys)} {
				k := numbered(uint64(j))
				got, isOut := out[j]
				if !isOut {
					got = tb.tracked(&k)
				}
				g, w := probe(got, now), probe(truth[j], now)
				if g[0] < w[0] || g[1] < w[1] {
					t.Fatalf("key %d owes %v, was charged %v", j, g, w)
				}
				if g != w {
					inherited++
				}
			}
		}
		if err := tb.check(); err != nil {
			t.Fatal(err)
		}
		evicted += tb.evictedIndebted
	}
	if evicted == 0 || inherited == 0 || checkedOut == 0 {
		t.Errorf("the table was never too small: %d evicted in debt, %d inherited, %d checked out", evicted, inherited, checkedOut)
	}
}

// An empty slot holds the zero Key, which is a key like any other, and is not to be found
// there, whatever tag it and the key beside it have.
func TestTheZeroKeyIsInNoEmptySlot(t *testing.T) {
	var zero Key
	lowest := uint64(1 << 8)
	for range 2000 {
		tb := newTable(1) // one group
		lowest = min(lowest, tb.place(&zero).tag/lowBits)
	}
	if lowest != lowestTag {
		t.Errorf("the lowest tag is %d, want %d", lowest, lowestTag)
	}
	for tag := lowest; tag < 1<<8; tag++ {
		tb := newTable(1)
		p := place{tag: tag * lowBits}
		k := numbered(1)
		tb.get(&k, p, leaky.Second)
		if tb.find(&zero, p) != nil {
			t.Errorf("found with tag %d", tag)
		}
	}
}

func TestDrainedGoFirstAndWithoutDebt(t *testing.T) {
	tb := newTable(1) // one group
	now := leaky.Second
	for i := range uint64(groupSize) {
		k := numbered(i)
		tb.get(&k, tb.place(&k), now).bucket.Charge(&oneUnit, 100*(i+1), 1, now)
	}
	for i := range uint64(groupSize) {
		now = leaky.Second + oneUnit.Bytes.Cost(100*(i+1)) // number i has just drained
		k := numbered(100 + i)
		s := tb.get(&k, tb.place(&k), now)
		if !s.bucket.Drained(now) || tb.evictedDrained != i+1 || tb.evictedIndebted != 0 {
			t.Fatalf("newcomer %d owes %d ticks; evicted %d drained, %d indebted", i, s.bucket.Until().Sub(now), tb.evictedDrained, tb.evictedIndebted)
		}
		s.bucket.Charge(&oneUnit, 1e6, 1, now)
	}
	k := numbered(200)
	s := tb.get(&k, tb.place(&k), now)
	if want := leaky.Second + oneUnit.Bytes.Cost(100) + oneUnit.Bytes.Cost(1e6); s.bucket.Until() != want || tb.evictedIndebted != 1 {
		t.Errorf("newcomer to a table full of debt drains at %d, want the least there is, %d", s.bucket.Until(), want)
	}
}

// fill charges n new random keys so that none drains before a second is over.
func (t *table) fill(rnd *rand.Rand, n int, now leaky.Time) {
	for range n {
		k := Key{Source: [16]byte{15: byte(rnd.Uint32())}, Connection: rnd.Uint64()}
		t.get(&k, t.place(&k), now).bucket.Charge(&oneUnit, 1000, 1, now)
	}
}

// The promised number of keys finds place, but for a rare one, in a new table and
// in one full of drained keys. Groups of eight slots lost 1 in 500 in the first
// round, and counting drained slots as taken 1 in 40 in the next.
func TestCapacityAsPromised(t *testing.T) {
	rnd := newRand(t)
	for _, tt := range []struct{ keys, tables, rounds int }{
		{10_000, 5, 4}, {30_000, 5, 3}, {100_000, 2, 3}, {1_000_000, 1, 1},
	} {
		if brief() && tt.keys > 100_000 {
			continue
		}
		t.Run(fmt.Sprint(tt.keys), func(t *testing.T) {
			for range tt.tables {
				tb := newTable(tt.keys)
				for round := range tt.rounds {
					tb.fill(rnd, tt.keys, leaky.Time(1+2*round)*leaky.Second)
					if most := uint64(tt.keys / 5000); tb.evictedIndebted > most {
						t.Errorf("round %d: %d keys in debt lost their place, want at most %d", round, tb.evictedIndebted, most)
					}
				}
			}
		})
	}
}

func TestFloodTakesNoMemory(t *testing.T) {
	rnd := newRand(t)
	const keys = 10_000
	s := New(keys)
	p := mustCompile(t, s, []Limit{{
		Name: "source", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 8e5, MaxDelay: 100 * time.Millisecond,
	}}, udpOnly)
	honest := fromIPv4(1)
	r := p.Route(honest)
	s.Decide(p, honest, r, r.ToDownstream, 1000, 1, leaky.Second)
	mine := s.CheckOut(p.Key(0, honest, r), leaky.Second)
	kept := mine

	flood := 1_000_000
	if brief() {
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
	got := s.Buckets()
	if got.Entries > got.Capacity || got.EvictedIndebted == 0 || uint64(got.Entries)+got.EvictedDrained+got.EvictedIndebted < uint64(flood)*9/10 {
		t.Errorf("%+v after %d keys", got, flood)
	}
	if mine != kept {
		t.Error("a bucket that was checked out changed")
	}
	mine.Charge(p.Shape(0), 100_000, 1, now)
	s.CheckIn(p.Key(0, honest, r), mine, now)
	if b, ok := s.level(p, 0, honest); !ok || b.Until() < mine.Until() {
		t.Errorf("checked in, the bucket drains at %d, before %d", b.Until(), mine.Until())
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
	if got := s.Buckets().Entries; got != 0 {
		t.Errorf("a drained bucket took a place: %d entries", got)
	}
	b.Charge(p.Shape(0), 1000, 1, now)
	s.CheckIn(k, b, now)
	if got := s.Buckets().Entries; got != 1 {
		t.Errorf("%d entries, want 1", got)
	}
	if got := s.CheckOut(k, now); got != b {
		t.Errorf("CheckOut = %+v, want %+v", got, b)
	}
	if got := s.Buckets().Entries; got != 0 {
		t.Errorf("%d entries after CheckOut, want 0", got)
	}
	// Charged meanwhile by somebody else: the deeper debt stays.
	s.Decide(p, f, Route{}, 1, 5000, 1, now)
	s.CheckIn(k, b, now)
	got := s.CheckOut(k, now)
	if want := now + p.Shape(0).Bytes.Cost(5000); got.Until() != want {
		t.Errorf("drains at %d, want %d", got.Until(), want)
	}
	s.CheckIn(k, b, b.Until())
	if got := s.Buckets().Entries; got != 0 {
		t.Errorf("a bucket that has drained by now took a place: %d entries", got)
	}
}

// A flood of sources that owe for hours under one limit: newcomers of another owe no more
// than its own buckets can, and whoever goes on under it never less than he did.
func TestNewcomersOweNoMoreThanTheirLimitCan(t *testing.T) {
	s := New(256)
	p := mustCompile(t, s, []Limit{
		{Name: "slow", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, NewConnections: Frequency{N: 5, Per: time.Hour}, MaxWait: time.Second, MaxWaiting: 1},
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
	if n := s.Buckets().EvictedIndebted; n < 4000 {
		t.Fatalf("%d were evicted in debt: the table had room", n)
	}
	for _, tt := range []struct {
		limit string
		most  time.Duration
	}{
		{"queue", 200 * time.Millisecond},
		{"burst", 105*time.Millisecond + 145*time.Microsecond},
		{"strict", 100 * time.Millisecond},
	} {
		worst := leaky.Time(0)
		for source := range uint32(100) {
			b := s.CheckOut(keyOf(tt.limit, 1e6+source), now)
			worst = max(worst, b.Until().Sub(now))
		}
		if worst.Duration() > tt.most || worst == 0 {
			t.Errorf("a newcomer of %q owes up to %v, want at most %v, and something", tt.limit, worst.Duration(), tt.most)
		}
	}
	// One that takes all that it may, is pushed out and comes back, owes as much still.
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
			var debt leaky.Bucket
			debt.Charge(p.NewConnections(p.Find("slow")), 0, 1, now)
			s.CheckIn(other, debt, now)
		}
		if got := s.Peek(k, now); got.Until().Sub(now) < p.Shape(i).MaxDelay {
			t.Fatalf("it owes %v after it was pushed out, of %v", got.Until().Sub(now).Duration(), p.Shape(i).MaxDelay.Duration())
		}
		now += leaky.Second / 1000
	}
}

// fullUnit is the payload of a full packet.
const fullUnit = 1448
