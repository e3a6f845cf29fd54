package conn

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// Proxy is the proxy plane. Its methods may be called from any goroutine.
type Proxy struct {
	shaper  *shaper.Shaper
	clock   *leaky.Clock
	loop    *loop
	gates   *gates
	log     *slog.Logger
	traffic *slog.Logger
	refused *sampler
	changes *sampler // of log: states that sources can bring about, too
	owner   owner

	rejecter atomic.Pointer[rejecter] // nil while no limit has asked for it

	names  *resolver
	nextID atomic.Uint64
	open   atomic.Int64 // TCP connections, from accept to end

	mu        sync.Mutex        // of a change of listeners
	inherited map[Endpoint]int  // sockets, by place
	lists     sync.Mutex        // of a listing of connections
	listing   uint64            // the last one
	sites     map[string]*site  // changed by the loop, under mu
	ports     map[Endpoint]port // by place
	draining  bool              // no port is opened any more

	// Of the loop:
	sessions  registry[*session]
	flows     map[flowKey]*udpFlow
	flowList  registry[*udpFlow] // the same
	arriving  map[flowKey]*arrival
	arrivals  registry[*arrival] // the same
	early     int                // bytes that they have kept
	clearing  clearing           // of admit, to be used again
	vanishing vanishing
}

// site is a Listen in effect, kept under its name.
type site struct {
	name   string
	gone   bool // it is in effect no more, but some of its connections go on
	config atomic.Pointer[siteConfig]
	counts *shaper.ListenerState

	flows   roster                    // the loop's: all
	sources map[netip.Addr]*udpSource // likewise: by source, see turnAddr

	proxy       *Proxy
	downstreams []*downstream     // the loop's
	candidates  []*downstream     // of pick, to be used again
	readmission leaky.Event       // when one that was ejected gets connections again
	pools       map[poolKey]*gate // those in use
	awaiting    *shaper.State     // of them, not shown
	waiting     room              // likewise
}

type siteConfig struct {
	Listen
	hosts []*host // of the downstreams
}

// service is what a port is for.
type service struct {
	*site
	samePort bool
}

// port is an open Endpoint.
type port interface {
	serve(service) // starts it, or changes what it serves; on the loop
	serves() *service
	close()
	descriptor() int
}

// New returns a proxy that holds traffic to the policy of s. It listens once
// Apply has been called, and has to be closed. Changes of state go to log; what sources
// bring about, sampled, and the access log, to traffic. What they write to must not block:
// the thread that moves bytes logs too.
func New(s *shaper.Shaper, clock *leaky.Clock, log, traffic *slog.Logger) (*Proxy, error) {
	l, err := newLoop(clock, s)
	if err != nil {
		return nil, err
	}
	p := &Proxy{
		shaper: s, clock: clock, loop: l, log: log, traffic: traffic,
		refused:   newSampler(traffic, time.Second),
		changes:   newSampler(log, time.Minute),
		inherited: map[Endpoint]int{}, sites: map[string]*site{}, ports: map[Endpoint]port{},
		flows: map[flowKey]*udpFlow{}, arriving: map[flowKey]*arrival{}, vanishing: vanishing{after: vanishedAfter},
	}
	p.names = newResolver(p.refused, func() { l.post(p.wakeAll) })
	p.gates = newGates(s, &l.pacer.Wheel, clock.Now)
	go l.run()
	return p, nil
}

func (p *Proxy) openPort(e Endpoint, transparent bool) (port, error) {
	if e.Protocol == shaper.UDP {
		return p.openUDP(e.place(), transparent)
	}
	return p.openTCP(e.place(), transparent)
}

// Drain closes all TCP ports and waits until the last TCP connection has gone. Datagrams
// go on until then; it takes no more of them in, and waits until the last one that is
// queued has left. It returns how many connections are left when ctx ends it.
func (p *Proxy) Drain(ctx context.Context) int {
	p.mu.Lock()
	p.draining = true
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
	for p.open.Load() > 0 && ctx.Err() == nil {
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
	for late := 0; late < drainLate; {
		connections, queued := p.Remaining()
		if queued == 0 {
			return connections
		}
		<-tick.C
		if ctx.Err() != nil {
			late++
		}
	}
	return int(p.open.Load())
}

// drainLate is for how long what is queued may leave when a drain has run out of time: so
// many times 20 ms.
const drainLate = 12

// Remaining returns how many TCP connections there are, from accept to end, and how many
// bytes of datagrams are queued, with those of flows that wait for a slot.
func (p *Proxy) Remaining() (connections, queued int) {
	p.loop.call(func(leaky.Time) { queued = p.loop.memory.used + p.early })
	return int(p.open.Load()), queued
}

// Close resets what connections are left and frees everything.
func (p *Proxy) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.names.close()
	for _, l := range p.ports {
		l.close()
	}
	p.ports = nil
	p.closeInherited()
	p.loop.call(func(now leaky.Time) {
		p.sessions.each(func(s *session) { s.abort(shaper.Stopped, now) })
		p.flowList.each(func(f *udpFlow) { f.close(now) })
		for _, s := range p.sites {
			s.stopProbes()
		}
	})
	p.loop.stop()
	if r := p.rejecter.Load(); r != nil {
		r.close()
	}
}

// wakeAll lets go on who waits for a downstream that may have got an address.
func (p *Proxy) wakeAll(now leaky.Time) {
	for _, s := range p.sites {
		s.wake(now)
	}
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

// Late returns how late the loop's thread woke up, see [leaky.Pacer.Late].
func (p *Proxy) Late() ([len(leaky.LateBounds) + 1]uint64, time.Duration) {
	return p.loop.pacer.Late()
}
