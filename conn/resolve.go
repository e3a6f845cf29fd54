package conn

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// resolver resolves the names of downstreams, and keeps their addresses up to date.
type resolver struct {
	log     *logLimiter
	changed func() // called when the address of a host changes
	ctx     context.Context
	cancel  context.CancelFunc
	workers sync.WaitGroup

	mu sync.Mutex
	// mu protects:
	hosts      map[string]*host // by name, of the current configuration
	prefetched map[string]*host // by name, for the next configuration
}

// host is the address of a downstream, or its name and the address found for it.
type host struct {
	name    string
	address atomic.Pointer[netip.Addr]
}

const (
	// resolveInterval is the time between lookups of a name: Go's resolver does not expose
	// TTLs.
	resolveInterval = 30 * time.Second

	// resolveRetry is the time between lookups of a name that has no address yet.
	resolveRetry = 2 * time.Second

	// resolveTimeout bounds one lookup.
	resolveTimeout = 3 * time.Second
)

var (
	errNoAddress       = errors.New("no downstream name has been resolved yet")
	errNotResolved     = errors.New("name not resolved")
	errDownstreamsFull = errors.New("all downstreams are at their maximum of connections")
)

func newResolver(failed *logLimiter, found func()) *resolver {
	r := &resolver{log: failed, changed: found, hosts: map[string]*host{}}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

func (r *resolver) close() {
	r.cancel()
	r.workers.Wait()
}

// addr returns the host's address, or the zero Addr if none is known yet.
func (h *host) addr() netip.Addr {
	if a := h.address.Load(); a != nil {
		return *a
	}
	return netip.Addr{}
}

// resolve sets the hosts of configs, and looks up the new names. All names are looked up
// periodically from then on, whether or not they were found.
func (r *resolver) resolve(ctx context.Context, configs map[*listener]*listenerConfig) {
	hosts := map[string]*host{}
	var first sync.WaitGroup
	r.mu.Lock()
	for _, c := range configs {
		c.hosts = nil
		for _, d := range c.Downstream {
			if addr, err := netip.ParseAddr(d.Host); err == nil {
				h := &host{}
				addr = addr.Unmap()
				h.address.Store(&addr)
				c.hosts = append(c.hosts, h)
				continue
			}
			h := hosts[d.Host]
			if h == nil {
				h = r.hosts[d.Host]
			}
			if h == nil {
				h = r.prefetched[d.Host]
			}
			if h == nil {
				h = &host{name: d.Host}
				first.Go(func() { r.lookup(ctx, h) })
			}
			hosts[d.Host] = h
			c.hosts = append(c.hosts, h)
		}
	}
	r.mu.Unlock()
	first.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, h := range hosts {
		if r.hosts[name] == nil {
			r.workers.Go(func() { r.refresh(h) })
		}
	}
	r.hosts, r.prefetched = hosts, nil
}

// ResolveAhead looks up the new names in listens ahead of an Apply, which then need not wait for name
// servers. It takes 3 s at most, and may be called during an Apply.
func (p *Proxy) ResolveAhead(ctx context.Context, listens []shaper.Listener) {
	p.resolver.prefetch(ctx, listens)
}

func (r *resolver) prefetch(ctx context.Context, listens []shaper.Listener) {
	ahead := map[string]*host{}
	var work sync.WaitGroup
	r.mu.Lock()
	for _, l := range listens {
		for _, d := range l.Downstream {
			if _, err := netip.ParseAddr(d.Host); err == nil || r.hosts[d.Host] != nil || ahead[d.Host] != nil {
				continue
			}
			h := &host{name: d.Host}
			ahead[d.Host] = h
			work.Go(func() { r.lookup(ctx, h) })
		}
	}
	r.mu.Unlock()
	work.Wait()
	r.mu.Lock()
	r.prefetched = ahead
	r.mu.Unlock()
}

// refresh looks up h periodically until no downstream has the name.
func (r *resolver) refresh(h *host) {
	for {
		wait := resolveInterval
		if !h.addr().IsValid() {
			wait = resolveRetry
		}
		select {
		case <-time.After(wait):
		case <-r.ctx.Done():
			return
		}
		r.mu.Lock()
		wanted := r.hosts[h.name] == h
		r.mu.Unlock()
		if !wanted {
			return
		}
		r.lookup(r.ctx, h)
	}
}

// lookup resolves the name of h. It keeps the known address if that is still among the
// results, or if the lookup fails.
func (r *resolver) lookup(ctx context.Context, h *host) {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", h.name)
	if err != nil {
		if r.ctx.Err() == nil {
			r.log.warn("downstream lookup failed", "downstream", h.name, "err", err)
		}
		return
	}
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	if !slices.Contains(addrs, h.addr()) {
		h.address.Store(&addrs[0])
		r.changed()
	}
}
