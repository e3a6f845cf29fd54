package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"shaperd/control"
)

// newLogger returns the daemon's log of its state, of which events keeps the lines at level
// info or above, and that of what sources bring about, of which it keeps none: they would
// push out the others. Whoever runs the daemon has to close the writer at its end.
func newLogger(e env, f runFlags, events *control.Events) (log, traffic *slog.Logger, _ *logWriter, _ error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.logLevel)); err != nil {
		return nil, nil, nil, usageError{fmt.Errorf("--log-level %q: debug, info, warn or error", f.logLevel)}
	}
	opts := &slog.HandlerOptions{Level: level}
	var format func(io.Writer) slog.Handler
	switch f.logFormat {
	case "text":
		format = func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, opts) }
	case "json":
		format = func(w io.Writer) slog.Handler { return slog.NewJSONHandler(w, opts) }
	default:
		return nil, nil, nil, usageError{fmt.Errorf("--log-format %q: text or json", f.logFormat)}
	}
	// A pipe that nobody reads any more loses lines, and does not end the daemon.
	signal.Ignore(syscall.SIGPIPE)
	w := newLogWriter(e.stderr)
	var h slog.Handler
	if isJournal(e.stderr) {
		h = newJournalHandler(w, format)
	} else {
		h = format(w)
	}
	log, traffic = slog.New(events.Handler(h)), slog.New(h)
	go w.run(func(lost uint64) { log.Warn("lines of the log were lost: nobody took them", "since_start", lost) })
	return log, traffic, w, nil
}

// Bounds of what waits in a logWriter. As much again may be in hand.
const (
	maxLogLines = 4096
	maxLogBytes = 1 << 20
)

// logWriter passes lines on to a writer that may stand still, or be closed. Nobody waits
// for it: lines for which there is no room are lost, and counted. Several goroutines may
// use it.
type logWriter struct {
	to    io.Writer
	wake  chan struct{} // something is queued, or closed
	ended chan struct{}

	mu     sync.Mutex
	queued []byte
	lines  int // queued
	lost   uint64
	closed bool
}

// newLogWriter returns a writer of which run has to be called.
func newLogWriter(to io.Writer) *logWriter {
	return &logWriter{to: to, wake: make(chan struct{}, 1), ended: make(chan struct{})}
}

// Write queues a line. It never blocks, and there is no error.
func (w *logWriter) Write(line []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || w.lines == maxLogLines || len(w.queued)+len(line) > maxLogBytes {
		w.lost++
		return len(line), nil
	}
	w.queued = append(w.queued, line...)
	w.lines++
	w.wakeUp()
	return len(line), nil
}

func (w *logWriter) wakeUp() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Lost returns how many lines were lost.
func (w *logWriter) Lost() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lost
}

// run writes what is queued, until close. report is called with how many
// lines were lost, when there are more and lines can be written again; it may log.
func (w *logWriter) run(report func(lost uint64)) {
	defer close(w.ended)
	var batch []byte
	var reported uint64
	works := false
	for range w.wake {
		w.mu.Lock()
		batch, w.queued, w.lines = w.queued, batch[:0], 0
		lost, closed := w.lost, w.closed
		w.mu.Unlock()
		if works && lost > reported { // now there is room for it
			reported = lost
			report(lost)
		}
		for line := range bytes.Lines(batch) { // one by one: others may write there too
			if _, err := w.to.Write(line); err != nil {
				works = false
				w.mu.Lock()
				w.lost++
				w.mu.Unlock()
				continue
			}
			works = true
		}
		if closed {
			return
		}
		if works && w.Lost() > reported {
			w.wakeUp()
		}
	}
}

// close ends run, and waits until what is queued has been written, at most for a second.
func (w *logWriter) close() {
	w.mu.Lock()
	w.closed = true
	w.wakeUp()
	w.mu.Unlock()
	select {
	case <-w.ended:
	case <-time.After(time.Second):
	}
}

// isJournal reports whether w is the stream to the journal that systemd has connected
// to the standard error (systemd.exec(5), JOURNAL_STREAM).
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

// journalHandler begins each line with its priority (sd-daemon(3)), and leaves its time
// to the journal. It has a handler for each priority.
type journalHandler [4]slog.Handler

func newJournalHandler(w io.Writer, format func(io.Writer) slog.Handler) (h journalHandler) {
	for i, prefix := range []string{"<7>", "<6>", "<4>", "<3>"} {
		h[i] = format(prefixWriter{w, prefix})
	}
	return h
}

// priority returns which of the handlers is for level.
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

// prefixWriter puts a prefix before each line.
type prefixWriter struct {
	to     io.Writer
	prefix string
}

func (w prefixWriter) Write(line []byte) (int, error) {
	_, err := w.to.Write(append([]byte(w.prefix), line...))
	return len(line), err
}
