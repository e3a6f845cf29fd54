package control

import (
	"context"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"unicode"
)

// Events keeps the last lines of a log. Several goroutines may use it.
type Events struct {
	mu   sync.Mutex
	ring []Event // that of ID i is at i modulo the length
	last uint64
}

// NewEvents returns Events that keep the last size lines.
func NewEvents(size int) *Events { return &Events{ring: make([]Event, size)} }

// Last returns the ID of the last event, 0 when there was none. IDs count from 1.
func (e *Events) Last() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.last
}

// Since returns the events after that of id that are kept still, the oldest first.
// It is never nil.
func (e *Events) Since(id uint64) []Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	size := uint64(len(e.ring))
	first := id + 1
	if e.last > size {
		first = max(first, e.last-size+1)
	}
	out := []Event{}
	for i := first; i <= e.last && i > id; i++ {
		out = append(out, e.ring[i%size])
	}
	return out
}

func (e *Events) add(ev Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.last++
	ev.ID = e.last
	e.ring[ev.ID%uint64(len(e.ring))] = ev
}

// Handler returns a handler that keeps what is logged at level info or above, and
// passes on to next what that is enabled for. Attributes become strings; the keys of
// those in groups have the groups' names before them: "request.id". What cannot be printed
// is escaped, as a source may have sent it.
func (e *Events) Handler(next slog.Handler) slog.Handler { return &eventHandler{events: e, next: next} }

type eventHandler struct {
	events *Events
	next   slog.Handler
	group  string            // of what comes, with a dot at its end
	attrs  map[string]string // of every line
}

func (h *eventHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo || h.next.Enabled(ctx, level)
}

func (h *eventHandler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo {
		ev := Event{Time: r.Time, Level: strings.ToLower(r.Level.String()), Message: printable(r.Message), Attrs: h.with()}
		r.Attrs(func(a slog.Attr) bool {
			flatten(ev.Attrs, h.group, a)
			return true
		})
		h.events.add(ev)
	}
	if !h.next.Enabled(ctx, r.Level) {
		return nil
	}
	return h.next.Handle(ctx, r)
}

func (h *eventHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	to := *h
	to.next, to.attrs = h.next.WithAttrs(attrs), h.with()
	for _, a := range attrs {
		flatten(to.attrs, h.group, a)
	}
	return &to
}

func (h *eventHandler) WithGroup(name string) slog.Handler {
	to := *h
	to.next = h.next.WithGroup(name)
	if name != "" {
		to.group += name + "."
	}
	return &to
}

// with returns a copy of the attributes of every line.
func (h *eventHandler) with() map[string]string {
	attrs := make(map[string]string, len(h.attrs))
	for k, v := range h.attrs {
		attrs[k] = v
	}
	return attrs
}

// flatten puts a into to, by the rules of slog.Handler: an empty attribute is left out,
// and a group without a name has its members where it stands.
func flatten(to map[string]string, group string, a slog.Attr) {
	v := a.Value.Resolve()
	switch {
	case v.Kind() == slog.KindGroup:
		if a.Key != "" {
			group += a.Key + "."
		}
		for _, member := range v.Group() {
			flatten(to, group, member)
		}
	case !a.Equal(slog.Attr{}):
		to[group+a.Key] = printable(v.String())
	}
}

// printable returns s, quoted as in Go when something in it cannot be printed.
func printable(s string) string {
	for _, r := range s {
		// A byte that is no UTF-8 becomes this too.
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return strconv.Quote(s)
		}
	}
	return s
}
