// Owner: the loop's thread, except for what is atomic.

package conn

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// listener is a [shaper.Listener] in use, identified by its name.
type listener struct {
	name    string
	removed bool // removed from the configuration; some of its connections may remain
	config  atomic.Pointer[listenerConfig]
	counts  *shaper.ListenerState

	flows   flowLRU                   // all
	sources map[netip.Addr]*udpSource // by sourceKey

	proxy       *worker // on whose loop it runs
	downstreams []*downstream
	candidates  []*downstream      // of pick, reused
	readmission pacer.Event        // scheduled for when an ejected downstream gets connections again
	pools       map[poolKey]*gate  // those in use
	poolState   *shaper.LimitState // of the pools, not reported
	poolQuota   waitQuota          // of the pools
	hold        hold
}

type listenerConfig struct {
	shaper.Listener
	hosts []*host // of the downstreams
}

// binding is the listener that a port belongs to.
type binding struct {
	*listener
	samePort bool
}

// port is an open endpoint.
type port interface {
	listen() error // lets connections arrive
	bind(binding)  // starts the port, or changes its listener; on the loop
	bound() *binding
	close()
	descriptor() int
}

func (p *Proxy) newListener(name string) *listener {
	return &listener{
		name: name, counts: p.shaper.Listener(name),
		sources: map[netip.Addr]*udpSource{}, pools: map[poolKey]*gate{}, poolState: &shaper.LimitState{Name: poolName},
	}
}

func (p *Proxy) openPort(e shaper.Endpoint, l *shaper.Listener) (port, error) {
	if e.Protocol == shaper.UDP {
		return p.openUDP(e, l)
	}
	return p.openTCP(e, l)
}

// setOptions sets those options of a port, of e, that a configuration changes.
func (p *Proxy) setOptions(fd int, e shaper.Endpoint, l *shaper.Listener) {
	// Permitted, as it was when the port was opened, or by CAP_NET_ADMIN.
	_ = sock.SetTransparent(fd, e.Addr.Addr(), intercepts(l, e))
	if l.Instances <= 1 {
		return
	}
	err := sock.PermitOthers(fd)
	if err == nil {
		err = sock.SpreadSources(fd, e.Addr.Addr(), l.Instances)
	}
	if err != nil && !errors.Is(err, unix.EINVAL) { // it is alone, and the next instance there spreads the sources
		p.log.Warn("connections of one source may reach several instances", "listener", l.Name, "address", e.String(), "err", err)
	}
}

var errInUse = errors.New("address already in use")

// explainBind adds a hint to the usual errors of binding a port.
func explainBind(err error, endpoint string) error {
	var errno unix.Errno
	switch errors.As(err, &errno); errno {
	case unix.EADDRINUSE:
		return fmt.Errorf("listen on %s: %w; \"ss -lntup\" shows by which process", endpoint, errInUse)
	case unix.EACCES:
		return fmt.Errorf("listen on %s: not permitted; a port below 1024 needs CAP_NET_BIND_SERVICE", endpoint)
	case unix.EADDRNOTAVAIL:
		return fmt.Errorf("listen on %s: this host does not have the address", endpoint)
	}
	return fmt.Errorf("listen on %s: %w", endpoint, err)
}

// localAddr returns the address that a socket is bound to, or the zero value.
func localAddr(fd int) netip.AddrPort {
	addr, _ := sock.LocalAddr(fd)
	return sock.Unmap(addr)
}
