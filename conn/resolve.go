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
)

// resolver keeps the addresses of downstreams that have names.
type resolver struct {
	failed *sampler
	found  func() // is called when a host has another address
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu    sync.Mutex
	hosts map[string]*host // those with names
	ahead map[string]*host // looked up for the next configuration
}

// host is where a downstream is.
type host struct {
	name  string
	found atomic.Pointer[netip.Addr]
}

const (
	// resolveAgain is how often names are looked up: Go's resolver does not tell
	// for how long an answer holds.
	resolveAgain = 30 * time.Second

	// resolveSoon is after which time a name is looked up again that has no
	// address yet.
	resolveSoon = 2 * time.Second

	// resolveTimeout is how long a name may take.
	resolveTimeout = 3 * time.Second
)

var (
	errNoAddress  = errors.New("no downstream's name has an address yet")
	errUnresolved = errors.New("its name has no address")
	errFull       = errors.New("all downstreams have as many connections as they may")
)

func newResolver(failed *sampler, found func()) *resolver {
	r := &resolver{failed: failed, found: found, hosts: map[string]*host{}}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

func (r *resolver) close() {
	r.cancel()
	r.work.Wait()
}

// addr returns the host's address, or the zero address when it has none yet.
func (h *host) addr() netip.Addr {
	if a := h.found.Load(); a != nil {
		return *a
	}
	return netip.Addr{}
}

// resolve sets the hosts of configs, and looks up the names that are new. They are
// looked up again from time to time, as are those that were not found.
func (r *resolver) resolve(ctx context.Context, configs map[*site]*siteConfig) {
	hosts := map[string]*host{}
	var first sync.WaitGroup
	r.mu.Lock()
	for _, c := range configs {
		c.hosts = nil
		for _, d := range c.Downstream {
			if addr, err := netip.ParseAddr(d.Host); err == nil {
				h := &host{}
				addr = addr.Unmap()
				h.found.Store(&addr)
				c.hosts = append(c.hosts, h)
				continue
			}
			h := hosts[d.Host]
			if h == nil {
				h = r.hosts[d.Host]
			}
			if h == nil {
				h = r.ahead[d.Host]
			}
			if h == nil {
				h = &host{name: d.Host}
				first.Go(func() { r.lookUp(ctx, h) })
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
			r.work.Go(func() { r.keep(h) })
		}
	}
	r.hosts, r.ahead = hosts, nil
}

// LookUp looks up the names in listens that are new, so that an Apply of them does not wait
// for name servers. It takes 3 s at most, and may be called during an Apply.
func (p *Proxy) LookUp(ctx context.Context, listens []Listen) { p.names.lookAhead(ctx, listens) }

func (r *resolver) lookAhead(ctx context.Context, listens []Listen) {
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
			work.Go(func() { r.lookUp(ctx, h) })
		}
	}
	r.mu.Unlock()
	work.Wait()
	r.mu.Lock()
	r.ahead = ahead
	r.mu.Unlock()
}

// keep looks h up until it is not a downstream any more.
func (r *resolver) keep(h *host) {
	for {
		wait := resolveAgain
		if !h.addr().IsValid() {
			wait = resolveSoon
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
		r.lookUp(r.ctx, h)
	}
}

// lookUp finds an address of h: the one it has, if that is still its own. One that is
// not found keeps what it has.
func (r *resolver) lookUp(ctx context.Context, h *host) {
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", h.name)
	if err != nil {
		if r.ctx.Err() == nil {
			r.failed.note("look up downstream", "downstream", h.name, "err", err)
		}
		return
	}
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	if !slices.Contains(addrs, h.addr()) {
		h.found.Store(&addrs[0])
		r.found()
	}
}
