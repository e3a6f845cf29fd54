package peer

import (
	"container/list"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"sync"
	"time"
)

// listener bounds the connections of a server. Strangers, who have not shown a certificate, cannot take
// the place of hosts, nor keep hosts from becoming known: when there are too many of either, the one
// that has been unused for the longest time is closed.
type listener struct {
	net.Listener
	maxStrangers, maxHosts int

	mu               sync.Mutex
	strangers, hosts list.List // of *conn: first what has been unused for the longest time
}

// conn is a connection to a server.
type conn struct {
	net.Conn
	since time.Time // when it was accepted

	// Guarded by the mutex of the listener.
	list    *list.List // strangers or hosts; nil once it is closed
	element *list.Element
}

// acceptPause is how long nothing is accepted after an error: descriptors or memory are short.
const acceptPause = 100 * time.Millisecond

// Accept returns the next connection. It goes on after all errors but net.ErrClosed.
func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		switch {
		case err == nil:
			added := &conn{Conn: c, since: time.Now()}
			l.put(added, &l.strangers, l.maxStrangers)
			return added, nil
		case errors.Is(err, net.ErrClosed):
			return nil, err
		}
		time.Sleep(acceptPause)
	}
}

// put moves c to the end of a list, and closes the first one if there are more than most.
func (l *listener) put(c *conn, to *list.List, most int) {
	l.mu.Lock()
	c.remove()
	c.list, c.element = to, to.PushBack(c)
	var first *conn
	if to.Len() > most {
		first = to.Front().Value.(*conn)
		first.remove()
	}
	l.mu.Unlock()
	if first != nil {
		first.Close()
	}
}

func (c *conn) remove() {
	if c.list != nil {
		c.list.Remove(c.element)
		c.list = nil
	}
}

// setState follows the state of a connection. A request can only arrive after the handshake.
func (l *listener) setState(c *conn, state http.ConnState) {
	switch state {
	case http.StateActive, http.StateIdle:
		l.put(c, &l.hosts, l.maxHosts)
	case http.StateClosed:
		l.mu.Lock()
		c.remove()
		l.mu.Unlock()
	}
}

// connOf returns the connection of listener under one of TLS.
func connOf(c net.Conn) *conn { return c.(*tls.Conn).NetConn().(*conn) }
