// Package logging writes the log of the daemon. A [Writer] owns the goroutine that writes it, from a
// bounded queue: a reader of the log that is slow, or is gone, delays nothing else.
package logging

import (
	"io"
	"log/slog"
	"os/signal"
	"syscall"
)

// New returns two logs that write to to, by a Writer that the caller must close. keep wraps the
// handler of log, to keep its records. traffic is for the events that sources cause: among the
// kept records, they would push out the others.
func New(to io.Writer, level slog.Level, asJSON bool, keep func(slog.Handler) slog.Handler) (log, traffic *slog.Logger, _ *Writer) {
	opts := &slog.HandlerOptions{Level: level}
	format := func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, opts) }
	if asJSON {
		format = func(w io.Writer) slog.Handler { return slog.NewJSONHandler(w, opts) }
	}
	// A closed pipe costs log records, and must not end the daemon.
	signal.Ignore(syscall.SIGPIPE)
	w := newWriter(to)
	var h slog.Handler
	if isJournal(to) {
		h = newJournalHandler(w, format)
	} else {
		h = format(w)
	}
	log, traffic = slog.New(keep(h)), slog.New(h)
	go w.run(func(dropped uint64) {
		log.Warn("log records dropped: writer blocked or failed", "since_start", dropped)
	})
	return log, traffic, w
}
