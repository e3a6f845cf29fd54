package logging

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"syscall"
	"time"
)

// isJournal reports whether w is the journal stream to which systemd has connected standard error
// (systemd.exec(5), JOURNAL_STREAM).
func isJournal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	if err != nil {
		return false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && os.Getenv("JOURNAL_STREAM") == fmt.Sprintf("%d:%d", st.Dev, st.Ino)
}

// journalHandler starts each record with its priority (sd-daemon(3)), and leaves the time to the
// journal. It has a handler for each priority.
type journalHandler [4]slog.Handler

func newJournalHandler(w io.Writer, format func(io.Writer) slog.Handler) (h journalHandler) {
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

func (h journalHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return h[0].Enabled(ctx, level)
}

func (h journalHandler) Handle(ctx context.Context, r slog.Record) error {
	r.Time = time.Time{}
	return h[priority(r.Level)].Handle(ctx, r)
}

func (h journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	for i := range h {
		h[i] = h[i].WithAttrs(attrs)
	}
	return h
}

func (h journalHandler) WithGroup(name string) slog.Handler {
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
