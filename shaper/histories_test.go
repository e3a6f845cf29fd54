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
			st.histories.capacity = 100
			passed := map[Key][]leaky.Time{}
			now := 10 * leaky.Second
			total, refused := 0, 0
			for range 20_000 {
				now += leaky.Time(rnd.ExpFloat64() * float64(leaky.Second) * 60 / 1000)
				k := Key{Limit: st.ID + 1}
				binary.BigEndian.PutUint32(k.Source[12:], rnd.Uint32N(sources))
				var b leaky.Bucket
				h := s.CheckOutHistory(p, 0, k, &b, p.NewConnections(0), now)
				if h.Depart(now) == now {
					h.Charge(now)
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
				if u := s.HistoryUsage(st); u.Entries > u.Capacity || u.Entries != len(st.histories.byKey) {
					t.Fatalf("%+v, %d by key", u, len(st.histories.byKey))
				}
			}
			u := s.HistoryUsage(st)
			if u.Evicted == 0 || total < 100 || refused < 100 {
				t.Errorf("%+v; %d have passed, %d were refused", u, total, refused)
			}
			now += 121 * leaky.Second
			for i := range uint32(200) { // all that are empty make room
				k := Key{Limit: st.ID + 1}
				binary.BigEndian.PutUint32(k.Source[12:], 1e6+i)
				var b leaky.Bucket
				h := s.CheckOutHistory(p, 0, k, &b, p.NewConnections(0), now)
				if h.Used(now) != 0 {
					t.Fatal("a new source inherits what has long passed")
				}
				if i < 100 {
					h.Charge(now)
				}
				s.CheckInHistory(st, p.Limit(0), k, h, now)
			}
			if got := s.HistoryUsage(st); got.Evicted != u.Evicted || got.Entries != 100 {
				t.Errorf("%+v, was %+v", got, u)
			}
		})
	}
}

// A limit takes 16 MiB at most for its histories.
func TestHistories_Memory(t *testing.T) {
	for _, tt := range []struct {
		algorithm Algorithm
		n         uint64
		keys      int
	}{{SlidingWindow, 1000, 52_428}, {SlidingLog, 10, 41_943}, {SlidingLog, leaky.MaxLog, 2016}} {
		l := &Limit{Algorithm: tt.algorithm, NewConnections: Frequency{tt.n, time.Minute}}
		h := newHistories(l)
		if h.capacity != tt.keys {
			t.Errorf("%v of %d: %d keys", tt.algorithm, tt.n, h.capacity)
		}
		used := heapOf(func() any {
			h := newHistories(l)
			for i := range 2 * h.capacity {
				var k Key
				binary.BigEndian.PutUint32(k.Source[12:], uint32(i))
				one := l.newHistory()
				charge(one, tt.n, leaky.Second)
				h.put(k, one, leaky.Second)
			}
			return h
		})
		if used > historyMemory*11/10 {
			t.Errorf("%v of %d: %d bytes", tt.algorithm, tt.n, used)
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
			k := Key{Limit: p.State(0).ID + 1, Source: [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 1}}
			b := s.CheckOut(k, now)
			h := s.CheckOutHistory(p, 0, k, &b, p.NewConnections(0), now)
			for ; n < pass; n++ {
				if h != nil {
					if h.Depart(now) > now {
						break
					}
					h.Charge(now)
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
		now = 135 * leaky.Second
		shapers[1].Restore(shapers[1].Policy(), saved, 5*leaky.Second, now)
		if n := left(shapers[1], 10); n != 2 {
			t.Errorf("%v: %d more have passed after a restart, want 2", a, n)
		}
	}
}
