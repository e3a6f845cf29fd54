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
//
// When to is a stream to the journal, records go to its socket instead, with their attributes as
// fields.
func New(to io.Writer, level slog.Level, asJSON bool, keep func(slog.Handler) slog.Handler) (log, traffic *slog.Logger, _ *Writer) {
	return newLog(to, level, asJSON, keep, journalPath)
}

func newLog(to io.Writer, level slog.Level, asJSON bool, keep func(slog.Handler) slog.Handler, journal string) (log, traffic *slog.Logger, _ *Writer) {
	opts := &slog.HandlerOptions{Level: level}
	format := func(w io.Writer) slog.Handler { return slog.NewTextHandler(w, opts) }
	if asJSON {
		format = func(w io.Writer) slog.Handler { return slog.NewJSONHandler(w, opts) }
	}
	// A closed pipe costs log records, and must not end the daemon.
	signal.Ignore(syscall.SIGPIPE)
	newHandler := func(w io.Writer) slog.Handler { return format(w) }
	if isJournal(to) {
		if socket, err := dialJournal(journal); err == nil {
			to = socket
			newHandler = func(w io.Writer) slog.Handler { return newJournalHandler(w, format) }
		} else {
			newHandler = func(w io.Writer) slog.Handler { return newPrefixHandler(w, format) }
		}
	}
	w := newWriter(to)
	h := newHandler(w)
	log, traffic = slog.New(keep(h)), slog.New(h)
	go w.run(func(dropped uint64) {
		log.Warn("log records dropped: writer blocked or failed", "since_start", dropped)
	})
	return log, traffic, w
}
