package logging

import (
	"context"
	"io"
	"log/slog"
	"time"
)

// prefixHandler starts each record with its priority (sd-daemon(3)), and leaves the time to the
// journal. It has a handler for each priority. It is for a stream to the journal whose socket cannot
// be reached, as in a root directory of its own.
type prefixHandler [4]slog.Handler

func newPrefixHandler(w io.Writer, format func(io.Writer) slog.Handler) (h prefixHandler) {
	for i, prefix := range []string{"<7>", "<6>", "<4>", "<3>"} {
		h[i] = format(prefixWriter{w, prefix})
	}
	return h
}

// priority returns the index of the handler for level.
func priority(level slog.Level) int {
	switch {
	case level >= slog.LevelError:
		return 3
	case level >= slog.LevelWarn:
		return 2
	case level >= slog.LevelInfo:
		return 1
	}
	return 0
}

func (h prefixHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return h[0].Enabled(ctx, level)
}

func (h prefixHandler) Handle(ctx context.Context, r slog.Record) error {
	r.Time = time.Time{}
	return h[priority(r.Level)].Handle(ctx, r)
}

func (h prefixHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	for i := range h {
		h[i] = h[i].WithAttrs(attrs)
	}
	return h
}

func (h prefixHandler) WithGroup(name string) slog.Handler {
	for i := range h {
		h[i] = h[i].WithGroup(name)
	}
	return h
}

// prefixWriter writes a prefix before each record.
type prefixWriter struct {
	to     io.Writer
	prefix string
}

func (w prefixWriter) Write(line []byte) (int, error) {
	_, err := w.to.Write(append([]byte(w.prefix), line...))
	return len(line), err
}
