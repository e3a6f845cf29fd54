package conn

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	config := net.ListenConfig{Control: p.control}
	config.SetMultipathTCP(false) // whose sockets cannot be owned: there is one inside the other
	l, err := config.Listen(context.Background(), network, addr.String())
	if err != nil {
		return nil, explainBind(err, "tcp://"+addr.String())
	}
	ln := l.(*net.TCPListener)
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
	sess := &session{proxy: p, site: s.site, flow: shaper.Flow{
		Source: c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap().WithZone(""),
		Port:   port, Protocol: shaper.TCP, Connection: p.nextID.Add(1),
	}}
	slots, refusal := p.gates.acquire(&sess.flow, s.name, watchClient(c))
	if refusal != nil {
		p.refused.note("connection refused", "limit", refusal.limit, "reason", refusal.reason.String(),
			"listener", s.name, "source", sess.flow.Source)
		refuse(c, refusal.excess)
		p.open.Add(-1)
		return
	}
	fail := func(msg string, err error) {
		p.refused.note(msg, "listener", s.name, "err", err)
		slots.release()
		refuse(c, shaper.ExcessReset)
		p.open.Add(-1)
	}
	server, err := p.dial(s, port)
	if err != nil {
		s.counts.DialErrors.Add(1)
		fail("dial downstream", err)
		return
	}
	if sess.server.fd, err = detach(server); err != nil {
		server.Close()
		fail("take over connection", err)
		return
	}
	if sess.client.fd, err = detach(c); err != nil {
		unix.Close(sess.server.fd)
		fail("take over connection", err)
		return
	}
	sess.slots = slots
	s.counts.Open.Add(1)
	p.owner.RLock()
	defer p.owner.RUnlock()
	p.mark(sess.client.fd, sess.server.fd) // again: they may be older than the owner
	p.loop.post(func(now leaky.Time) { p.loop.adopt(sess, now) })
}

// refuse ends c. A close that is not a reset takes in what the client has sent,
// up to a bound: the kernel resets a connection that is closed with data unread.
func refuse(c *net.TCPConn, excess shaper.Excess) {
	defer c.Close()
	if excess == shaper.ExcessReset {
		c.SetLinger(0)
		return
	}
	c.CloseWrite()
	c.SetReadDeadline(time.Now().Add(time.Second))
	io.CopyN(io.Discard, c, 64<<10)
}

// dial connects to the downstream of s whose turn it is, or to the next ones.
func (p *Proxy) dial(s *service, port uint16) (*net.TCPConn, error) {
	config := s.config.Load()
	dialer := net.Dialer{Timeout: config.ConnectTimeout, Control: p.control}
	var errs []error
	first := int(s.turn.Add(1) - 1)
	for i := range config.Downstream {
		d := config.Downstream[(first+i)%len(config.Downstream)]
		c, err := dialer.DialContext(p.ctx, "tcp", d.address(port, s.samePort))
		if err == nil {
			return c.(*net.TCPConn), nil
		}
		errs = append(errs, err)
		if p.ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}

// watchClient returns a watch over the client of c.
func watchClient(c *net.TCPConn) watch {
	return func() (<-chan struct{}, func()) {
		gone, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			if clientGone(c) {
				close(gone)
			}
		}()
		return gone, func() {
			c.SetReadDeadline(time.Unix(1, 0))
			<-ended
			c.SetReadDeadline(time.Time{})
		}
	}
}

// clientGone waits until the client of c has left, and returns true, or until
// c's read deadline passes. A client that has sent something and no more may
// wait for an answer: it is taken to be there. One that has ended without a word
// is not.
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

// detach takes the socket out of c, and with it out of the Go runtime's poller. On
// an error c stays as it is.
func detach(c *net.TCPConn) (fd int, err error) {
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
	if dupErr == nil {
		c.Close()
	}
	return fd, dupErr
}
