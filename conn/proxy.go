package conn

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// Proxy is the proxy plane. Its methods may be called from any goroutine.
type Proxy struct {
	shaper     *shaper.Shaper
	clock      *pacer.Clock
	maxLoops   int
	home       *worker // has what many limits or hosts share: never ends
	headroom   *headroom
	resolver   *resolver
	log        *slog.Logger
	accessLog  *slog.Logger
	trafficLog *logLimiter
	stateLog   *logLimiter // to log; changes of state that sources can cause
	penaltyLog *logLimiter // to log
	socketHook socketHook

	rejecter   atomic.Pointer[rejecter] // nil until a limit needs it
	nextID     atomic.Uint64
	lastTicket atomic.Uint64 // see admission.lastTicket
	openConns  atomic.Int64  // TCP connections, from accept to close

	mu sync.Mutex // serializes changes of listeners
	// mu protects:
	inherited map[shaper.Endpoint]int // sockets, by Endpoint.key
	ports     map[shaper.Endpoint]port
	stopping  bool // no ports are opened any more
	closed    bool // no worker runs any more

	moving sync.RWMutex // held for writing while all workers stand still, by stopAll
	// moving protects:
	workers   []*worker            // home first
	listeners map[string]*listener // the threads of workers may read it without the lock

	listMu sync.Mutex // serializes listings of connections
	// listMu protects:
	lastListing uint64 // number of the last listing

	sharesMu sync.Mutex // serializes changes of shares
	demandMu sync.Mutex // serializes reports of demand
}

// Options are what a proxy needs. All fields are required, except OnShort and Loops.
type Options struct {
	Shaper *shaper.Shaper // whose policy the proxy enforces
	Clock  *pacer.Clock

	// Log gets changes of state. TrafficLog gets the access log and, rate limited, what sources cause.
	// The handlers of both must not block: the thread that moves bytes logs too.
	Log, TrafficLog *slog.Logger

	// OnShort is called when units have begun to wait for parts of a shared bucket, and when the last
	// report was made they did not. It must not block: the thread that moves bytes calls it.
	OnShort func()

	// Loops is the maximum of threads that move bytes; 0 is 1. Listeners that have a bucket or a gate in common are on one.
	Loops int
}

// New returns a proxy. It listens after the first Apply, and must be closed.
func New(o Options) (*Proxy, error) {
	p := &Proxy{
		shaper: o.Shaper, clock: o.Clock, maxLoops: max(o.Loops, 1), headroom: newHeadroom(), log: o.Log, accessLog: o.TrafficLog,
		trafficLog: newLogLimiter(o.TrafficLog, time.Second),
		stateLog:   newLogLimiter(o.Log, time.Minute),
		penaltyLog: newLogLimiter(o.Log, time.Second),
		inherited:  map[shaper.Endpoint]int{}, listeners: map[string]*listener{}, ports: map[shaper.Endpoint]port{},
	}
	var err error
	if p.home, err = p.newWorker(); err != nil {
		p.headroom.close()
		return nil, err
	}
	p.workers = []*worker{p.home}
	p.home.loop.call(func(now leaky.Time) {
		p.home.beHome(o.OnShort)
		p.divideMemory(now)
	})
	p.resolver = newResolver(p.trafficLog, p.wakeWaiters)
	return p, nil
}

// Shutdown closes all TCP ports and waits until the last TCP connection has ended. UDP datagrams are
// accepted until then. It then waits until the last queued datagram has left. It returns the number of
// connections left when ctx ends.
func (p *Proxy) Shutdown(ctx context.Context) int {
	p.mu.Lock()
	p.stopping = true
	var udp []*udpPort
	for e, l := range p.ports {
		if u, ok := l.(*udpPort); ok {
			udp = append(udp, u)
			continue
		}
		l.close()
		delete(p.ports, e)
	}
	p.mu.Unlock()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for p.openConns.Load() > 0 && ctx.Err() == nil {
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	p.eachWorker(func(w *worker, _ leaky.Time) {
		for _, u := range udp {
			if u.proxy == w {
				u.pause()
			}
		}
	})
	for late := 0; late < shutdownGrace; {
		connections, queued := p.Remaining()
		if queued == 0 {
			return connections
		}
		<-tick.C
		if ctx.Err() != nil {
			late++
		}
	}
	return int(p.openConns.Load())
}

// shutdownGrace is how long queued datagrams may still leave after ctx has ended, in units of 20 ms.
const shutdownGrace = 12

// Remaining returns the number of TCP connections, from accept to close, and the bytes of queued
// datagrams, including those of flows that wait for admission.
func (p *Proxy) Remaining() (connections, queued int) {
	p.eachWorker(func(w *worker, _ leaky.Time) { queued += w.loop.memory.used + w.pendingBytes })
	return int(p.openConns.Load()), queued
}

// EndAll resets the remaining TCP connections, and ends all UDP flows. After Shutdown no new ones begin.
func (p *Proxy) EndAll() {
	p.eachWorker(func(w *worker, now leaky.Time) {
		w.pendingFlows.each(func(f *pendingFlow) { f.close(now) })
		w.sessions.each(func(s *session) { s.abort(shaper.Stopped, now) })
		w.flowList.each(func(f *udpFlow) { f.close(now) })
	})
}

// Close resets the remaining connections and frees everything.
func (p *Proxy) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.resolver.close()
	for _, l := range p.ports {
		l.close()
	}
	p.ports = nil
	p.closeInherited()
	p.EndAll()
	p.eachWorker(func(w *worker, _ leaky.Time) {
		for ln := range w.ownListeners() {
			ln.stopProbes()
		}
		w.loop.runLater(w.loop.sharing.close) // after the sessions have left their queues
	})
	p.closeQuotas()
	for _, w := range slices.Clone(p.workers[1:]) {
		p.removeWorker(w)
	}
	p.home.loop.stop()
	p.headroom.close()
	if r := p.rejecter.Load(); r != nil {
		r.icmp.Close()
	}
}

// wakeWaiters serves the connections that wait for a downstream, when a name was resolved.
func (p *Proxy) wakeWaiters() {
	p.moving.RLock()
	defer p.moving.RUnlock()
	for _, w := range p.workers {
		w.loop.post(w.wakeAll)
	}
}

// Kill ends a TCP connection, with a reset, or a UDP flow. It reports whether that ID exists.
func (p *Proxy) Kill(id uint64) (found bool) {
	p.eachWorker(func(w *worker, now leaky.Time) {
		s, isSession := w.sessions.byID[id]
		f, isFlow := w.flowList.byID[id]
		pending, isArrival := w.pendingFlows.byID[id]
		switch found = found || isSession || isFlow || isArrival; {
		case isSession:
			s.kill(shaper.Killed, now)
		case isFlow:
			f.close(now)
		case isArrival:
			pending.close(now)
		}
	})
	return found
}

// Alive reports whether all loops answer before ctx ends.
func (p *Proxy) Alive(ctx context.Context) bool {
	for !p.moving.TryRLock() { // a reload waits for all loops
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return false
		}
	}
	defer p.moving.RUnlock()
	ran := make(chan struct{}, len(p.workers))
	for _, w := range p.workers {
		w.loop.post(func(leaky.Time) { ran <- struct{}{} })
	}
	for range p.workers {
		select {
		case <-ran:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// Answer returns how long the slowest loop took to answer, at most the given time, or until ctx ends.
func (p *Proxy) Answer(ctx context.Context, most time.Duration) time.Duration {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	begun := time.Now()
	p.Alive(ctx)
	return min(time.Since(begun), most)
}

// Lateness returns how late the threads of all loops woke up, see [pacer.Pacer.Lateness].
func (p *Proxy) Lateness() (counts [len(pacer.LatenessBounds) + 1]uint64, sum time.Duration) {
	p.moving.RLock()
	defer p.moving.RUnlock()
	for _, w := range p.workers {
		own, late := w.loop.pacer.Lateness()
		for i := range own {
			counts[i] += own[i]
		}
		sum += late
	}
	return counts, sum
}
