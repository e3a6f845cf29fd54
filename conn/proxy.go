package conn

import (
	"context"
	"fmt"
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
	sites     map[string]*site  // changed by the loop, under mu
	ports     map[Endpoint]port // by place
	draining  bool              // no port is opened any more

	sessions map[*session]struct{} // the loop's
	flows    map[flowKey]*udpFlow  // the loop's
	clearing clearing              // likewise: of admit, to be used again
}

// site is a Listen in force, kept under its name.
type site struct {
	name   string
	config atomic.Pointer[siteConfig]
	counts *shaper.ListenerState

	flows   roster                    // the loop's: all
	sources map[netip.Addr]*udpSource // likewise: by source, see turnAddr

	proxy       *Proxy
	downstreams []*downstream // the loop's
	candidates  []*downstream // of pick, to be used again
	readmission leaky.Event   // when one that was ejected gets connections again
	queue       node          // of sessions that wait for one with room
	leaves      map[netip.Addr]*node
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
	serve(service) // starts it, or changes what it serves
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
		sessions: map[*session]struct{}{}, flows: map[flowKey]*udpFlow{},
	}
	p.names = newResolver(p.refused, func() { l.post(p.wakeAll) })
	p.gates = newGates(s, &l.pacer.Wheel, clock.Now)
	go l.run()
	return p, nil
}

// Apply puts listens and policy in force. It opens the ports that are new, then
// swaps the policy, then closes the ports that have gone. Ports that stay are not
// touched, nor are TCP connections, those of a closed port included: they move to
// their new limits, and what waits under a limit that stays keeps its turn. The
// UDP flows of a closed port end with it. On an error nothing has changed. Once Drain has
// begun no port is opened.
//
// commit, unless it is nil, is called when nothing else can fail any more. Its error is
// Apply's. It must not call p.
func (p *Proxy) Apply(ctx context.Context, listens []Listen, policy *shaper.Policy, commit func() error) error {
	p.mu.Lock()
	defer p.mu.Unlock()

	sites := map[string]*site{}
	configs := map[*site]*siteConfig{}
	ports := map[Endpoint]port{}
	services := map[port]service{}
	var opened []port
	committed := false
	defer func() {
		if !committed {
			for _, l := range opened {
				l.close()
			}
		}
	}()
	for _, listen := range listens {
		s := p.sites[listen.Name]
		if s == nil {
			s = &site{name: listen.Name, counts: p.shaper.Listener(listen.Name), sources: map[netip.Addr]*udpSource{}, proxy: p, leaves: map[netip.Addr]*node{}}
		}
		sites[listen.Name], configs[s] = s, &siteConfig{Listen: listen}
		if listen.Transparent {
			if err := listen.checkTransparent(); err != nil {
				return fmt.Errorf("listener %q: %w", listen.Name, err)
			}
		}
		for _, e := range listen.Endpoints {
			if listen.Transparent {
				if err := mayBeTransparent(e.Addr.Addr()); err != nil {
					return fmt.Errorf("listener %q: %w", listen.Name, err)
				}
			}
			l, ok := p.ports[e.place()]
			if !ok && p.draining {
				continue
			}
			if !ok {
				var err error
				if l, err = p.openPort(e, e.intercepts(listen)); err != nil {
					return fmt.Errorf("listener %q: %w", listen.Name, err)
				}
				opened = append(opened, l)
			}
			ports[e.place()], services[l] = l, service{s, e.SamePort}
		}
	}
	if p.rejecter.Load() == nil && rejects(policy) {
		r, err := newRejecter()
		if err != nil {
			return err
		}
		p.rejecter.Store(r)
	}
	if commit != nil {
		if err := commit(); err != nil {
			return err
		}
	}
	committed = true
	p.names.resolve(ctx, configs)

	p.loop.call(func(now leaky.Time) {
		var gone []*downstream
		units := p.loop.lines.clear()
		p.gates.swap(policy, func() { p.loop.lines.swap(policy, now) }, now)
		for s, config := range configs {
			for _, f := range p.flows { // its next datagram makes another one
				if f.site == s && s.config.Load().Transparent != config.Transparent {
					f.close(now)
				}
			}
			s.config.Store(config)
			gone = append(gone, s.setDownstreams(config, now)...)
		}
		for name, s := range p.sites {
			if sites[name] != s {
				s.stopProbes()
			}
		}
		p.sites = sites
		for s := range p.sessions {
			if s.stage == dialing || s.stage == flowing {
				s.reroute(policy)
				s.move(&s.flow, s.route, now)
			}
		}
		for _, f := range p.flows {
			f.reroute(policy)
			f.move(now)
		}
		for _, u := range units {
			u.owner.resubmit(now)
		}
		p.gates.run(now)
		p.cutBlocked(policy, now)
		for _, d := range gone {
			d.leave(now, anyPort)
		}
		for s := range configs {
			s.wake(now)
		}
		for s := range p.sessions {
			if s.stage == flowing {
				s.watchOver(now) // under other timeouts, maybe
			}
		}
	})
	for l, s := range services {
		l.serve(s)
	}
	for _, listen := range listens {
		for _, e := range listen.Endpoints {
			if l := ports[e.place()]; l != nil {
				_ = setTransparent(l.descriptor(), e.Addr.Addr(), e.intercepts(listen)) // permitted, as it was above
			}
		}
	}
	for e, l := range p.ports {
		if ports[e] != l {
			l.close()
		}
	}
	p.ports = ports
	p.closeInherited()
	return nil
}

// cutBlocked ends what policy blocks.
func (p *Proxy) cutBlocked(policy *shaper.Policy, now leaky.Time) {
	if policy.Blocks() == 0 {
		return
	}
	for s := range p.sessions {
		if (s.stage == dialing || s.stage == flowing) && policy.Blocked(s.route.Limits()) >= 0 {
			s.abort(shaper.Refused, now)
		}
	}
	for _, f := range p.flows {
		if policy.Blocked(f.route.Limits()) >= 0 {
			f.close(now)
		}
	}
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
// bytes of datagrams are queued.
func (p *Proxy) Remaining() (connections, queued int) {
	p.loop.call(func(leaky.Time) { queued = p.loop.memory.used })
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
		for s := range p.sessions {
			s.abort(shaper.Stopped, now)
		}
		for _, f := range p.flows {
			f.close(now)
		}
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
