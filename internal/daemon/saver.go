package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"
)

// saveTimeout bounds the writing of a file when the daemon stops.
const saveTimeout = 5 * time.Second

// saveWait is how long a change waits at most until it is saved.
const saveWait = 500 * time.Millisecond

// saver writes overrides, or penalties, to a file, in a goroutine of its own: a disk that is full or does not
// answer delays no change, least of all the kill switch. It writes only the latest version.
type saver struct {
	what  string // it writes, for the log
	path  string
	log   *slog.Logger
	wake  chan struct{} // a version is pending
	ended chan struct{}

	mu        sync.Mutex
	pending   persisted
	idle      chan struct{} // closed, and set to nil, when nothing is pending any more
	busySince time.Time     // due
	err       error         // of the last write
}

// persisted is what a file is to have.
type persisted interface{ writeTo(path string) error }

func newSaver(what, path string, log *slog.Logger) *saver {
	s := &saver{what: what, path: path, log: log, wake: make(chan struct{}, 1), ended: make(chan struct{})}
	go s.run()
	return s
}

// enqueue schedules o to be written.
func (s *saver) enqueue(o persisted) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending = o; s.idle == nil {
		s.idle, s.busySince = make(chan struct{}), time.Now()
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *saver) run() {
	defer close(s.ended)
	defer blockSignals()()
	for range s.wake {
		s.mu.Lock()
		o := s.pending
		s.pending = nil
		s.mu.Unlock()
		if o == nil {
			continue // written already: it was enqueued between the wake-up and the lock
		}
		err := o.writeTo(s.path)
		if err != nil {
			s.log.Warn("saving state failed; a restart restores an earlier version", "what", s.what, "err", err)
		}
		s.mu.Lock()
		if s.err = err; s.pending == nil {
			close(s.idle)
			s.idle = nil
		}
		s.mu.Unlock()
	}
}

// flush waits until no write is pending. It returns false when that takes, or has taken, longer
// than d.
func (s *saver) flush(d time.Duration) bool {
	s.mu.Lock()
	idle, left := s.idle, time.Until(s.busySince.Add(d))
	s.mu.Unlock()
	if idle == nil {
		return true
	}
	select {
	case <-idle:
		return true
	case <-time.After(left):
		return false
	}
}

// saveError returns why the file is not up to date, or nil when it is or soon will be.
func (s *saver) saveError() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.idle != nil && time.Since(s.busySince) >= saveWait {
		return fmt.Errorf("write %s: no answer since %s", s.path, s.busySince.Local().Format(time.TimeOnly))
	}
	return s.err
}

// close writes the pending version. It waits for saveTimeout at most.
func (s *saver) close() {
	close(s.wake)
	if s.flush(saveTimeout) {
		<-s.ended
	}
}

// writeTo writes o to a file. It removes the file when o is empty.
func (o persistedOverrides) writeTo(path string) error {
	if len(o.Overrides) > 0 || len(o.Blocks) > 0 || o.Bypass != nil || len(o.Drained)+len(o.Held) > 0 {
		return writeJSON(path, o)
	}
	return removeFile(path)
}

// removeFile removes a file, if it is there.
func removeFile(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// runAsync runs f in a goroutine of its own and waits for it until ctx ends. A file system that
// does not answer blocks only that goroutine, until the process ends.
func runAsync[T any](ctx context.Context, f func() (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	go func() {
		defer blockSignals()()
		v, err := f()
		done <- result{v, err}
	}()
	select {
	case r := <-done:
		return r.v, r.err
	case <-ctx.Done():
		return *new(T), ctx.Err()
	}
}
