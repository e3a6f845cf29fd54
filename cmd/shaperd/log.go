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

	"shaperd.dev/shaperd/control"
)

// newLogger returns two logs that share a writer, which the caller must close. events keeps the
// records of log at level info or above. It keeps none of traffic, which has the events that
// sources cause: they would push out the others.
func newLogger(e env, f runFlags, events *control.Events) (log, traffic *slog.Logger, _ *logWriter, _ error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(f.logLevel)); err != nil {
		return nil, nil, nil, usageError{fmt.Errorf("--log-level %q: must be debug, info, warn or error", f.logLevel)}
	}
	opts := &slog.HandlerOptions{Level: level}
	var format func(io.Writer) slog.Handler
	switch f.logFormat {
	case "text":
		format = func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, opts) }
	case "json":
		format = func(w io.Writer) slog.Handler { return slog.NewJSONHandler(w, opts) }
	default:
		return nil, nil, nil, usageError{fmt.Errorf("--log-format %q: must be text or json", f.logFormat)}
	}
	// A closed pipe costs log records, and must not end the daemon.
	signal.Ignore(syscall.SIGPIPE)
	w := newLogWriter(e.stderr)
	var h slog.Handler
	if isJournal(e.stderr) {
		h = newJournalHandler(w, format)
	} else {
		h = format(w)
	}
	log, traffic = slog.New(events.Handler(h)), slog.New(h)
	go w.run(func(dropped uint64) {
		log.Warn("log records dropped: writer blocked or failed", "since_start", dropped)
	})
	return log, traffic, w, nil
}

// Bounds of the records queued in a logWriter. As many again may be being written.
const (
	maxLogRecords = 4096
	maxLogBytes   = 1 << 20
)

// logWriter writes log records to a writer that may block or fail. Callers never wait: records
// for which there is no room are dropped and counted. Several goroutines may use it.
type logWriter struct {
	to    io.Writer
	wake  chan struct{} // records are queued, or closed is set
	ended chan struct{}

	mu      sync.Mutex
	queued  []byte
	records int // in queued
	dropped uint64
	closed  bool
}

// newLogWriter returns a writer whose run method must be called.
func newLogWriter(to io.Writer) *logWriter {
	return &logWriter{to: to, wake: make(chan struct{}, 1), ended: make(chan struct{})}
}

// Write queues one record. It never blocks and never fails.
func (w *logWriter) Write(line []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || w.records == maxLogRecords || len(w.queued)+len(line) > maxLogBytes {
		w.dropped++
		return len(line), nil
	}
	w.queued = append(w.queued, line...)
	w.records++
	w.wakeUp()
	return len(line), nil
}

func (w *logWriter) wakeUp() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Dropped returns the number of records dropped since the start.
func (w *logWriter) Dropped() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dropped
}

// run writes queued records until close. After records were dropped, it calls report with their
// number as soon as writing works again. report may log.
func (w *logWriter) run(report func(dropped uint64)) {
	defer close(w.ended)
	var batch []byte
	var reported uint64
	works := false
	for range w.wake {
		w.mu.Lock()
		batch, w.queued, w.records = w.queued, batch[:0], 0
		dropped, closed := w.dropped, w.closed
		w.mu.Unlock()
		if works && dropped > reported { // now there is room for it
			reported = dropped
			report(dropped)
		}
		for line := range bytes.Lines(batch) { // one by one: other processes may write there too
			if _, err := w.to.Write(line); err != nil {
				works = false
				w.mu.Lock()
				w.dropped++
				w.mu.Unlock()
				continue
			}
			works = true
		}
		if closed {
			return
		}
		if works && w.Dropped() > reported {
			w.wakeUp()
		}
	}
}

// close ends run, and waits until the queue is written, for a second at most.
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
