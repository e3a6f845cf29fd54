package conn

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"shaperd/leaky"
	"shaperd/shaper"
)

// change is a new configuration on its way: it is planned, what is new is opened, then it
// takes effect at once, connections follow a few at a time, and what has gone is retired.
type change struct {
	*Proxy
	policy   *shaper.Policy
	sites    map[string]*site
	configs  map[*site]*siteConfig
	services map[Endpoint]service // by place
	listens  map[Endpoint]Listen  // likewise

	ports  map[Endpoint]port // likewise, once they are open
	opened []port            // those that are new
}

// Apply puts listens and policy into effect. On an error nothing has changed. Once Drain has
// begun no port is opened.
//
// Ports that stay are not touched, nor are their connections: what came through such a port
// goes with whatever listener has it now, under its name and limits, and what waits under a
// limit that stays keeps its turn. The TCP connections of a port that has gone stay with
// their listener; if that has gone too, they keep the limits and the slots that were its
// own, beside those of all listeners, until they end, and those that still wait for a slot
// are turned away. The UDP flows of a port that has gone end with it.
//
// All of it takes effect for new connections at one instant. Those that are there follow, a
// few at a time; until then the limits of before hold for them. Apply returns when all have.
//
// commit, unless it is nil, is called when nothing else can fail any more. Its error is
// Apply's. It must not call p.
func (p *Proxy) Apply(ctx context.Context, listens []Listen, policy *shaper.Policy, commit func() error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, err := p.plan(listens, policy)
	if err == nil {
		err = c.open()
	}
	if err == nil && commit != nil {
		err = commit()
	}
	if err != nil {
		c.undo()
		return err
	}
	p.names.resolve(ctx, c.configs)
	p.loop.call(c.swap)
	c.follow()
	c.retire()
	return nil
}

// plan checks listens, and says what serves which port.
func (p *Proxy) plan(listens []Listen, policy *shaper.Policy) (*change, error) {
	c := &change{
		Proxy: p, policy: policy,
		sites: map[string]*site{}, configs: map[*site]*siteConfig{},
		services: map[Endpoint]service{}, listens: map[Endpoint]Listen{}, ports: map[Endpoint]port{},
	}
	for _, listen := range listens {
		if err := listen.check(); err != nil {
			return c, fmt.Errorf("listener %q: %w", listen.Name, err)
		}
		s := p.sites[listen.Name]
		if s == nil {
			s = p.newSite(listen.Name)
		}
		c.sites[listen.Name], c.configs[s] = s, &siteConfig{Listen: listen}
		for _, e := range listen.Endpoints {
			c.services[e.place()], c.listens[e.place()] = service{s, e.SamePort}, listen
		}
	}
	return c, nil
}

// check reports what keeps a transparent listener from being one.
func (l *Listen) check() error {
	if !l.Transparent {
		return nil
	}
	if err := l.checkTransparent(); err != nil {
		return err
	}
	for _, e := range l.Endpoints {
		if err := mayBeTransparent(e.Addr.Addr()); err != nil {
			return err
		}
	}
	return nil
}

func (p *Proxy) newSite(name string) *site {
	return &site{
		name: name, counts: p.shaper.Listener(name), proxy: p,
		sources: map[netip.Addr]*udpSource{}, pools: map[poolKey]*gate{}, awaiting: &shaper.State{Name: poolName},
	}
}

// open opens what is not open yet. Nothing that it does shows.
func (c *change) open() error {
	for place, service := range c.services {
		l := c.Proxy.ports[place]
		if l == nil && c.draining {
			continue
		}
		if l == nil {
			var err error
			if l, err = c.openPort(place, place.intercepts(c.listens[place])); err != nil {
				return fmt.Errorf("listener %q: %w", service.name, c.ownPort(place, err))
			}
			c.opened = append(c.opened, l)
		}
		c.ports[place] = l
	}
	if c.rejecter.Load() == nil && rejects(c.policy) {
		r, err := newRejecter()
		if err != nil {
			return err
		}
		c.rejecter.Store(r)
	}
	return nil
}

// ownPort says that a port in use is this daemon's, if it is.
func (c *change) ownPort(place Endpoint, err error) error {
	for own := range c.Proxy.ports {
		if errors.Is(err, errInUse) && own.Protocol == place.Protocol && own.Addr.Port() == place.Addr.Port() {
			return fmt.Errorf("listen on %v://%v: this daemon has the port at %v: to move it takes a restart", place.Protocol, place.Addr, own.Addr.Addr())
		}
	}
	return err
}

func (c *change) undo() {
	for _, l := range c.opened {
		l.close()
	}
}

// swap has c take effect: for all that is new, and for what connections hold in common. It
// takes time by the number of limits, lines and gates; by that of connections only where a
// port goes to another listener, or limits count connections in another way than before.
func (c *change) swap(now leaky.Time) {
	p := c.Proxy
	for s, config := range c.configs {
		s.config.Store(config)
		s.setDownstreams(config, now)
	}
	moved := false // connections
	for name, s := range p.sites {
		if c.sites[name] != s {
			s.gone, moved = true, true
			s.stopProbes()
		}
	}
	for place, l := range c.ports {
		was := l.serves()
		l.serve(c.services[place])
		moved = moved || was != nil && was.site != l.serves().site
	}
	p.sites = c.sites
	if moved {
		p.sessions.each(func(s *session) { s.rebind(now) })
		p.flowList.each(func(f *udpFlow) { f.rebind(now) })
		p.arrivals.each(func(w *arrival) { w.rebind(now) })
	}
	alike := !moved && p.shaper.Policy().CountsAlike(c.policy)
	p.gates.swap(c.policy, func() { p.shaper.Swap(c.policy, now) }, now)
	if !alike {
		p.sessions.each(func(s *session) { s.recount(now) })
		p.flowList.each(func(f *udpFlow) { f.recount(now) })
	}
	p.gates.run(now) // who waits tries the gates now, which know of all that is there
	for s := range c.configs {
		s.wake(now)
	}
}

// followTime is for how long the loop follows a change at a time.
const followTime = leaky.Second / 2000

// follow brings connections to the policy in effect, a few at a time.
func (c *change) follow() {
	p := c.Proxy
	inTurns(p.loop, &p.sessions, func(s *session, now leaky.Time) { s.follow(c.policy, now) })
	inTurns(p.loop, &p.flowList, func(f *udpFlow, now leaky.Time) { f.follow(c.policy, now) })
	for more := true; more; {
		p.loop.call(func(now leaky.Time) {
			for end := now + followTime; more && now < end; now = p.loop.clock.Now() {
				more = p.shaper.Settle()
			}
		})
	}
}

// inTurns calls f on the loop for all connections of r, and lets bytes have their turn
// after each followTime.
func inTurns[T enroller](l *loop, r *registry[T], f func(T, leaky.Time)) {
	at := toAll
	for more := true; more; {
		more = false
		l.call(func(now leaky.Time) {
			for end := now + followTime; now < end; now = l.clock.Now() {
				for range 8 {
					x, ok := r.before(&at)
					if !ok {
						return
					}
					f(x, now)
				}
			}
			more = true
		})
	}
}

// retire closes what has gone.
func (c *change) retire() {
	for place, l := range c.ports {
		// Permitted, as it was when it was opened, or is by CAP_NET_ADMIN.
		_ = setTransparent(l.descriptor(), place.Addr.Addr(), place.intercepts(c.listens[place]))
	}
	for place, l := range c.Proxy.ports {
		if c.ports[place] != l {
			l.close()
		}
	}
	c.Proxy.ports = c.ports
	c.closeInherited()
}
