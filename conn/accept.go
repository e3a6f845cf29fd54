package conn

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// tcpPort is a socket that listens. It belongs to the loop's thread once it serves.
type tcpPort struct {
	proxy   *Proxy
	fd      int
	port    uint16
	service atomic.Pointer[service]
	rested  leaky.Event // ends the rest of a port that could not accept
}

const (
	// backlog is how many connections wait in the kernel to be accepted; the system
	// has its own bound, net.core.somaxconn.
	backlog = 4096

	// acceptTurn is how many connections a port accepts before other sockets, and
	// departures, have their turn.
	acceptTurn = 8
)

func (p *Proxy) openTCP(addr netip.AddrPort) (port, error) {
	fd, err := p.listenTCP(addr)
	if err != nil {
		return nil, explainBind(err, "tcp://"+addr.String())
	}
	bound, err := localPort(fd)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("listen on tcp://%s: %w", addr, err)
	}
	t := &tcpPort{proxy: p, fd: fd, port: bound}
	t.rested.Fire = func(leaky.Time) { p.loop.rewatch(t.fd, unix.EPOLLIN) }
	return t, nil
}

// listenTCP returns a listening socket, whose options its connections inherit.
func (p *Proxy) listenTCP(addr netip.AddrPort) (int, error) {
	fd, err := tcpSocket(addr.Addr())
	if err != nil {
		return -1, err
	}
	p.mark(fd)
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err == nil && addr.Addr().Is6() {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
	}
	if err == nil {
		err = unix.Bind(fd, sockaddr(addr))
	}
	if err == nil {
		err = unix.Listen(fd, backlog)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// tcpSocket returns a socket that sends small segments at once and finds out when the
// other side is gone. An error of these options leaves them as they are.
func tcpSocket(a netip.Addr) (int, error) {
	fd, err := socket(a, unix.SOCK_STREAM)
	if err != nil {
		return -1, err
	}
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, keepAlive)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, keepAlive)
	return fd, nil
}

// keepAlive is after how many seconds of silence the other side is asked whether it is
// there, and how often.
const keepAlive = 15

// explainBind says what to do about the usual reasons why a port cannot be had.
func explainBind(err error, endpoint string) error {
	var errno unix.Errno
	switch errors.As(err, &errno); errno {
	case unix.EADDRINUSE:
		return fmt.Errorf("listen on %s: the port is in use; see \"ss -lntup\" for whose it is", endpoint)
	case unix.EACCES:
		return fmt.Errorf("listen on %s: not permitted; a port below 1024 needs CAP_NET_BIND_SERVICE", endpoint)
	case unix.EADDRNOTAVAIL:
		return fmt.Errorf("listen on %s: this host has no such address", endpoint)
	}
	return fmt.Errorf("listen on %s: %w", endpoint, err)
}

func (t *tcpPort) serve(s service) {
	if t.service.Swap(&s) != nil {
		return
	}
	t.proxy.loop.call(func(leaky.Time) {
		if err := t.proxy.loop.watch(t.fd, unix.EPOLLIN, t); err != nil {
			t.proxy.log.Error("watch TCP port", "listener", s.name, "port", t.port, "err", err)
		}
	})
}

// close ends the port. Connections that it has not accepted yet are reset.
func (t *tcpPort) close() {
	t.proxy.loop.call(func(leaky.Time) {
		t.proxy.loop.pacer.Cancel(&t.rested)
		t.proxy.loop.close(t.fd)
	})
}

// ready accepts connections; epoll reports the port again when there are more.
func (t *tcpPort) ready(_ uint32, now leaky.Time) {
	if t.proxy.loop.short(enough) {
		t.rest("descriptors or memory run short", now)
		return
	}
	for range acceptTurn {
		fd, from, errno := accept(t.fd)
		switch errno {
		case 0:
			t.proxy.accepted(t.service.Load(), fd, from, t.port, now)
		case unix.EAGAIN:
			return
		case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM:
			t.rest(errno.Error(), now)
			return
		default: // of a connection that has ended already
		}
	}
}

// rest leaves connections in the kernel's queue for a while.
func (t *tcpPort) rest(why string, now leaky.Time) {
	t.proxy.refused.note("accept no connections", "listener", t.service.Load().name, "reason", why)
	t.proxy.loop.rewatch(t.fd, 0)
	t.proxy.loop.pacer.Schedule(&t.rested, now+overloadRest)
}

// accepted brings a connection to the gates.
func (p *Proxy) accepted(sv *service, fd int, from netip.Addr, port uint16, now leaky.Time) {
	sv.counts.Accepted.Add(1)
	s := &session{proxy: p, service: sv}
	s.owner, s.listen = s, sv.name
	s.flow = shaper.Flow{Source: from, Port: port, Protocol: shaper.TCP, Connection: p.nextID.Add(1)}
	s.client = side{session: s, fd: fd}
	s.server = side{session: s, fd: -1}
	if err := p.loop.watch(fd, edges, &s.client); err != nil {
		p.refused.note("watch connection", "listener", sv.name, "err", err)
		unix.Close(fd)
		return
	}
	p.mark(fd) // it may have come before its listener had an owner
	p.sessions[s] = struct{}{}
	p.open.Add(1)
	p.gates.enter(&s.entrant, now)
}

// admitted is called at the last gate.
func (s *session) admitted(now leaky.Time) {
	s.stage = dialing
	if s.proxy.loop.short(tooMuch) {
		s.proxy.refused.note("shed connection", "listener", s.name, "source", s.flow.Source)
		s.abort(shaper.Overload, now)
		return
	}
	s.timer.Fire = s.dialTimeout
	s.first = int(s.turn.Add(1) - 1)
	s.dial(now)
}

// dial connects to the downstream whose turn it is, or to the next ones.
func (s *session) dial(now leaky.Time) {
	config := s.config.Load()
	for ; s.tried < len(config.Downstream); s.tried++ {
		i := (s.first + s.tried) % len(config.Downstream)
		err := s.connect(config, i)
		if err == nil {
			s.proxy.loop.pacer.Schedule(&s.timer, now+leaky.FromDuration(config.Connect))
			return
		}
		s.dialFailed(config, i, err)
	}
	s.counts.DialErrors.Add(1)
	s.abort(shaper.NotConnected, now)
}

// connect begins to connect to downstream i.
func (s *session) connect(config *siteConfig, i int) error {
	addr := config.addr(i)
	if !addr.IsValid() {
		return errNoAddress
	}
	fd, err := tcpSocket(addr)
	if err != nil {
		return err
	}
	s.proxy.mark(fd)
	err = unix.Connect(fd, sockaddr(netip.AddrPortFrom(addr, config.Downstream[i].port(s.flow.Port, s.samePort))))
	if err == nil || err == unix.EINPROGRESS {
		s.server = side{session: s, fd: fd}
		err = s.proxy.loop.watch(fd, edges, &s.server)
	}
	if err != nil {
		s.server.fd = -1
		unix.Close(fd)
	}
	return err
}

func (s *session) dialFailed(config *siteConfig, i int, err error) {
	d := config.Downstream[i]
	s.proxy.refused.note("dial downstream", "listener", s.name, "downstream", d.address(s.flow.Port, s.samePort), "err", err)
}

// dialed is told of the connection under way.
func (s *session) dialed(events uint32, now leaky.Time) {
	if events&(unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		errno, _ := unix.GetsockoptInt(s.server.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		s.dialAgain(unix.Errno(errno), now)
		return
	}
	if events&unix.EPOLLOUT != 0 {
		s.proxy.loop.pacer.Cancel(&s.timer)
		s.begin(now)
	}
}

func (s *session) dialTimeout(now leaky.Time) { s.dialAgain(unix.ETIMEDOUT, now) }

func (s *session) dialAgain(err error, now leaky.Time) {
	l := s.proxy.loop
	l.pacer.Cancel(&s.timer)
	l.close(s.server.fd)
	s.server.fd = -1
	config := s.config.Load()
	s.dialFailed(config, (s.first+s.tried)%len(config.Downstream), err)
	s.tried++
	s.dial(now)
}
