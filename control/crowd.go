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

// crowd bounds the connections of each user, so that whoever holds some without asking for
// anything keeps nobody out: at the bound the oldest that asks for nothing now makes room, and
// where there is none the one that has been busy longest, for busyTime at least: it does not
// read what it asked for, or is a stream. So root has its kill switch, whatever it left open.
type crowd struct {
	log  *slog.Logger
	name string // of where they connect

	mu     sync.Mutex
	groups map[uint32]*group // by user
	told   time.Time         // of a bound that was reached
}

// busyTime is longer than an answer takes.
const busyTime = 2 * time.Second

// group is the connections of a user, the oldest first.
type group struct{ quiet, busy list.List }

func (g *group) size() int { return g.quiet.Len() + g.busy.Len() }

// guest is a connection of a crowd.
type guest struct {
	net.Conn
	crowd *crowd
	user  uint32

	// The following are guarded by crowd.mu.
	since time.Time // it has been quiet or busy
	in    *list.List
	at    *list.Element
}

// admit takes conn in. When user has as many as it may, and none of them can go, it returns
// false, and conn is still taken in, to be told so; and nil when there are many of those.
func (c *crowd) admit(conn net.Conn, user uint32, most int) (_ *guest, room bool) {
	g := &guest{Conn: conn, crowd: c, user: user}
	c.mu.Lock()
	of := c.groups[user]
	if of == nil {
		of = &group{}
		c.groups[user] = of
	}
	var out *guest
	room = of.size() < most
	if !room {
		if out = c.oldest(of); out != nil {
			out.leave()
			room = true
		}
		c.tell(user, most)
	}
	if of.size() >= 2*most {
		g = nil
	} else {
		g.enter(&of.quiet)
	}
	c.mu.Unlock()
	if out != nil {
		out.Conn.Close()
	}
	return g, room
}

// maxPeeks bounds how many connections are looked into for one that comes.
const maxPeeks = 16

// oldest returns who is to make room, or nil. Whose request has arrived is not quiet, though
// nobody may have read it yet: on a busy host that takes longer than a flood to fill the bound.
func (c *crowd) oldest(of *group) *guest {
	for range maxPeeks {
		e := of.quiet.Front()
		if e == nil {
			break
		}
		g := e.Value.(*guest)
		if !g.asks() {
			return g
		}
		g.leave()
		g.enter(&of.busy)
	}
	if e := of.busy.Front(); e != nil && time.Since(e.Value.(*guest).since) > busyTime {
		return e.Value.(*guest)
	}
	return nil
}

// tell logs that a bound was reached, at most once every ten seconds.
func (c *crowd) tell(user uint32, most int) {
	if time.Since(c.told) > 10*time.Second {
		c.told = time.Now()
		c.log.Warn("too many connections: the oldest is closed", "at", c.name, "uid", int32(user), "most", most)
	}
}

func (g *guest) enter(in *list.List) {
	g.in, g.since, g.at = in, time.Now(), in.PushBack(g)
}

// leave takes g out of its list, if it is in one.
func (g *guest) leave() {
	if g.in != nil {
		g.in.Remove(g.at)
		g.in = nil
	}
}

// headEnd ends the header of a request.
var headEnd = []byte("\r\n\r\n")

// asks reports whether a request has arrived that nobody has read yet.
func (g *guest) asks() (yes bool) {
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
		yes = err == nil && bytes.Contains(head[:n], headEnd)
	})
	return yes
}

// Read notes that g asks before its request is read, or as soon as it is: until its server has
// parsed it, a busy host may do something else.
func (g *guest) Read(b []byte) (int, error) {
	if g.asks() {
		g.changed(http.StateActive)
	}
	n, err := g.Conn.Read(b)
	if n > 0 && bytes.Contains(b[:n], headEnd) {
		g.changed(http.StateActive)
	}
	return n, err
}

// changed notes whether g asks for something, as its server says.
func (g *guest) changed(state http.ConnState) {
	g.crowd.mu.Lock()
	defer g.crowd.mu.Unlock()
	of := g.crowd.groups[g.user]
	if g.in == nil { // it made room
		return
	}
	switch state {
	case http.StateActive:
		g.leave()
		g.enter(&of.busy)
	case http.StateIdle:
		g.leave()
		g.enter(&of.quiet)
	}
}

func (g *guest) Close() error {
	g.crowd.mu.Lock()
	g.leave()
	if of := g.crowd.groups[g.user]; of != nil && of.size() == 0 {
		delete(g.crowd.groups, g.user)
	}
	g.crowd.mu.Unlock()
	return g.Conn.Close()
}

// size returns how many connections there are.
func (c *crowd) size() (n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, of := range c.groups {
		n += of.size()
	}
	return n
}

// port is a listener with at most maxOfPort connections, whoever has them.
type port struct {
	net.Listener
	crowd *crowd
}

func (p port) Accept() (net.Conn, error) {
	for {
		c, err := p.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if g, room := p.crowd.admit(c, anybody, maxOfPort); room {
			return g, nil
		} else if g != nil {
			g.Close()
		}
	}
}

// anybody is the user of a connection by TCP.
const anybody = ^uint32(0)
