package control

import (
	"bytes"
	"container/list"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// connLimiter bounds the number of connections of each user, so that connections held open do
// not lock out new ones. At the bound it closes the oldest idle connection, or else the
// one that has been busy the longest, if for at least minBusyTime: it does not read its response,
// or is a stream. So the kill switch always works for root, whatever root left open.
type connLimiter struct {
	log      *slog.Logger
	endpoint string // for the log

	mu       sync.Mutex
	users    map[uint32]*userConns // by user ID
	loggedAt time.Time             // when logFull last logged
}

// minBusyTime is longer than a response takes.
const minBusyTime = 2 * time.Second

// userConns is the connections of one user, oldest first.
type userConns struct{ idle, busy list.List }

func (g *userConns) size() int { return g.idle.Len() + g.busy.Len() }

// limitedConn is a connection that counts for a connLimiter.
type limitedConn struct {
	net.Conn
	limiter *connLimiter
	user    uint32

	// Guarded by limiter.mu.
	since   time.Time  // when it became idle or busy
	list    *list.List // idle or busy of its user; nil once removed
	element *list.Element
}

// admit adds conn, and closes another connection of the user if it has maxConns of them. If
// none can be closed, ok is false, and conn is still added, for an error response; it is nil
// once there are as many of these again.
func (c *connLimiter) admit(conn net.Conn, user uint32, maxConns int) (_ *limitedConn, ok bool) {
	g := &limitedConn{Conn: conn, limiter: c, user: user}
	c.mu.Lock()
	conns := c.users[user]
	if conns == nil {
		conns = &userConns{}
		c.users[user] = conns
	}
	var victim *limitedConn
	ok = conns.size() < maxConns
	if !ok {
		if victim = c.victim(conns); victim != nil {
			victim.remove()
			ok = true
		}
		c.logFull(user, maxConns)
	}
	if conns.size() >= 2*maxConns {
		g = nil
	} else {
		g.push(&conns.idle)
	}
	c.mu.Unlock()
	if victim != nil {
		victim.Conn.Close()
	}
	return g, ok
}

// maxPeeks bounds the number of connections that victim checks for a pending request.
const maxPeeks = 16

// victim returns the connection to close, or nil. A connection with a pending request is not
// idle, even if the request is unread: on a busy host, a flood fills the bound before that.
func (c *connLimiter) victim(conns *userConns) *limitedConn {
	for range maxPeeks {
		e := conns.idle.Front()
		if e == nil {
			break
		}
		g := e.Value.(*limitedConn)
		if !g.requestArrived() {
			return g
		}
		g.remove()
		g.push(&conns.busy)
	}
	if e := conns.busy.Front(); e != nil && time.Since(e.Value.(*limitedConn).since) > minBusyTime {
		return e.Value.(*limitedConn)
	}
	return nil
}

// logFull logs that a bound was reached, at most once every ten seconds.
func (c *connLimiter) logFull(user uint32, maxConns int) {
	if time.Since(c.loggedAt) > 10*time.Second {
		c.loggedAt = time.Now()
		c.log.Warn("too many connections: closed the oldest", "endpoint", c.endpoint, "uid", int32(user), "max", maxConns)
	}
}

func (g *limitedConn) push(to *list.List) {
	g.list, g.since, g.element = to, time.Now(), to.PushBack(g)
}

// remove removes g from its list, if it is in one.
func (g *limitedConn) remove() {
	if g.list != nil {
		g.list.Remove(g.element)
		g.list = nil
	}
}

// headEnd is the end of a request header.
var headEnd = []byte("\r\n\r\n")

// requestArrived reports whether an unread request has arrived.
func (g *limitedConn) requestArrived() (arrived bool) {
	c, ok := g.Conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var head [4096]byte
	_ = raw.Control(func(fd uintptr) {
		n, _, err := unix.Recvfrom(int(fd), head[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		arrived = err == nil && bytes.Contains(head[:n], headEnd)
	})
	return arrived
}

// Read marks g as busy before its request is read, or right after: on a busy host it takes a
// while until the server has parsed it.
func (g *limitedConn) Read(b []byte) (int, error) {
	if g.requestArrived() {
		g.setState(http.StateActive)
	}
	n, err := g.Conn.Read(b)
	if n > 0 && bytes.Contains(b[:n], headEnd) {
		g.setState(http.StateActive)
	}
	return n, err
}

// setState marks g as busy or idle, as its server reports.
func (g *limitedConn) setState(state http.ConnState) {
	g.limiter.mu.Lock()
	defer g.limiter.mu.Unlock()
	conns := g.limiter.users[g.user]
	if g.list == nil { // it is being closed
		return
	}
	switch state {
	case http.StateActive:
		g.remove()
		g.push(&conns.busy)
	case http.StateIdle:
		g.remove()
		g.push(&conns.idle)
	}
}

func (g *limitedConn) Close() error {
	g.limiter.mu.Lock()
	g.remove()
	if conns := g.limiter.users[g.user]; conns != nil && conns.size() == 0 {
		delete(g.limiter.users, g.user)
	}
	g.limiter.mu.Unlock()
	return g.Conn.Close()
}

// limitedListener is a listener with at most maxPortConnections connections.
type limitedListener struct {
	net.Listener
	limiter *connLimiter
}

func (p limitedListener) Accept() (net.Conn, error) {
	for {
		c, err := p.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if g, ok := p.limiter.admit(c, anyUser, maxPortConnections); ok {
			return g, nil
		} else if g != nil {
			g.Close()
		}
	}
}

// anyUser is the user of a TCP connection.
const anyUser = ^uint32(0)
