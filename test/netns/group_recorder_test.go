package netns

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// A recorder captures what arrives at a host, without a gap, in captures that follow one another: so
// it can go on for hours.
type recorder struct {
	t      testing.TB
	host   *host
	frames int // in one capture
	open   *capture
	began  time.Time
	last   time.Time // up to which frames were returned
}

// record starts to record the frames that the host receives, from or to a port. There is room for
// the given number of frames between two calls of next.
func (h *host) record(t testing.TB, port uint16, frames int) *recorder {
	t.Helper()
	now := time.Now()
	return &recorder{t: t, host: h, frames: frames, open: h.capture(t, lab.StarLink, port, frames), began: now, last: now}
}

// at returns the time of an event of the recorder: since it began.
func (r *recorder) at(t time.Time) time.Duration { return t.Sub(r.began) }

// sent returns when a datagram was sent, as its sender has stamped it.
func (r *recorder) sent(a lab.Arrival) time.Duration {
	return r.at(time.Unix(0, int64(binary.BigEndian.Uint64(a.Head[:]))))
}

// next returns the frames since the last call, with times since the recorder began.
func (r *recorder) next(port uint16) []lab.Arrival {
	r.t.Helper()
	done := r.open
	r.open = r.host.capture(r.t, lab.StarLink, port, r.frames)
	now := time.Now() // both captures run
	first, end, zero := done.At(r.last), done.At(now), done.At(r.began)
	list := slices.DeleteFunc(done.stop(), func(a lab.Arrival) bool { return a.At < first || a.At >= end })
	for i := range list {
		list[i].At -= zero
	}
	r.last = now
	return list
}

// An excessMeter finds by how much the events of any interval go beyond rate × time, while they come.
type excessMeter struct {
	rate  float64 // units a second
	count float64 // units so far
	least float64 // the least that units before an event were, less rate × its time
	since time.Duration
}

func newExcessMeter(rate float64) *excessMeter { return &excessMeter{rate: rate, least: math.Inf(1)} }

// add returns the excess of the worst interval that ends with e, and when that begins.
func (m *excessMeter) add(e lab.Event) (excess float64, since time.Duration) {
	free := m.rate * e.At.Seconds()
	if level := m.count - free; level < m.least {
		m.least, m.since = level, e.At
	}
	m.count += float64(e.N)
	return m.count - free - m.least, m.since
}

// TestExcessMeter compares with all intervals of random events.
func TestExcessMeter(t *testing.T) {
	const seed = 1
	r := rand.New(rand.NewPCG(seed, seed))
	for range 200 {
		const rate = 1000
		m := newExcessMeter(rate)
		var events []lab.Event
		at := time.Duration(0)
		for range 60 {
			at += time.Duration(r.ExpFloat64() * float64(10*time.Millisecond))
			e := lab.Event{At: at, N: 1 + r.IntN(20)}
			events = append(events, e)
			want, sum := 0.0, 0
			for i := len(events) - 1; i >= 0; i-- {
				sum += events[i].N
				want = max(want, float64(sum)-rate*(at-events[i].At).Seconds())
			}
			if got, _ := m.add(e); math.Abs(got-want) > 1e-6 {
				t.Fatalf("after %d events the excess is %v, want %v", len(events), got, want)
			}
		}
	}
}
