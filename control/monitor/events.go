package monitor

import (
	"context"
	"log/slog"
	"strings"
	"sync"

	"shaperd.dev/shaperd/api"
)

// Events retains the last records of a log.
type Events struct {
	mu   sync.Mutex
	ring []api.Event // the event of ID i is at i modulo the length
	last uint64
}

// NewEvents returns Events that retain the last size records.
func NewEvents(size int) *Events { return &Events{ring: make([]api.Event, size)} }

// Last returns the ID of the last event, 0 when there was none. IDs count from 1.
func (e *Events) Last() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.last
}

// Since returns the retained events after that of id, oldest first. It is never nil.
func (e *Events) Since(id uint64) []api.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	size := uint64(len(e.ring))
	first := id + 1
	if e.last > size {
		first = max(first, e.last-size+1)
	}
	out := []api.Event{}
	for i := first; i <= e.last && i > id; i++ {
		out = append(out, e.ring[i%size])
	}
	return out
}

func (e *Events) add(ev api.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.last++
	ev.ID = e.last
	e.ring[ev.ID%uint64(len(e.ring))] = ev
}

// Handler returns a handler that retains records at level info or above, and passes records on
// to next if it is enabled for them. Attributes become strings; keys in groups are prefixed
// with the names of the groups: "request.id". Text that cannot be printed is escaped, since a
// source may have sent it.
func (e *Events) Handler(next slog.Handler) slog.Handler { return &eventHandler{events: e, next: next} }

type eventHandler struct {
	events *Events
	next   slog.Handler
	group  string            // prefix of attribute keys, ends in a dot
	attrs  map[string]string // of every record
}

func (h *eventHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo || h.next.Enabled(ctx, level)
}

func (h *eventHandler) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo {
		ev := api.Event{Time: r.Time, Level: strings.ToLower(r.Level.String()), Message: api.Printable(r.Message), Attrs: h.copyAttrs()}
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
	clone := *h
	clone.next, clone.attrs = h.next.WithAttrs(attrs), h.copyAttrs()
	for _, a := range attrs {
		flatten(clone.attrs, h.group, a)
	}
	return &clone
}

func (h *eventHandler) WithGroup(name string) slog.Handler {
	clone := *h
	clone.next = h.next.WithGroup(name)
	if name != "" {
		clone.group += name + "."
	}
	return &clone
}

// copyAttrs returns a copy of the attributes of every record.
func (h *eventHandler) copyAttrs() map[string]string {
	attrs := make(map[string]string, len(h.attrs))
	for k, v := range h.attrs {
		attrs[k] = v
	}
	return attrs
}

// flatten adds a to attrs by the rules of slog.Handler: an empty attribute is omitted, and the
// members of a group without a name are inlined.
func flatten(attrs map[string]string, group string, a slog.Attr) {
	v := a.Value.Resolve()
	switch {
	case v.Kind() == slog.KindGroup:
		if a.Key != "" {
			group += a.Key + "."
		}
		for _, member := range v.Group() {
			flatten(attrs, group, member)
		}
	case !a.Equal(slog.Attr{}):
		attrs[group+a.Key] = api.Printable(v.String())
	}
}
