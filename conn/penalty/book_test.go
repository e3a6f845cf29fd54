package penalty

import (
	"net/netip"
	"runtime"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

func address(i int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 32)
}

func rule() *shaper.Penalty {
	return &shaper.Penalty{After: shaper.Frequency{N: 100, Per: time.Minute}, Block: 10 * time.Minute, Factor: 2, Most: 24 * time.Hour}
}

// model does without bounds what a Book does.
type model struct {
	n     map[netip.Prefix]int
	since map[netip.Prefix]time.Duration
	last  map[netip.Prefix]Source
}

func (m *model) refused(p netip.Prefix, y *shaper.Penalty, now time.Duration) bool {
	last, was := m.last[p]
	if was && now < last.Until {
		return false
	}
	if m.n[p] == 0 || now >= m.since[p]+y.After.Per {
		m.n[p], m.since[p] = 0, now
	}
	if m.n[p]++; m.n[p] < int(y.After.N) {
		return false
	}
	m.n[p] = 0
	if !was || now >= last.Until+y.Most {
		last = Source{Prefix: p}
	}
	d := y.Block
	for range last.Times {
		d = min(d*time.Duration(y.Factor), y.Most)
	}
	m.last[p] = Source{Prefix: p, Since: now, Until: now + d, Times: last.Times + 1}
	return true
}

func TestBook_AgainstModel(t *testing.T) {
	rnd := testutil.Rand(t)
	blocks := 0
	for range 50 {
		y := &shaper.Penalty{
			After: shaper.Frequency{N: 1 + rnd.Uint64N(5), Per: time.Duration(1 + rnd.IntN(1000))}, Block: time.Duration(1 + rnd.IntN(1000)), Factor: 1 + rnd.IntN(3),
		}
		y.Most = y.Block + time.Duration(rnd.IntN(5000))
		b := NewBook()
		m := model{map[netip.Prefix]int{}, map[netip.Prefix]time.Duration{}, map[netip.Prefix]Source{}}
		now := -time.Duration(rnd.IntN(10000))
		for range 2000 {
			now += time.Duration(rnd.IntN(100))
			p := address(rnd.IntN(8))
			if rnd.IntN(200) == 0 {
				b.Forget(p)
				delete(m.n, p)
				delete(m.last, p)
			}
			want := m.refused(p, y, now)
			got := b.Refused(p, y, now)
			if (got != nil) != want {
				t.Fatalf("at %d: blocked %v, want %v", now, got, want)
			}
			if want {
				blocks++
				if w := m.last[p]; got.Since != w.Since || got.Until != w.Until || got.Times != w.Times {
					t.Fatalf("%+v, want %+v", *got, w)
				}
			}
			active := 0
			for _, s := range m.last {
				if blocked := now < s.Until; blocked != (b.Blocked(s.Prefix, now) != nil) {
					t.Fatalf("at %d: %v is blocked %v, want %v", now, s.Prefix, !blocked, blocked)
				} else if blocked {
					active++
				}
			}
			next := b.Advance(y, now)
			if n, _ := b.Totals(false); n != active || (next > now) != (n > 0) && now > 0 {
				t.Fatalf("%d blocked, want %d; next %d at %d", n, active, next, now)
			}
		}
	}
	if blocks < 100 {
		t.Errorf("only %d blocks", blocks)
	}
}

// A crowd of others with fewer refusals each does not push out a source, whenever they come.
func TestBook_Crowd(t *testing.T) {
	rnd := testutil.Rand(t)
	b, y := NewBook(), rule()
	offender := netip.MustParsePrefix("192.0.2.1/32")
	for i := range 50 {
		if b.Refused(offender, y, time.Duration(i)) != nil {
			t.Fatal("blocked early")
		}
	}
	for range 3 {
		for i := range 10 * MaxCounted {
			b.Refused(address(i), y, time.Second)
		}
	}
	for i := range 50 {
		if blocked := b.Refused(offender, y, 2*time.Second) != nil; blocked != (i == 49) {
			t.Fatalf("blocked %v after %d refusals", blocked, 51+i)
		}
	}
	// One that begins among them is blocked after a few more refusals, or as many.
	late, n := netip.MustParsePrefix("192.0.2.2/32"), 0
	for i := range 10_000 {
		n++
		if b.Refused(late, y, 3*time.Second) != nil {
			break
		}
		b.Refused(address(rnd.IntN(10*MaxCounted)), y, 3*time.Second+time.Duration(i))
	}
	if n > 1000 {
		t.Errorf("blocked after %d refusals", n)
	}
}

// The book is bounded: the block that ends soonest makes room, and first one that has ended.
func TestBook_Bounded(t *testing.T) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	b, y := NewBook(), rule()
	y.After.N = 1
	block := func(i int, now time.Duration) *Source { return b.Refused(address(i), y, now) }
	for i := range MaxSources {
		block(i, time.Duration(i))
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	size := int64(after.HeapAlloc) - int64(before.HeapAlloc)
	t.Logf("%d bytes", size)
	if size > 4<<20 {
		t.Errorf("a full book takes %d bytes", size)
	}
	for i := range 100 {
		block(MaxSources+i, MaxSources)
	}
	if n, evicted := b.Totals(false); n != MaxSources || evicted != 100 {
		t.Errorf("%d blocked, %d evicted", n, evicted)
	}
	for _, i := range []int{0, 99} {
		if b.Blocked(address(i), MaxSources) != nil {
			t.Errorf("%d was not evicted", i)
		}
	}
	if b.Blocked(address(100), MaxSources) == nil || b.Blocked(address(MaxSources+99), MaxSources) == nil {
		t.Error("the wrong source was evicted")
	}
	over := 10*time.Minute + MaxSources - 1 // of all but the last 100
	b.Advance(y, over)
	for i := range 200 {
		block(20_000+i, over)
	}
	if n, evicted := b.Totals(false); n != 300 || evicted != 100 || len(b.sources) != MaxSources {
		t.Errorf("%d blocked, %d evicted, %d in all", n, evicted, len(b.sources))
	}
	b.Advance(y, over+25*time.Hour)
	n, _ := b.Totals(false)
	if n != 0 || len(b.sources) != 0 || !b.ended.Empty() {
		t.Errorf("%d blocked, %d in all, after all are forgotten", n, len(b.sources))
	}
}

// What was saved is restored, also by a clock that begins later, and not twice.
func TestBook_Restore(t *testing.T) {
	b, y := NewBook(), rule()
	now := 5 * time.Second
	b.Restore(Source{Prefix: address(1), Since: now - time.Hour, Until: now - time.Minute, Times: 3}, now)
	b.Restore(Source{Prefix: address(2), Since: now - time.Hour, Until: now + time.Minute, Times: 2}, now)
	b.Restore(Source{Prefix: address(2), Since: now - time.Hour, Until: now + time.Second, Times: 1}, now)
	if b.Blocked(address(1), now) != nil || b.Blocked(address(2), now) == nil || b.Blocked(address(2), now+time.Minute) != nil {
		t.Error("not as saved")
	}
	y.After.N = 1
	if s := b.Refused(address(1), y, now); s == nil || s.Times != 4 || s.Until-s.Since != 80*time.Minute {
		t.Errorf("%+v", s)
	}
	all := 0
	b.Each(func(*Source) { all++ })
	if all != 2 {
		t.Errorf("%d sources", all)
	}
	if !b.Forget(address(2)) || b.Forget(address(2)) || b.Blocked(address(2), now) != nil {
		t.Error("not forgotten once")
	}
}

func BenchmarkBook_Refused(b *testing.B) {
	book, y := NewBook(), rule()
	for i := 0; b.Loop(); i++ {
		book.Refused(address(i%100_000), y, time.Duration(i))
	}
}
