// Owner: the loop's thread, except for the methods of Proxy.

package conn

import (
	"iter"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"shaperd.dev/shaperd/leaky"
)

// worker is a loop and what belongs to it: listeners, with their connections, and the queues and gates of these. Two workers
// share no bucket, gate or wait, so that none needs a lock; see assignment for which listeners a worker has.
type worker struct {
	*Proxy     // what all have in common, which any thread may use
	number int // from 1, of no other worker now

	loop         *loop
	admission    *admission
	sessions     registry[*session]
	flows        map[flowKey]*udpFlow
	flowList     registry[*udpFlow] // the same flows
	pendingByKey map[flowKey]*pendingFlow
	pendingFlows registry[*pendingFlow] // the same flows
	pendingBytes int                    // bytes that they buffer
	maxPending   int                    // maximum of pendingBytes
	evictions    evictions              // of admit, reused
	ackMonitor   ackMonitor
	statsSampler statsSampler

	absorbed []*worker // that have ended: their loop is the one of this worker
}

// newWorker starts a worker without listeners.
func (p *Proxy) newWorker() (*worker, error) {
	l, err := newLoop(p.clock, p.shaper, p.headroom)
	if err != nil {
		return nil, err
	}
	w := &worker{
		Proxy: p, number: 1, loop: l, admission: l.sharing.admission,
		flows: map[flowKey]*udpFlow{}, pendingByKey: map[flowKey]*pendingFlow{}, ackMonitor: ackMonitor{timeout: ackTimeout},
	}
	w.admission.lastTicket = &p.lastTicket
	w.admission.yieldIdle, w.admission.onPenalty = w.yieldIdle, p.logPenalty
	go l.run()
	return w, nil
}

// addWorker starts a worker next to others.
func (p *Proxy) addWorker() (*worker, error) {
	w, err := p.newWorker()
	if err != nil {
		return nil, err
	}
	for slices.ContainsFunc(p.workers, func(o *worker) bool { return o.number == w.number }) {
		w.number++
	}
	addProcessors(1)
	p.moving.Lock()
	p.workers = append(p.workers, w)
	p.moving.Unlock()
	return w, nil
}

// removeWorker ends one that addWorker has returned, and that has no listeners.
func (p *Proxy) removeWorker(w *worker) {
	p.moving.Lock()
	p.workers = slices.DeleteFunc(p.workers, func(o *worker) bool { return o == w })
	p.moving.Unlock()
	w.loop.stop()
	addProcessors(-1)
}

var processors sync.Mutex // of the Go runtime

// addProcessors changes how many processors Go code may use: each thread of a loop keeps one for itself, see package pacer. That of
// the first is the business of main.
func addProcessors(n int) {
	processors.Lock()
	defer processors.Unlock()
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + n)
}

// ownListeners returns the configured listeners of w.
func (w *worker) ownListeners() iter.Seq[*listener] {
	return func(yield func(*listener) bool) {
		for _, ln := range w.listeners {
			if ln.proxy == w && !yield(ln) {
				return
			}
		}
	}
}

// wakeAll serves the connections that wait for a downstream whose name was resolved.
func (w *worker) wakeAll(now leaky.Time) {
	for ln := range w.ownListeners() {
		ln.wakeWaiters(now)
	}
}

// call calls f on the thread of w, or of the worker that w has become a part of. No listener changes its worker meanwhile.
func (w *worker) call(f func(now leaky.Time)) {
	w.moving.RLock()
	defer w.moving.RUnlock()
	w.loop.call(f)
}

// eachWorker calls f for all workers, on their threads, one after the other. No listener changes its worker meanwhile.
func (p *Proxy) eachWorker(f func(w *worker, now leaky.Time)) {
	p.moving.RLock()
	defer p.moving.RUnlock()
	for _, w := range p.workers {
		w.loop.call(func(now leaky.Time) { f(w, now) })
	}
}

// atListener calls f with a configured listener on the thread of its worker. It reports whether there is that listener.
func (p *Proxy) atListener(name string, f func(ln *listener, now leaky.Time)) bool {
	p.moving.RLock()
	defer p.moving.RUnlock()
	ln := p.listeners[name]
	if ln == nil {
		return false
	}
	ln.proxy.loop.call(func(now leaky.Time) { f(ln, now) })
	return true
}

// stopAll calls f on the thread of one of the workers while the others stand still: f may change what belongs to any of them. It
// waits until what was posted to workers under the read lock of moving is done.
func (p *Proxy) stopAll(f func(now leaky.Time)) {
	p.moving.Lock()
	defer p.moving.Unlock()
	done := make(chan struct{})
	var left atomic.Int32
	left.Store(int32(len(p.workers)))
	for _, w := range p.workers {
		w.loop.post(func(leaky.Time) {
			if left.Add(-1) == 0 {
				f(p.clock.Now())
				close(done)
			}
			<-done
		})
	}
	select {
	case <-done:
	case <-p.home.loop.done: // p was closed
	}
}
