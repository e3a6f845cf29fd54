package shedding

import (
	"context"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// fakeProxy says what the test wants.
type fakeProxy struct {
	used   int
	took   time.Duration
	bucket shaper.BucketState
}

func (p *fakeProxy) Descriptors() (int, int)                             { return p.used, 100 }
func (p *fakeProxy) Answer(context.Context, time.Duration) time.Duration { return p.took }
func (p *fakeProxy) Buckets(int, ...shaper.Key) []shaper.BucketState {
	return []shaper.BucketState{p.bucket}
}

func TestLook(t *testing.T) {
	s := shaper.New(1024)
	swap := func(limits ...shaper.Limit) *shaper.Policy {
		p, err := s.Compile(limits, []shaper.Listener{{Name: "l"}}, nil, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		s.Swap(p, leaky.Time(0))
		return p
	}
	database := shaper.Limit{Name: "database", MaxConnections: 10}
	bulk := shaper.Limit{Name: "bulk", Shed: shaper.Shed{Descriptors: 50, Limit: "database", Above: 80, Order: 1}}
	late := shaper.Limit{Name: "cpu", Shed: shaper.Shed{Late: 10 * time.Millisecond, Memory: 100, Order: 2}}
	p := swap(database, bulk, late)
	var log strings.Builder
	proxy := &fakeProxy{used: 10}
	d := newShedder(s, proxy, slog.New(slog.NewTextHandler(&log, nil)), t.TempDir())
	now := time.Now()
	d.lookedAt = now
	next := func() {
		now = now.Add(interval)
		d.sample(t.Context())
		d.look(now)
	}
	look := func(wantBulk, wantLate float64) {
		t.Helper()
		next()
		b, l := p.State(p.Find("bulk")).Shed.Load(), p.State(p.Find("cpu")).Shed.Load()
		if math.Abs(b.Share-wantBulk) > 1e-9 || math.Abs(l.Share-wantLate) > 1e-9 {
			t.Errorf("%+v: bulk %+v, late %+v", proxy, b, l)
		}
	}
	look(0, 0)
	proxy.bucket.InFlight = 8
	look(0.02, 0)
	proxy.bucket = shaper.BucketState{InFlight: 5, Slots: 5}
	look(0.12, 0)
	proxy.bucket = shaper.BucketState{InFlight: 7, Waiting: 1}
	look(0.22, 0)
	proxy.bucket.Waiting, proxy.used, proxy.took = 0, 45, 20*time.Millisecond
	look(0.22, 0.1)
	if l := p.State(p.Find("cpu")).Shed.Load(); l.Signals[0].Err == "" || l.Signals[0].Name != "memory" || l.Signals[1].Value != 0.02 {
		t.Errorf("%+v", l)
	}
	d.sample(t.Context())
	proxy.used, proxy.took, proxy.bucket.InFlight = 0, 0, 0
	look(0.22*(1-(0.9-0.35/0.8)/0.9/2), 0.2) // it was late meanwhile, and seven of ten in flight half of the time
	for range 10 {
		next()
	}
	look(0, 0)
	if n := strings.Count(log.String(), "shedding begins"); n != 2 {
		t.Errorf("%d times shedding begins in the log\n%s", n, &log)
	}
	if n := strings.Count(log.String(), "shedding has ended"); n != 2 {
		t.Errorf("%d times it has ended", n)
	}
	state := p.State(p.Find("bulk"))
	swap(database)
	d.look(now)
	if state.Shed.Load() != nil {
		t.Error("a limit that is gone still sheds")
	}
}
