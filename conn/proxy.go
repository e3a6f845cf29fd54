package conn

import (
	"context"
	"log/slog"
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
	loop       *loop
	resolver   *resolver
	log        *slog.Logger
	accessLog  *slog.Logger
	trafficLog *logLimiter
	stateLog   *logLimiter // to log; changes of state that sources can cause
	penaltyLog *logLimiter // to log
	socketHook socketHook

	rejecter  atomic.Pointer[rejecter] // nil until a limit needs it
	nextID    atomic.Uint64
	openConns atomic.Int64 // TCP connections, from accept to close

	mu sync.Mutex // serializes changes of listeners
	// mu protects:
	inherited map[shaper.Endpoint]int // sockets, by Endpoint.key
	listeners map[string]*listener    // written on the loop's thread, which may read it without mu
	ports     map[shaper.Endpoint]port
	stopping  bool // no ports are opened any more

	listMu sync.Mutex // serializes listings of connections
	// listMu protects:
	lastListing uint64 // number of the last listing

	sharesMu sync.Mutex // serializes changes of shares
	demandMu sync.Mutex // serializes reports of demand

	// The loop's thread owns:
	admission    *admission
	sessions     registry[*session]
	flows        map[flowKey]*udpFlow
	flowList     registry[*udpFlow] // the same flows
	pendingByKey map[flowKey]*pendingFlow
	pendingFlows registry[*pendingFlow] // the same flows
	pendingBytes int                    // bytes that they buffer
	evictions    evictions              // of admit, reused
	ackMonitor   ackMonitor
	statsSampler statsSampler
}

// Options are what a proxy needs. All fields are required, except OnShort.
type Options struct {
	Shaper *shaper.Shaper // whose policy the proxy enforces
	Clock  *pacer.Clock

	// Log gets changes of state. TrafficLog gets the access log and, rate limited, what sources cause.
	// The handlers of both must not block: the thread that moves bytes logs too.
	Log, TrafficLog *slog.Logger

	// OnShort is called when units have begun to wait for parts of a shared bucket, and when the last
	// report was made they did not. It must not block: the thread that moves bytes calls it.
	OnShort func()
}

// New returns a proxy. It listens after the first Apply, and must be closed.
func New(o Options) (*Proxy, error) {
	l, err := newLoop(o.Clock, o.Shaper)
	if err != nil {
		return nil, err
	}
	p := &Proxy{
		shaper: o.Shaper, clock: o.Clock, loop: l, log: o.Log, accessLog: o.TrafficLog,
		trafficLog: newLogLimiter(o.TrafficLog, time.Second),
		stateLog:   newLogLimiter(o.Log, time.Minute),
		penaltyLog: newLogLimiter(o.Log, time.Second),
		inherited:  map[shaper.Endpoint]int{}, listeners: map[string]*listener{}, ports: map[shaper.Endpoint]port{},
		flows: map[flowKey]*udpFlow{}, pendingByKey: map[flowKey]*pendingFlow{}, ackMonitor: ackMonitor{timeout: ackTimeout},
	}
	p.resolver = newResolver(p.trafficLog, func() { l.post(p.wakeAll) })
	p.admission, l.sharing.onShort = l.sharing.admission, o.OnShort
	p.admission.yieldIdle, p.admission.onPenalty = p.yieldIdle, p.logPenalty
	l.quotas = newQuotas(l)
	l.scheduler.quotas, p.admission.budgets = l.quotas, l.quotas
	go l.run()
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
	p.loop.call(func(leaky.Time) {
		for _, u := range udp {
			u.pause()
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
	p.loop.call(func(leaky.Time) { queued = p.loop.memory.used + p.pendingBytes })
	return int(p.openConns.Load()), queued
}

// EndAll resets the remaining TCP connections, and ends all UDP flows. After Shutdown no new ones begin.
func (p *Proxy) EndAll() {
	p.loop.call(func(now leaky.Time) {
		p.pendingFlows.each(func(w *pendingFlow) { w.close(now) })
		p.sessions.each(func(s *session) { s.abort(shaper.Stopped, now) })
		p.flowList.each(func(f *udpFlow) { f.close(now) })
	})
}

// Close resets the remaining connections and frees everything.
func (p *Proxy) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.resolver.close()
	for _, l := range p.ports {
		l.close()
	}
	p.ports = nil
	p.closeInherited()
	p.EndAll()
	p.loop.call(func(leaky.Time) {
		for _, ln := range p.listeners {
			ln.stopProbes()
		}
		p.loop.runLater(p.loop.sharing.close) // after the sessions have left their queues
	})
	p.closeQuotas()
	p.loop.stop()
	if r := p.rejecter.Load(); r != nil {
		r.icmp.Close()
	}
}

// wakeAll serves the connections that wait for a downstream whose name was resolved.
func (p *Proxy) wakeAll(now leaky.Time) {
	for _, ln := range p.listeners {
		ln.wakeWaiters(now)
	}
}

// Kill ends a TCP connection, with a reset, or a UDP flow. It reports whether that ID exists.
func (p *Proxy) Kill(id uint64) (found bool) {
	p.loop.call(func(now leaky.Time) {
		s, isSession := p.sessions.byID[id]
		f, isFlow := p.flowList.byID[id]
		w, isArrival := p.pendingFlows.byID[id]
		switch found = isSession || isFlow || isArrival; {
		case isSession:
			s.kill(shaper.Killed, now)
		case isFlow:
			f.close(now)
		case isArrival:
			w.close(now)
		}
	})
	return found
}

// Alive reports whether the loop answers before ctx ends.
func (p *Proxy) Alive(ctx context.Context) bool {
	ran := make(chan struct{})
	p.loop.post(func(leaky.Time) { close(ran) })
	select {
	case <-ran:
		return true
	case <-ctx.Done():
		return false
	}
}

// Answer returns how long the loop took to answer, at most the given time, or until ctx ends.
func (p *Proxy) Answer(ctx context.Context, most time.Duration) time.Duration {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	begun := time.Now()
	p.Alive(ctx)
	return min(time.Since(begun), most)
}

// Lateness returns how late the loop's thread woke up, see [pacer.Pacer.Lateness].
func (p *Proxy) Lateness() ([len(pacer.LatenessBounds) + 1]uint64, time.Duration) {
	return p.loop.pacer.Lateness()
}
