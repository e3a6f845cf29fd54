package main

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

// keepTimeout is how long a disk may take to write a file when the daemon ends.
const keepTimeout = 5 * time.Second

// keepWait is how long an order waits at most until it is written down.
const keepWait = 500 * time.Millisecond

// keeper writes what operators ordered to its file, in a goroutine of its own: a disk that is
// full or does not answer holds up no order, least of all the kill switch. Only the last of
// what it is given counts.
type keeper struct {
	path  string
	log   *slog.Logger
	wake  chan struct{} // something is to be written
	ended chan struct{}

	mu    sync.Mutex
	next  *savedOrders
	due   chan struct{} // closed when all that was given has been tried; nil then
	since time.Time     // due
	err   error         // of the last try
}

func newKeeper(path string, log *slog.Logger) *keeper {
	k := &keeper{path: path, log: log, wake: make(chan struct{}, 1), ended: make(chan struct{})}
	go k.run()
	return k
}

// put has o written down, soon.
func (k *keeper) put(o savedOrders) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.next = &o; k.due == nil {
		k.due, k.since = make(chan struct{}), time.Now()
	}
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

func (k *keeper) run() {
	defer close(k.ended)
	defer withoutSignals()()
	for range k.wake {
		k.mu.Lock()
		o := k.next
		k.next = nil
		k.mu.Unlock()
		err := o.write(k.path)
		if err != nil {
			k.log.Warn("a restart will forget, or bring back, what operators ordered", "err", err)
		}
		k.mu.Lock()
		if k.err = err; k.next == nil {
			close(k.due)
			k.due = nil
		}
		k.mu.Unlock()
	}
}

// settle waits until all that was given has been tried, and reports false when that takes, or
// has taken, longer than d.
func (k *keeper) settle(d time.Duration) bool {
	k.mu.Lock()
	due, left := k.due, time.Until(k.since.Add(d))
	k.mu.Unlock()
	if due == nil {
		return true
	}
	select {
	case <-due:
		return true
	case <-time.After(left):
		return false
	}
}

// lack returns why what was given is not in its file, nil when it is, or is about to be.
func (k *keeper) lack() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.due != nil && time.Since(k.since) >= keepWait {
		return fmt.Errorf("write %s: no answer since %s", k.path, k.since.Local().Format(time.TimeOnly))
	}
	return k.err
}

// close writes what is left, but waits for no disk that does not answer.
func (k *keeper) close() {
	close(k.wake)
	if k.settle(keepTimeout) {
		<-k.ended
	}
}

// write writes o to its file, which is gone when there is nothing in o.
func (o *savedOrders) write(path string) error {
	if len(o.Settings) > 0 || len(o.Blocks) > 0 || o.Bypass != nil || len(o.Drained) > 0 {
		return save(path, o)
	}
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// aside runs f in a goroutine of its own, and waits for it until ctx ends. A file that does not
// answer holds up that goroutine alone, until the end of the process.
func aside[T any](ctx context.Context, f func() (T, error)) (T, error) {
	type result struct {
		v   T
		err error
	}
	done := make(chan result, 1)
	go func() {
		defer withoutSignals()()
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
