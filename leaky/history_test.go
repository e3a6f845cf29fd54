package leaky

import (
	"fmt"
	"math/big"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

// passes offers an event.
func passes(h History, now Time) bool {
	if h.Depart(now) > now {
		return false
	}
	h.Charge(1, now)
	return true
}

// fixedWindow is a bucket with a Window as a history of one type with the others.
type fixedWindow struct {
	Shape
	Bucket
}

func newFixedWindow(n uint64, per time.Duration) *fixedWindow {
	w := &fixedWindow{}
	w.Packets, w.PacketsBurst = NewWindow(n, per)
	w.Window = FromDuration(per)
	return w
}

func (w *fixedWindow) Depart(now Time) Time      { return w.Bucket.Depart(&w.Shape, now) }
func (w *fixedWindow) Charge(n uint64, now Time) { w.Bucket.Charge(&w.Shape, 0, n, now) }
func (w *fixedWindow) EmptyAt() Time             { return w.DrainedAt() }

func (w *fixedWindow) Used(now Time) uint64 {
	_, n := w.Backlog(&w.Shape, now)
	return n
}

func (w *fixedWindow) With(Count, Time) History  { panic("not used") }
func (w *fixedWindow) Inherit(o History, _ Time) { w.Merge(o.(*fixedWindow).Bucket) }
func (w *fixedWindow) Size() int                 { return 16 }

// 60 s windows, 18 s into one, 80 events in the one before and 20 in this one: the estimate is 20 + 80 * 0.7 = 76.
func TestSlidingWindow_Estimate(t *testing.T) {
	w := NewSlidingWindow(NewCount(100, time.Minute))
	w.Charge(80, 70*Second)
	w.Charge(20, 130*Second)
	if got := w.Used(138 * Second); got != 76 {
		t.Errorf("estimate %d", got)
	}
	n := 0
	for passes(w, 138*Second) {
		n++
	}
	if n != 24 {
		t.Errorf("%d more have passed, want 24", n)
	}
}

// As many as the limit come in the last 2 ms of a window and again in the first 2 ms of the next one.
func TestHistory_EdgeAttack(t *testing.T) {
	const n, per = 100, time.Minute
	for _, tt := range []struct {
		history     History
		least, most int
	}{
		{newFixedWindow(n, per), 2 * n, 2 * n},
		{NewSlidingWindow(NewCount(n, per)), n, n + 1},
		{NewSlidingLog(NewCount(n, per)), n, n},
	} {
		t.Run(fmt.Sprintf("%T", tt.history), func(t *testing.T) {
			passed := 0
			for at := 120*Second - 2*Second/1000; at < 120*Second+2*Second/1000; at += 10000 * Nanosecond {
				if passes(tt.history, at) {
					passed++
				}
			}
			if passed < tt.least || passed > tt.most {
				t.Errorf("%d passed in 4 ms, want %d to %d", passed, tt.least, tt.most)
			}
		})
	}
}

// naive is a history that keeps everything.
type naive struct {
	n      int
	per    Time
	passed []Time
}

func (m *naive) since(t Time) (n int) {
	for _, at := range m.passed {
		if at >= t {
			n++
		}
	}
	return n
}

func (m *naive) fixed(now Time) bool { return m.since(now-now%m.per) < m.n }

func (m *naive) sliding(now Time) bool {
	begin := now - now%m.per
	current := m.since(begin)
	previous := m.since(begin.Sub(m.per)) - current
	overlap := new(big.Rat).SetFrac64(int64(begin+m.per-now), int64(m.per))
	estimate := overlap.Mul(overlap, new(big.Rat).SetInt64(int64(previous)))
	estimate.Add(estimate, new(big.Rat).SetInt64(int64(current+1)))
	return estimate.Cmp(new(big.Rat).SetInt64(int64(m.n))) <= 0
}

func (m *naive) log(now Time) bool { return m.since((now + 1).Sub(m.per)) < m.n }

// Each event meets what a naive model decides, and the instant at which the next one may pass is the first one at which it
// may. A history that is said to be empty decides like a new one.
func TestHistory_Naive(t *testing.T) {
	rnd := testutil.Rand(t)
	for _, kind := range []struct {
		name  string
		make  func(n uint64, per time.Duration) History
		naive func(*naive, Time) bool
	}{
		{"fixed", func(n uint64, per time.Duration) History { return newFixedWindow(n, per) }, (*naive).fixed},
		{"sliding", func(n uint64, per time.Duration) History { return NewSlidingWindow(NewCount(n, per)) }, (*naive).sliding},
		{"log", func(n uint64, per time.Duration) History { return NewSlidingLog(NewCount(n, per)) }, (*naive).log},
	} {
		t.Run(kind.name, func(t *testing.T) {
			for range 100 {
				n := 1 + rnd.IntN(12)
				per := time.Duration(1+rnd.IntN(1e9)) * time.Duration(1+rnd.IntN(1000))
				h, m := kind.make(uint64(n), per), &naive{n: n, per: FromDuration(per)}
				now := Time(rnd.Uint64N(1 << 50))
				passed, refused := 0, 0
				for range 300 {
					now += Time(rnd.ExpFloat64() * float64(m.per) / float64(n) / 1.5)
					if h.EmptyAt() <= now {
						h = kind.make(uint64(n), per)
					}
					want := kind.naive(m, now)
					depart := h.Depart(now)
					if got := depart == now; got != want || depart < now {
						t.Fatalf("%d per %v: passes at %d: %v, want %v", n, per, now, got, want)
					}
					if !want {
						refused++
						if !kind.naive(m, depart) || kind.naive(m, depart-1) {
							t.Fatalf("%d per %v: the next one is to pass at %d, and at %d and %d: %v, %v", n, per, depart, depart-1, depart, kind.naive(m, depart-1), kind.naive(m, depart))
						}
						if rnd.IntN(3) > 0 {
							continue
						}
						now = depart
					}
					h.Charge(1, now)
					m.passed = append(m.passed, now)
					passed++
				}
				if passed < 10 || refused < 10 {
					t.Errorf("%d passed and %d were refused", passed, refused)
				}
			}
		})
	}
}

// A history that inherits from others lets nothing pass before each of them would, whatever passes it.
func TestHistory_Inherit(t *testing.T) {
	rnd := testutil.Rand(t)
	for _, kind := range []func(Count) History{
		func(c Count) History { return NewSlidingWindow(c) },
		func(c Count) History { return NewSlidingLog(c) },
	} {
		for range 300 {
			c := NewCount(1+rnd.Uint64N(10), time.Second)
			now := 10*Second + Time(rnd.Uint64N(uint64(Second)))
			all := []History{kind(c), kind(c), kind(c)}
			for _, h := range all {
				var times []Time
				for range rnd.IntN(40) {
					times = append(times, now-Time(rnd.Uint64N(uint64(3*Second))))
				}
				slices.Sort(times)
				for _, at := range times {
					passes(h, at)
				}
			}
			heir := kind(c)
			for _, h := range all {
				heir.Inherit(h, now)
			}
			for range 30 {
				for _, h := range all {
					if heir.Depart(now) < h.Depart(now) || heir.Used(now) < h.Used(now) {
						t.Fatalf("%T: passes at %d, and the inherited one only at %d; %d and %d are used", heir, heir.Depart(now), h.Depart(now), heir.Used(now), h.Used(now))
					}
				}
				if now = heir.Depart(now); rnd.IntN(2) == 0 {
					now += Time(rnd.Uint64N(uint64(Second) / 5))
				}
				for _, h := range append(all, heir) {
					h.Charge(1, now)
				}
			}
		}
	}
}

// A log keeps what it knows under another limit, and counts it as far as that goes back.
func TestSlidingLog_With(t *testing.T) {
	const tenth = Second / 10
	l := NewSlidingLog(NewCount(4, time.Second))
	for i := range Time(7) {
		l.Charge(1, 100*tenth+3*i*tenth)
	}
	const now = 118 * tenth // of the last one
	for _, tt := range []struct {
		n    uint64
		per  time.Duration
		used uint64
		next Time
	}{
		{4, time.Second, 4, 119 * tenth},
		{4, 10 * time.Second, 4, 209 * tenth},
		{2, 10 * time.Second, 4, 215 * tenth},
		{9, 10 * time.Second, 4, now},
		{9, time.Second / 2, 2, now},
	} {
		next := l.With(NewCount(tt.n, tt.per), now)
		if got := next.Used(now); got != tt.used || next.Depart(now) != tt.next {
			t.Errorf("%d per %v: %d used, next at %v", tt.n, tt.per, got, next.Depart(now).Duration())
		}
	}
}

// The maximum goes down for a moment, and up again: what has passed before counts.
func TestHistory_DownAndUp(t *testing.T) {
	for _, h := range []History{NewSlidingWindow(NewCount(100, time.Minute)), NewSlidingLog(NewCount(100, time.Minute))} {
		now := 600*Second + Second/2
		n := 0
		for ; passes(h, now); n++ {
		}
		h = h.With(NewCount(5, time.Minute), now)
		if passes(h, now+Second) {
			t.Errorf("%T: one passes when 100 have and 5 may", h)
		}
		now += 2 * Second
		for h = h.With(NewCount(100, time.Minute), now); passes(h, now); n++ {
		}
		if n != 100 {
			t.Errorf("%T: %d have passed within a minute", h, n)
		}
		if h.EmptyAt() > now+120*Second {
			t.Errorf("%T: empty only %v later", h, (h.EmptyAt() - now).Duration())
		}
	}
}

// Of a source that always wants more, a sliding window lets one less than the maximum pass in each period.
func TestSlidingWindow_Throughput(t *testing.T) {
	for _, n := range []uint64{2, 10, 100} {
		w := NewSlidingWindow(NewCount(n, time.Second))
		passed := uint64(0)
		for now := 10 * Second; now < 110*Second; now = w.Depart(now) {
			w.Charge(1, now)
			passed++
		}
		if passed < 100*(n-1) || passed > 100*(n-1)+n+2 {
			t.Errorf("%d a second: %d in 100 s", n, passed)
		}
	}
}

// Units that wait for windows fill each of them, and none with more than its number.
func TestWindow_NeverMore(t *testing.T) {
	for _, n := range []uint64{3, 7, 999_985} {
		s := Shape{MaxDelay: Forever / 4}
		s.Packets, s.PacketsBurst = NewWindow(n, time.Second)
		s.Window = Second
		var b Bucket
		passed := map[Time]uint64{}
		const now = 5 * Second
		for range 4 * n {
			depart, ok := b.Offer(&s, 0, 1, now)
			if !ok {
				t.Fatal("refused")
			}
			passed[depart/Second]++
		}
		for window, got := range passed {
			if got > n || window < 8 && got < n-1 {
				t.Errorf("%d in window %d, want %d", got, window, n)
			}
		}
	}
}

// FuzzSlidingLog compares a log whose limit changes with one that keeps everything.
func FuzzSlidingLog(f *testing.F) {
	f.Add([]byte{1, 2, 3, 200, 4, 5, 6})
	f.Fuzz(func(t *testing.T, ops []byte) {
		h := History(NewSlidingLog(NewCount(3, time.Second)))
		var all []Time
		now, n := 100*Second, 3
		for _, op := range ops {
			now += Time(op%16) * Second / 20
			if op > 200 {
				n = 1 + int(op%7)
				h = h.With(NewCount(uint64(n), time.Second), now)
			}
			within := 0
			for _, at := range all {
				if at+Second > now {
					within++
				}
			}
			if got := passes(h, now); got != (within < n) {
				t.Fatalf("at %d with %d within a second of %d: %v", now, within, n, got)
			} else if got {
				all = append(all, now)
			}
		}
	})
}

// What is owed is the same, in whole packets, when a bucket begins or ceases to have windows, or has others.
func TestRescale_Windows(t *testing.T) {
	rnd := testutil.Rand(t)
	shape := func(window bool, n uint64, per time.Duration) Shape {
		s := Shape{Packets: NewRate(n, per)}
		s.PacketsBurst = s.Packets.Cost(1) * Time(n-1)
		if window {
			s.Packets, s.PacketsBurst = NewWindow(n, per)
			s.Window = FromDuration(per)
		}
		return s
	}
	for range 5000 {
		n := 1 + rnd.Uint64N(50)
		per := time.Duration(1+rnd.IntN(1e9)) * time.Duration(1+rnd.IntN(1000))
		from, to := shape(rnd.IntN(2) == 0, n, per), shape(rnd.IntN(2) == 0, n, time.Duration(1+rnd.IntN(1e9)))
		now := Time(rnd.Uint64N(1 << 50))
		used := rnd.Uint64N(n + 1)
		var b Bucket
		for range used {
			if _, ok := b.Offer(&from, 0, 1, now); !ok {
				t.Fatal("refused")
			}
		}
		b.Rescale(&from, &to, now)
		left := uint64(0)
		for ; left <= n; left++ {
			if _, ok := b.Offer(&to, 0, 1, now); !ok {
				break
			}
		}
		if from.Window+to.Window > 0 && left != n-used {
			t.Fatalf("%d of %d are used, windows of %d and %d: %d are left", used, n, from.Window, to.Window, left)
		}
	}
}
