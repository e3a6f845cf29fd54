// Owner: the caller of Apply, with Proxy.mu; what is passed now runs on the loop's thread.

package conn

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// change is a new configuration on its way into effect. It is planned, new ports are opened, it is
// swapped in at one instant, connections follow in batches, and removed ports are closed.
type change struct {
	*Proxy
	policy    *shaper.Policy
	listeners map[string]*listener
	ordered   []*listener // as configured
	configs   map[*listener]*listenerConfig
	bindings  map[shaper.Endpoint]binding
	listens   map[shaper.Endpoint]*shaper.Listener

	ports  map[shaper.Endpoint]port // once open
	opened []port                   // new ones

	started []*worker // new ones
	merges  []merge
	ended   []*loop // of the workers that were merged into others
}

// Apply puts listens and policy into effect. If it returns an error, nothing has changed. After
// Shutdown it opens no ports, and after Close it fails.
//
// Ports that remain are not touched, nor are their connections: a connection belongs to the listener
// that has its port now, with the name and limits of that listener, and a waiter under a limit that
// remains keeps its turn. TCP connections of a removed port stay with their listener. If that was
// removed too, they keep the limits and slots that were specific to it, next to those of all
// listeners, until they end, and those that still wait for a slot are refused. UDP flows of a removed
// port end.
//
// The change takes effect for new connections at one instant. Existing connections follow in batches,
// and are under the old limits until then. Apply returns when all have followed.
//
// commit, unless nil, is called when nothing else can fail any more. Its error is returned by Apply.
// It must not call p.
func (p *Proxy) Apply(ctx context.Context, listens []shaper.Listener, policy *shaper.Policy, commit func() error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errClosed
	}
	c, err := p.plan(listens, policy)
	if err == nil {
		err = c.open()
	}
	if err == nil {
		err = c.assign()
	}
	if err == nil && commit != nil {
		err = commit()
	}
	if err != nil {
		c.undo()
		return err
	}
	p.resolver.resolve(ctx, c.configs)
	p.stopAll(c.swap)
	for _, l := range c.ended {
		l.stop()
		addProcessors(-1)
	}
	if len(c.started)+len(c.ended) > 0 {
		p.log.Info("number of loops changed", "loops", len(p.workers), "started", len(c.started), "ended", len(c.ended))
	}
	c.follow()
	c.retire()
	return nil
}

var errClosed = errors.New("the proxy is closed")

// plan validates listens, and binds listeners to ports.
func (p *Proxy) plan(listens []shaper.Listener, policy *shaper.Policy) (*change, error) {
	c := &change{
		Proxy: p, policy: policy,
		listeners: map[string]*listener{}, configs: map[*listener]*listenerConfig{},
		bindings: map[shaper.Endpoint]binding{}, listens: map[shaper.Endpoint]*shaper.Listener{}, ports: map[shaper.Endpoint]port{},
	}
	for i := range listens {
		listen := &listens[i]
		if err := checkTransparent(listen); err != nil {
			return c, fmt.Errorf("listener %q: %w", listen.Name, err)
		}
		ln := p.listeners[listen.Name]
		if ln == nil {
			ln = p.newListener(listen.Name)
		}
		c.listeners[listen.Name], c.configs[ln] = ln, &listenerConfig{Listener: *listen}
		c.ordered = append(c.ordered, ln)
		for _, a := range listen.Addresses {
			for _, e := range a.Endpoints() {
				c.bindings[e], c.listens[e] = binding{ln, !a.Single()}, listen
			}
		}
	}
	return c, nil
}

// open opens the new ports. It has no visible effect, but where this is one of several instances: a UDP port gets datagrams once
// it is bound, and a TCP port connections once it listens, which is when all ports are bound.
func (c *change) open() error {
	for key, b := range c.bindings {
		l := c.Proxy.ports[key]
		if l == nil && c.stopping {
			continue
		}
		var err error
		switch {
		case l == nil:
			if l, err = c.openPort(key, c.listens[key]); err == nil {
				c.opened = append(c.opened, l)
			}
		case c.listens[key].Instances <= 1 && sock.PermitsOthers(l.descriptor()):
			err = errors.New("instances: one instance needs a restart, after the others have been stopped: they would still listen")
		}
		if err != nil {
			return fmt.Errorf("listener %q: %w", b.name, c.explainInUse(key, err))
		}
		c.ports[key] = l
	}
	for key, l := range c.ports {
		if c.Proxy.ports[key] != nil {
			continue
		}
		if err := l.listen(); err != nil {
			return fmt.Errorf("listener %q: %w", c.bindings[key].name, c.explainInUse(key, err))
		}
	}
	if c.rejecter.Load() == nil && needsRejecter(c.policy) {
		r, err := newRejecter()
		if err != nil {
			return err
		}
		c.rejecter.Store(r)
	}
	return nil
}

// explainInUse replaces err if the port is in use by this daemon.
func (c *change) explainInUse(key shaper.Endpoint, err error) error {
	for own := range c.Proxy.ports {
		if errors.Is(err, errInUse) && own.Protocol == key.Protocol && own.Addr.Port() == key.Addr.Port() {
			return fmt.Errorf("listen on %v://%v: this daemon has the port at %v; moving it to another address requires a restart", key.Protocol, key.Addr, own.Addr.Addr())
		}
	}
	return err
}

func (c *change) undo() {
	for _, l := range c.opened {
		l.close()
	}
	for _, w := range c.started {
		c.removeWorker(w)
	}
}

// swap puts c into effect for new connections and for state that connections share. Its cost depends
// on the number of limits, queues and gates. It depends on the number of connections only if a port
// moves to another listener, or limits count connections differently than before.
//
// A change reaches existing connections in three steps: rebind moves them to the listener that now has
// their port, updateSlots to the gates of the new policy, and applyPolicy, called by follow, to its
// queues. The first two, where they are needed, happen for all connections at one instant.
func (c *change) swap(now leaky.Time) {
	p := c.Proxy
	for ln, config := range c.configs {
		ln.config.Store(config)
		was := ln.allShutOff()
		ln.setDownstreams(config, now)
		if was && !ln.allShutOff() {
			ln.goOn(now)
		}
		for _, gt := range ln.pools {
			gt.limit = poolLimit(config)
		}
		ln.followChecks(now)
		if config.OnDown == shaper.DownRefuse && ln.hold.down {
			ln.hold.down = false
			ln.goOn(now)
		}
		if p.listeners[config.Name] != ln && config.HeldFor > 0 {
			ln.holdFor(config.HeldFor, now)
		}
	}
	moved := false // a connection changes its listener
	for name, ln := range p.listeners {
		if c.listeners[name] != ln {
			ln.removed, moved = true, true
			ln.stopProbes()
			ln.proxy.loop.pacer.Cancel(&ln.hold.timer)
			ln.hold = hold{}
		}
	}
	for key, l := range c.ports {
		if old := l.bound(); old != nil {
			l.bind(c.bindings[key])
			moved = moved || old.listener != l.bound().listener
		}
	}
	p.listeners = c.listeners
	if moved {
		for _, w := range p.workers {
			w.sessions.each(func(s *session) { s.rebind(now) })
			w.flowList.each(func(f *udpFlow) { f.rebind(now) })
			w.pendingFlows.each(func(f *pendingFlow) { f.rebind(now) })
		}
	}
	c.moveWaiters(now) // now what waits can be withdrawn no more, until it tries the gates
	for _, m := range c.merges {
		c.ended = append(c.ended, m.from.loop)
		m.run(now)
		p.workers = slices.DeleteFunc(p.workers, func(w *worker) bool { return w == m.from })
	}
	for key, l := range c.ports {
		if l.bound() == nil { // its listener has the worker that it keeps
			l.bind(c.bindings[key])
		}
	}
	alike := !moved && p.shaper.Policy().CountsSameKeys(c.policy)
	var admissions []*admission
	for _, w := range p.workers {
		admissions = append(admissions, w.admission)
	}
	swapPolicy(c.policy, func() { p.shaper.Swap(c.policy, now) }, now, admissions...)
	p.home.loop.quotas.load()
	p.home.loop.sharing.reload(now)
	for _, w := range p.workers {
		if !alike {
			w.sessions.each(func(s *session) { s.updateSlots(now) })
			w.flowList.each(func(f *udpFlow) { f.updateSlots(now) })
		}
		w.admission.run(now) // waiters try the gates, which now count all connections
	}
	for ln := range c.configs {
		ln.wakeWaiters(now)
	}
	p.divideMemory(now)
}

// A change has followSlice of the loop's time at once, or followShare of it while rounds take longer.
const (
	followSlice = leaky.Second / 2000
	followShare = 5 // one in so many
)

// follow updates connections to the current policy, in batches.
func (c *change) follow() {
	p := c.Proxy
	for _, w := range p.workers {
		inBatches(w.loop, &w.sessions, func(s *session, now leaky.Time) { s.applyPolicy(c.policy, now); w.admission.run(now) })
		inBatches(w.loop, &w.flowList, func(f *udpFlow, now leaky.Time) { f.applyPolicy(c.policy, now); w.admission.run(now) })
	}
	p.home.loop.inSlices(func(leaky.Time) bool { return p.shaper.Migrate() })
}

// inBatches calls f on the loop for all connections of r, in slices.
func inBatches[T registered](l *loop, r *registry[T], f func(T, leaky.Time)) {
	at := fromEnd
	l.inSlices(func(now leaky.Time) bool {
		for range 8 {
			x, ok := r.prev(&at)
			if !ok {
				return false
			}
			f(x, now)
		}
		return true
	})
}

// inSlices calls f on the loop until it returns false, and waits for that. Other work has its turn after each slice.
func (l *loop) inSlices(f func(now leaky.Time) (more bool)) {
	done := make(chan struct{})
	other := l.clock.Now() // when other work had its turn
	var slice func(leaky.Time)
	slice = func(leaky.Time) {
		now := l.clock.Now()
		end := now + max(followSlice, now.Sub(other)/(followShare-1))
		for ; now < end; now = l.clock.Now() {
			if !f(now) {
				close(done)
				return
			}
		}
		other = now
		l.runLater(slice)
	}
	l.post(slice)
	select {
	case <-done:
	case <-l.done:
	}
}

// retire closes the removed ports.
func (c *change) retire() {
	for key, l := range c.ports {
		c.setOptions(l.descriptor(), key, c.listens[key])
	}
	for key, l := range c.Proxy.ports {
		if c.ports[key] != l {
			l.close()
		}
	}
	c.Proxy.ports = c.ports
	c.closeInherited()
}
