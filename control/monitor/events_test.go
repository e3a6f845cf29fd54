package monitor_test

import (
	"errors"
	"io"
	"log/slog"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/control/monitor"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/api"
)

func ids(events []api.Event) []uint64 {
	out := []uint64{}
	for _, e := range events {
		out = append(out, e.ID)
	}
	return out
}

func TestEventsSince(t *testing.T) {
	e := monitor.NewEvents(3)
	log := slog.New(e.Handler(slog.DiscardHandler))
	if got := e.Since(0); got == nil || len(got) != 0 {
		t.Errorf("at first there is %v", got)
	}
	log.Info("1")
	log.Info("2")
	if got := ids(e.Since(0)); !cmp.Equal(got, []uint64{1, 2}) {
		t.Errorf("since the start: %v", got)
	}
	for range 5 {
		log.Info("more")
	}
	for since, want := range map[uint64][]uint64{
		0: {5, 6, 7}, 4: {5, 6, 7}, 5: {6, 7}, 6: {7}, 7: {}, 8: {}, ^uint64(0): {},
	} {
		if got := ids(e.Since(since)); !cmp.Equal(got, want) {
			t.Errorf("since %d: %v, want %v", since, got, want)
		}
	}
	if e.Last() != 7 {
		t.Errorf("the last one is %d", e.Last())
	}
}

func TestEvents_Handler(t *testing.T) {
	for _, tt := range []struct {
		name string
		do   func(*slog.Logger)
		want []api.Event
	}{
		{"debug is not kept", func(l *slog.Logger) { l.Debug("x") }, []api.Event{}},
		{"levels", func(l *slog.Logger) { l.Info("x"); l.Warn("y"); l.Error("z") }, []api.Event{
			{ID: 1, Level: "info", Message: "x", Attrs: map[string]string{}},
			{ID: 2, Level: "warn", Message: "y", Attrs: map[string]string{}},
			{ID: 3, Level: "error", Message: "z", Attrs: map[string]string{}},
		}},
		{"kinds", func(l *slog.Logger) {
			l.Info("x", "n", 7, "d", 1500*time.Millisecond, "err", errors.New("no"), "on", true, "nil", nil)
		}, []api.Event{
			{ID: 1, Level: "info", Message: "x", Attrs: map[string]string{"n": "7", "d": "1.5s", "err": "no", "on": "true", "nil": "<nil>"}},
		}},
		{"groups", func(l *slog.Logger) {
			l.With("a", 1).WithGroup("g").With("b", 2).WithGroup("h").
				Info("x", "c", 3, slog.Group("i", "d", 4), slog.Group("", "e", 5), slog.Attr{})
		}, []api.Event{
			{ID: 1, Level: "info", Message: "x", Attrs: map[string]string{"a": "1", "g.b": "2", "g.h.c": "3", "g.h.i.d": "4", "g.h.e": "5"}},
		}},
		{"siblings are apart", func(l *slog.Logger) {
			of := l.With("a", 1)
			of.With("b", 2).Info("x")
			of.With("c", 3).Info("y", "a", 4)
			of.Info("z")
		}, []api.Event{
			{ID: 1, Level: "info", Message: "x", Attrs: map[string]string{"a": "1", "b": "2"}},
			{ID: 2, Level: "info", Message: "y", Attrs: map[string]string{"a": "4", "c": "3"}},
			{ID: 3, Level: "info", Message: "z", Attrs: map[string]string{"a": "1"}},
		}},
		{"what cannot be printed", func(l *slog.Logger) { l.Info("a\nb", "esc", "\x1b[2J", "raw", "\xff", "fine", "né=\"1\"") }, []api.Event{
			{ID: 1, Level: "info", Message: `"a\nb"`, Attrs: map[string]string{"esc": `"\x1b[2J"`, "raw": `"\xff"`, "fine": `né="1"`}},
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := monitor.NewEvents(10)
			before := time.Now()
			tt.do(slog.New(e.Handler(slog.DiscardHandler)))
			got := e.Since(0)
			for i := range got {
				if at := got[i].Time; at.Before(before.Truncate(time.Second)) || at.After(time.Now()) {
					t.Errorf("it happened at %v", at)
				}
				got[i].Time = time.Time{}
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestEvents_PassToNextHandler(t *testing.T) {
	e := monitor.NewEvents(10)
	var out countWriter
	log := slog.New(e.Handler(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelWarn})))
	log.Debug("neither")
	log.Info("kept alone")
	log.Warn("both")
	if out != 1 || e.Last() != 2 {
		t.Errorf("%d lines were written and %d kept, want 1 and 2", out, e.Last())
	}
}

type countWriter int

func (c *countWriter) Write(p []byte) (int, error) { *c++; return len(p), nil }

func TestEventsConcurrently(t *testing.T) {
	const writers, each = 8, 500
	e := monitor.NewEvents(64)
	log := slog.New(e.Handler(slog.NewTextHandler(io.Discard, nil)))
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for range each {
				log.Info("x", "a", 1)
			}
		})
	}
	var seen uint64
	for seen < writers*each {
		for _, ev := range e.Since(seen) {
			if ev.ID <= seen || ev.Message != "x" {
				t.Fatalf("%+v after event %d", ev, seen)
			}
			seen = ev.ID
		}
	}
	wg.Wait()
}
