package logging

import (
	"bytes"
	"io"
	"sync"
	"time"
)

// Bounds of the records queued in a Writer. As many again may be being written.
const (
	maxRecords = 4096
	maxBytes   = 1 << 20
)

// Writer writes log records to a writer that may block or fail. Callers never wait: records
// for which there is no room are dropped and counted. Several goroutines may use it.
type Writer struct {
	to    io.Writer
	wake  chan struct{} // records are queued, or closed is set
	ended chan struct{}

	mu      sync.Mutex
	queued  [][]byte
	bytes   int // in queued
	dropped uint64
	closed  bool
}

// newWriter returns a writer whose run method must be called.
func newWriter(to io.Writer) *Writer {
	return &Writer{to: to, wake: make(chan struct{}, 1), ended: make(chan struct{})}
}

// Write queues one record. It never blocks and never fails.
func (w *Writer) Write(record []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || len(w.queued) == maxRecords || w.bytes+len(record) > maxBytes {
		w.dropped++
		return len(record), nil
	}
	w.queued = append(w.queued, bytes.Clone(record))
	w.bytes += len(record)
	w.wakeUp()
	return len(record), nil
}

func (w *Writer) wakeUp() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// Dropped returns the number of records dropped since the start.
func (w *Writer) Dropped() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dropped
}

// run writes queued records until Close. After records were dropped, it calls report with their
// number as soon as writing works again. report may log.
func (w *Writer) run(report func(dropped uint64)) {
	defer close(w.ended)
	var batch [][]byte
	var reported uint64
	works := false
	for range w.wake {
		w.mu.Lock()
		clear(batch)
		batch, w.queued, w.bytes = w.queued, batch[:0], 0
		dropped, closed := w.dropped, w.closed
		w.mu.Unlock()
		if works && dropped > reported { // now there is room for it
			reported = dropped
			report(dropped)
		}
		for _, record := range batch { // one by one: other processes may write there too
			if _, err := w.to.Write(record); err != nil {
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

// Close ends the goroutine that writes, and waits until the queue is written, for a second at most.
func (w *Writer) Close() {
	w.mu.Lock()
	w.closed = true
	w.wakeUp()
	w.mu.Unlock()
	select {
	case <-w.ended:
	case <-time.After(time.Second):
	}
}
