package conn

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// tcpPort accepts connections and brings them to the loop.
type tcpPort struct {
	proxy   *Proxy
	ln      *net.TCPListener
	port    uint16
	service atomic.Pointer[service]
	once    sync.Once
}

func (p *Proxy) openTCP(addr netip.AddrPort) (port, error) {
	network := "tcp4"
	if addr.Addr().Is6() {
		network = "tcp6"
	}
	ln, err := net.ListenTCP(network, net.TCPAddrFromAddrPort(addr))
	if err != nil {
		return nil, explainBind(err, "tcp://"+addr.String())
	}
	return &tcpPort{proxy: p, ln: ln, port: ln.Addr().(*net.TCPAddr).AddrPort().Port()}, nil
}

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
	t.service.Store(&s)
	t.once.Do(func() { t.proxy.work.Go(t.accept) })
}

func (t *tcpPort) close() { t.ln.Close() }

func (t *tcpPort) accept() {
	p := t.proxy
	for {
		c, err := t.ln.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			// Descriptors or memory have run out. The connection stays in the
			// kernel's queue.
			p.refused.note("accept", "listener", t.service.Load().name, "err", err)
			time.Sleep(20 * time.Millisecond)
			continue
		}
		s := t.service.Load()
		s.counts.Accepted.Add(1)
		p.open.Add(1)
		p.work.Go(func() { p.connect(s, c, t.port) })
	}
}

// connect brings c past the gates, to a downstream, and into the loop.
func (p *Proxy) connect(s *service, c *net.TCPConn, port uint16) {
	source := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap().WithZone("")
	policy := p.shaper.Policy()
	sess := &session{proxy: p, site: s.site, flow: shaper.Flow{
		Source: source, Port: port, Protocol: shaper.TCP,
		Listen: policy.ListenIndex(s.name), Connection: p.nextID.Add(1),
	}}
	ctx, cancel := context.WithCancel(p.ctx)
	defer cancel()
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		if clientGone(c) {
			cancel()
		}
	}()
	stopWatching := func() {
		c.SetReadDeadline(time.Unix(1, 0))
		<-watched
	}
	fail := func(excess shaper.Excess) {
		stopWatching()
		if excess == shaper.ExcessReset {
			c.SetLinger(0)
		}
		c.Close()
		p.open.Add(-1)
	}

	slots, refusal := p.gates.acquire(ctx, policy, &sess.flow, policy.Route(&sess.flow), true)
	if refusal != nil {
		p.refused.note("connection refused", "limit", refusal.limit, "reason", refusal.reason.String(),
			"listener", s.name, "source", source)
		fail(refusal.excess)
		return
	}
	server, err := s.dial(ctx, port)
	if err != nil {
		if ctx.Err() == nil {
			s.counts.DialErrors.Add(1)
			p.refused.note("dial downstream", "listener", s.name, "err", err)
		}
		slots.release()
		fail(shaper.ExcessReset)
		return
	}
	stopWatching()
	sess.slots = slots
	sess.client.fd, err = detach(c)
	if err == nil {
		sess.server.fd, err = detach(server)
		if err != nil {
			unix.Close(sess.client.fd)
		}
	}
	if err != nil {
		p.refused.note("take over connection", "listener", s.name, "err", err)
		server.Close()
		slots.release()
		p.open.Add(-1)
		return
	}
	s.counts.Open.Add(1)
	p.loop.post(func(now leaky.Time) { p.loop.adopt(sess, policy, now) })
}

// dial connects to the downstream whose turn it is, or to the next ones.
func (s *service) dial(ctx context.Context, port uint16) (*net.TCPConn, error) {
	config := s.config.Load()
	dialer := net.Dialer{Timeout: config.ConnectTimeout}
	var errs []error
	first := int(s.turn.Add(1) - 1)
	for i := range config.Downstream {
		d := config.Downstream[(first+i)%len(config.Downstream)]
		c, err := dialer.DialContext(ctx, "tcp", d.address(port, s.samePort))
		if err == nil {
			return c.(*net.TCPConn), nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// clientGone waits until the client of c has left, and returns true, or until
// c's read deadline passes. A client that has sent something and no more may
// wait for an answer: it is taken to be there.
func clientGone(c *net.TCPConn) bool {
	rc, err := c.SyscallConn()
	if err != nil {
		return false
	}
	gone := false
	_ = rc.Read(func(fd uintptr) bool {
		fds := [...]unix.PollFd{{Fd: int32(fd)}}
		if n, _ := unix.Poll(fds[:], 0); n > 0 && fds[0].Revents&(unix.POLLERR|unix.POLLHUP) != 0 {
			gone = true
			return true
		}
		var b [1]byte
		n, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		gone = err == nil && n == 0
		return gone
	})
	return gone
}

// detach takes the socket out of c, and with it out of the Go runtime's poller.
func detach(c *net.TCPConn) (fd int, err error) {
	defer c.Close()
	rc, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	var dupErr error
	if err := rc.Control(func(old uintptr) {
		fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0)
	}); err != nil {
		return -1, err
	}
	return fd, dupErr
}
