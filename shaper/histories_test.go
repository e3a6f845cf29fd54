package shaper

import (
	"encoding/binary"
	"runtime"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// More sources come than have room: no source has passed more often than its limit allows, whatever was evicted, and memory stays
// within its bound.
func TestHistories_Eviction(t *testing.T) {
	for _, a := range []Algorithm{SlidingWindow, SlidingLog} {
		t.Run(a.String(), func(t *testing.T) {
			rnd := testutil.Rand(t)
			const n, per, sources = 5, time.Minute, 400
			s := New(16)
			p, err := s.Compile([]Limit{{Name: "l", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Algorithm: a, NewConnections: Frequency{n, per}}}, nil, nil, nil, false)
			if err != nil {
				t.Fatal(err)
			}
			st := p.State(0)
			st.histories = newHistories(p.Limit(0))
			st.histories.most = 100 * (entrySize + 100)
			passed := map[Key][]leaky.Time{}
			now := 10 * leaky.Second
			total, refused := 0, 0
			for range 20_000 {
				now += leaky.Time(rnd.ExpFloat64() * float64(leaky.Second) * 60 / 1000)
				k := Key{Limit: st.ID + 1}
				binary.BigEndian.PutUint32(k.Address[12:], rnd.Uint32N(sources))
				var b leaky.Bucket
				h := s.CheckOutHistory(p, 0, k, &b, p.NewConnections(0), now)
				if h.Depart(now) == now {
					h.Charge(1, now)
					total++
					times := passed[k]
					if passed[k] = append(times, now); len(times) >= n && a == SlidingLog && times[len(times)-n]+60*leaky.Second > now {
						t.Fatalf("%d within %v", n+1, per)
					}
					within := 0
					for _, at := range passed[k] {
						if at+60*leaky.Second > now {
							within++
						}
					}
					if within > 2*n {
						t.Fatalf("%d within %v", within, per)
					}
				} else {
					refused++
				}
				s.CheckInHistory(st, p.Limit(0), k, h, now)
				if rnd.IntN(10) == 0 {
					s.NextAdmission(p, 0, k, leaky.Bucket{}, p.NewConnections(0), now) // a look changes nothing
				}
				if h := st.histories; h.size > h.most || len(h.soonest) != len(h.byKey) {
					t.Fatalf("%d bytes, %d in the heap, %d by key", h.size, len(h.soonest), len(h.byKey))
				}
			}
			u := s.HistoryUsage(st, now)
			if u.Evicted == 0 || total < 100 || refused < 100 {
				t.Errorf("%+v; %d have passed, %d were refused", u, total, refused)
			}
			now += 121 * leaky.Second
			for i := range uint32(200) { // all that are empty make room
				k := Key{Limit: st.ID + 1}
				binary.BigEndian.PutUint32(k.Address[12:], 1e6+i)
				var b leaky.Bucket
				h := s.CheckOutHistory(p, 0, k, &b, p.NewConnections(0), now)
				if h.Used(now) != 0 {
					t.Fatal("a new source inherits what has long passed")
				}
				if i < 50 {
					h.Charge(1, now)
				}
				s.CheckInHistory(st, p.Limit(0), k, h, now)
			}
			if got := s.HistoryUsage(st, now); got.Evicted != u.Evicted || got.Entries != 50 {
				t.Errorf("%+v, was %+v", got, u)
			}
		})
	}
}

// A limit takes 16 MiB at most for its histories, also if a reload makes them larger.
func TestHistories_Memory(t *testing.T) {
	for _, tt := range []struct {
		algorithm   Algorithm
		n, next     uint64
		least, most int // keys
	}{{SlidingWindow, 1000, 1000, 45_000, 55_000}, {SlidingLog, 10, 10, 35_000, 45_000}, {SlidingLog, leaky.MaxLog, leaky.MaxLog, 1900, 2100}, {SlidingLog, 10, leaky.MaxLog, 1900, 2100}} {
		h := newHistories(&Limit{Algorithm: tt.algorithm, NewConnections: Frequency{tt.n, time.Minute}})
		l := &Limit{Algorithm: tt.algorithm, NewConnections: Frequency{tt.next, time.Minute}}
		used := heapOf(func() any {
			for i := range uint64(60_000) {
				if i == 20_000 {
					h.follow(l, leaky.Second)
				}
				var k Key
				binary.BigEndian.PutUint64(k.Address[8:], i)
				one := l.newHistory()
				for n := tt.next; n > 0; n -= min(n, 100) {
					one.Charge(min(n, 100), leaky.Second)
				}
				h.put(k, l, one, leaky.Second)
			}
			return h
		})
		if n := len(h.soonest); used > historyMemory*11/10 || n < tt.least || n > tt.most {
			t.Errorf("%v of %d, then %d: %d bytes, %d keys", tt.algorithm, tt.n, tt.next, used, n)
		}
	}
}

// heapOf returns the bytes that what f returns takes.
func heapOf(f func() any) uint64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	kept := f()
	runtime.GC()
	runtime.ReadMemStats(&after)
	runtime.KeepAlive(kept)
	return after.HeapAlloc - before.HeapAlloc
}

// What has passed survives a restart.
func TestHistories_Restore(t *testing.T) {
	for _, a := range []Algorithm{LeakyBucket, FixedWindow, SlidingWindow, SlidingLog} {
		l := Limit{Name: "l", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Algorithm: a, NewConnections: Frequency{5, time.Minute}}
		if a == LeakyBucket {
			l.BurstConnections = 5
		}
		now := 130 * leaky.Second
		left := func(s *Shaper, pass int) (n int) {
			p := s.Policy()
			k := Key{Limit: p.State(0).ID + 1, Address: [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 1}}
			b := s.CheckOut(k, now)
			h := s.CheckOutHistory(p, 0, k, &b, p.NewConnections(0), now)
			for ; n < pass; n++ {
				if h != nil {
					if h.Depart(now) > now {
						break
					}
					h.Charge(1, now)
				} else if _, ok := b.Offer(p.NewConnections(0), 0, 1, now); !ok {
					break
				}
			}
			s.CheckIn(k, b, now)
			if h != nil {
				s.CheckInHistory(p.State(0), p.Limit(0), k, h, now)
			}
			return n
		}
		shapers := [2]*Shaper{New(16), New(16)}
		for _, s := range shapers {
			p, err := s.Compile([]Limit{l}, nil, nil, nil, false)
			if err != nil {
				t.Fatal(err)
			}
			s.Swap(p, now)
		}
		left(shapers[0], 3)
		saved := shapers[0].Backlogs(10, now)
		now = 135 * leaky.Second // the clock goes on
		shapers[1].Restore(shapers[1].Policy(), saved, 5*leaky.Second, now)
		if n := left(shapers[1], 10); n != 2 {
			t.Errorf("%v: %d more have passed after a restart, want 2", a, n)
		}
	}
}

// A source that comes less often than its limit allows is never refused, however often the daemon restarts.
func TestHistories_RestoreAgain(t *testing.T) {
	for _, a := range []Algorithm{SlidingWindow, SlidingLog} {
		l := Limit{Name: "l", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Algorithm: a, NewConnections: Frequency{10, 24 * time.Hour}}
		const hour = 3600 * leaky.Second
		now := 100 * hour
		var saved []Backlog
		for i := range 20 {
			s := New(16)
			p, err := s.Compile([]Limit{l}, nil, nil, nil, false)
			if err != nil {
				t.Fatal(err)
			}
			s.Restore(p, saved, leaky.Second, now)
			s.Swap(p, now)
			k := Key{Limit: p.State(0).ID + 1, Address: [16]byte{15: 1}}
			var b leaky.Bucket
			h := s.CheckOutHistory(p, 0, k, &b, p.NewConnections(0), now)
			if i == 0 {
				h.Charge(9, now)
			}
			if used, want := h.Used(now), i > 2 && a == SlidingLog || i > 3; want && used != 0 {
				t.Errorf("%v: %d still count after %d restarts, 23 h apart", a, used, i)
			}
			s.CheckInHistory(p.State(0), p.Limit(0), k, h, now)
			now += 23 * hour
			saved = s.Backlogs(10, now)
			now += leaky.Second
		}
	}
}

// What was evicted counts when the algorithm changes to one with buckets.
func TestHistories_FloorBecomesBacklog(t *testing.T) {
	l := Limit{Name: "l", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Algorithm: SlidingLog, NewConnections: Frequency{5, time.Minute}}
	s := New(16)
	now := 100 * leaky.Second
	swap := func(a Algorithm) *Policy {
		l.Algorithm, l.BurstConnections = a, 0
		if a == LeakyBucket {
			l.BurstConnections = 5
		}
		p, err := s.Compile([]Limit{l}, nil, nil, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		s.Swap(p, now)
		return p
	}
	p := swap(SlidingLog)
	k := Key{Limit: p.State(0).ID + 1, Address: [16]byte{15: 1}}
	var b leaky.Bucket
	h := s.CheckOutHistory(p, 0, k, &b, p.NewConnections(0), now)
	h.Charge(5, now)
	p.State(0).histories.most = 0
	s.CheckInHistory(p.State(0), p.Limit(0), k, h, now)
	if u := s.HistoryUsage(p.State(0), now); u.Evicted != 1 || u.Entries != 0 {
		t.Fatalf("%+v", u)
	}
	p = swap(LeakyBucket)
	for range 3 { // each time, and not more each time
		b = s.CheckOut(k, now)
		s.CheckOutHistory(p, 0, k, &b, p.NewConnections(0), now)
		if depart := b.Depart(p.NewConnections(0), now); depart < now+11*leaky.Second || depart > now+13*leaky.Second {
			t.Errorf("the next one departs in %v, want 12 s", (depart - now).Duration())
		}
		s.CheckIn(k, b, now)
	}
	now += 61 * leaky.Second
	b = s.CheckOut(k, now)
	if s.CheckOutHistory(p, 0, k, &b, p.NewConnections(0), now); p.State(0).histories != nil || !b.Drained(now) {
		t.Error("something is left of it after a minute")
	}
}

// A tier that is slower than its limit owes what it owed after a restart.
func TestTiers_Restore(t *testing.T) {
	l := Limit{Name: "l", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 1e9, MaxDelay: time.Hour}
	v := l.Values()
	v.Rate = 8000
	l.BySource = []SourceValues{{prefixOf("10.0.0.1/32"), v}}
	var saved []Backlog
	now := 100 * leaky.Second
	for i := range 2 {
		s := New(16)
		p, err := s.Compile([]Limit{l}, nil, nil, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		s.Restore(p, saved, leaky.Second, now)
		s.Swap(p, now)
		f := &Flow{Source: prefixOf("10.0.0.1/32").Addr(), Protocol: UDP}
		d := s.Decide(p, f, p.Route(f), 1, 100_000, 1, now)
		if want := now + leaky.Time(i)*99*leaky.Second; d.Depart+leaky.Second/100 < want || d.Depart > want+leaky.Second/100 {
			t.Errorf("start %d: departs in %v", i, (d.Depart - now).Duration())
		}
		saved = s.Backlogs(10, now)
		now += leaky.Second
	}
}

// What was evicted before a restart is owed after it.
func TestHistories_RestoreEvicted(t *testing.T) {
	for _, a := range []Algorithm{SlidingWindow, SlidingLog} {
		limit := Limit{Name: "l", Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, NewConnections: Frequency{5, time.Hour}, Algorithm: a}
		at := 1000 * leaky.Second
		start := func() (*Shaper, *Policy) {
			s := New(16)
			p := mustCompile(t, s, []Limit{limit}, udpOnly)
			s.Swap(p, at)
			return s, p
		}
		key := func(p *Policy, i uint32) Key {
			k := Key{Limit: p.State(0).ID + 1}
			binary.BigEndian.PutUint32(k.Address[12:], i)
			return k
		}
		s, p := start()
		p.historiesOf(0).most = 10 * (entrySize + 100)
		for i := range uint32(100) {
			k := key(p, i)
			h := s.CheckOutHistory(p, 0, k, &leaky.Bucket{}, p.NewConnections(0), at)
			n := uint64(1)
			if i == 0 {
				n = 5
			}
			h.Charge(n, at)
			at += leaky.Second
			s.CheckInHistory(p.State(0), p.Limit(0), k, h, at)
		}
		next := func(s *Shaper, p *Policy) leaky.Time {
			return s.NextAdmission(p, 0, key(p, 0), leaky.Bucket{}, p.NewConnections(0), at)
		}
		before := next(s, p)
		all := s.Backlogs(1000, at)
		if s, p = start(); next(s, p) != at {
			t.Error("it is not new")
		}
		s.Restore(p, all, 0, at)
		if after := next(s, p); before <= at || after < before {
			t.Errorf("%v: first after %v, and restarted after %v", a, before.Sub(at).Duration(), after.Sub(at).Duration())
		}
	}
}

// The state of logs that are all full is of a size that a start can read.
func TestBacklogs_Times(t *testing.T) {
	var limits []Limit
	for _, name := range []string{"a", "b", "c"} {
		limits = append(limits, Limit{Name: name, Key: KeySource, IPv4Prefix: 32, IPv6Prefix: 64, NewConnections: Frequency{1000, time.Hour}, Algorithm: SlidingLog})
	}
	at := 1000 * leaky.Second
	s := New(16)
	p := mustCompile(t, s, limits, udpOnly)
	s.Swap(p, at)
	for i := range limits {
		for n := range uint32(1900) {
			k := Key{Limit: p.State(i).ID + 1}
			binary.BigEndian.PutUint32(k.Address[12:], n)
			h := s.CheckOutHistory(p, i, k, &leaky.Bucket{}, p.NewConnections(i), at)
			h.Charge(1000, at)
			s.CheckInHistory(p.State(i), p.Limit(i), k, h, at)
		}
	}
	times, all := 0, s.Backlogs(100_000, at)
	for _, b := range all {
		times += len(b.Times)
		if b.Packets != 1000 {
			t.Errorf("%d have passed", b.Packets)
		}
	}
	if times > maxBacklogTimes || times < maxBacklogTimes-1000 || len(all) != 3*1900 {
		t.Errorf("%d times of %d keys", times, len(all))
	}
}

// What a fixed window has let pass counts until that window ends, also after a restart.
func TestFixedWindow_Restore(t *testing.T) {
	limit := Limit{Name: "l", NewConnections: Frequency{100, time.Hour}, Algorithm: FixedWindow}
	const hour = 3600 * leaky.Second
	saved := 2*hour - 60*leaky.Second
	start := func(now leaky.Time) (*Shaper, *Policy, Key) {
		s := New(16)
		p := mustCompile(t, s, []Limit{limit}, udpOnly)
		s.Swap(p, now)
		return s, p, Key{Limit: p.State(0).ID + 1}
	}
	s, p, k := start(saved)
	b := s.CheckOut(k, saved)
	b.Charge(p.NewConnections(0), 0, 100, saved)
	s.CheckIn(k, b, saved)
	all := s.Backlogs(100, saved)
	for _, now := range []leaky.Time{saved + leaky.Second, 2*hour - leaky.Second, 2*hour + leaky.Second, 5 * hour} {
		s, p, k := start(now)
		s.Restore(p, all, now.Sub(saved), now)
		b := s.CheckOut(k, now)
		if next, want := b.Depart(p.NewConnections(0), now), max(now, 2*hour); next != want {
			t.Errorf("%v after it was saved, the next passes after %v, not %v", now.Sub(saved).Duration(), next.Sub(now).Duration(), want.Sub(now).Duration())
		}
	}
}

// NextAdmission is right before the first connection of a key after a change of the algorithm too.
func TestNextAdmission_AlgorithmChanged(t *testing.T) {
	a := Limit{Name: "l", NewConnections: Frequency{10, time.Hour}, BurstConnections: 10}
	b := Limit{Name: "l", NewConnections: Frequency{10, time.Hour}, Algorithm: SlidingLog}
	for _, change := range [][2]Limit{{a, b}, {b, a}} {
		now := 100_000 * leaky.Second
		s := New(16)
		p := mustCompile(t, s, change[:1], udpOnly)
		s.Swap(p, now)
		k := Key{Limit: p.State(0).ID + 1}
		bucket := s.CheckOut(k, now)
		if h := s.CheckOutHistory(p, 0, k, &bucket, p.NewConnections(0), now); h != nil {
			h.Charge(10, now)
			s.CheckInHistory(p.State(0), p.Limit(0), k, h, now)
		} else {
			bucket.Charge(p.NewConnections(0), 0, 10, now)
		}
		s.CheckIn(k, bucket, now)
		p = mustCompile(t, s, change[1:], udpOnly)
		s.Swap(p, now)
		peeked, share := s.Peek(k, now)
		told := s.NextAdmission(p, 0, k, peeked, &share.Shape, now)
		bucket = s.CheckOut(k, now)
		var is leaky.Time
		if h := s.CheckOutHistory(p, 0, k, &bucket, p.NewConnections(0), now); h != nil {
			is = h.Depart(now)
		} else {
			is = bucket.Depart(p.NewConnections(0), now)
		}
		if told != is || is == now {
			t.Errorf("%v to %v: told %v, is %v", change[0].Algorithm, change[1].Algorithm, told.Sub(now).Duration(), is.Sub(now).Duration())
		}
	}
}
