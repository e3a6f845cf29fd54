package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// relay stands before a server and counts its open transactions: from when a client's message arrives here, until the server
// says that it is ready and outside of a transaction, before that is passed on. So its count is at each instant no higher than
// that of a program in front, if that is right. (The server itself reads its processes one after another: one that has ended and
// one that has begun meanwhile may be both open to it.)
type relay struct {
	host    *lab.Host
	to      netip.AddrPort
	clients net.Listener
	wait    sync.WaitGroup

	mu    sync.Mutex
	conns map[*relayed]bool
	open  int
	most  int
	err   error
}

// relayed is a connection.
type relayed struct {
	client, server net.Conn
	open           bool // has asked something, or not got through its start
}

func startRelay(h *lab.Host, at, to netip.AddrPort) (*relay, error) {
	l, err := h.Listen(at)
	if err != nil {
		return nil, err
	}
	r := &relay{host: h, to: to, clients: l, conns: map[*relayed]bool{}}
	r.wait.Go(r.accept)
	return r, nil
}

// stop ends all connections, and returns how many transactions were open at once at most. It may be called again.
func (r *relay) stop() (most int, err error) {
	r.clients.Close()
	r.mu.Lock()
	for c := range r.conns {
		c.client.Close()
	}
	r.mu.Unlock()
	r.wait.Wait()
	return r.most, r.err
}

func (r *relay) accept() {
	for {
		client, err := r.clients.Accept()
		if err != nil {
			return
		}
		r.wait.Go(func() { r.serve(client) })
	}
}

func (r *relay) serve(client net.Conn) {
	defer client.Close()
	server, err := r.host.Dial(context.Background(), r.to.Addr(), r.to, 10*time.Second)
	if err != nil {
		return
	}
	c := &relayed{client: client, server: server}
	r.mu.Lock()
	r.conns[c] = true
	r.mu.Unlock()
	r.wait.Go(func() {
		r.note(r.relay(client, server, client, true, func(byte, []byte) { r.set(c, true) }))
		server.Close()
	})
	r.note(r.relay(server, client, nil, false, func(kind byte, text []byte) {
		if kind == 'Z' && len(text) > 0 && text[0] == 'I' {
			r.set(c, false)
		}
	}))
	r.set(c, false)
	r.mu.Lock()
	delete(r.conns, c)
	r.mu.Unlock()
}

// note keeps the first error of the protocol.
func (r *relay) note(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err == nil {
		r.err = err
	}
}

// set counts a connection, or does not any more.
func (r *relay) set(c *relayed, open bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case open && !c.open:
		r.open++
	case !open && c.open:
		r.open--
	}
	c.open = open
	r.most = max(r.most, r.open)
}

// relay copies messages until either end closes. It calls seen with the type and text of each before it is passed on, but not
// with the one that ends a connection. Before the first of a client, which has no type, it may ask for encryption, which is
// refused.
func (r *relay) relay(from io.Reader, to, refuse io.Writer, untyped bool, seen func(kind byte, text []byte)) error {
	in := bufio.NewReader(from)
	for {
		head := make([]byte, 5)
		if untyped {
			head = head[:4]
		}
		if _, err := io.ReadFull(in, head); err != nil {
			return nil
		}
		length := binary.BigEndian.Uint32(head[len(head)-4:])
		if length < 4 || length > 1<<20 {
			return errors.New("relay: a message is too short or too long")
		}
		message := append(head, make([]byte, length-4)...)
		text := message[len(head):]
		if _, err := io.ReadFull(in, text); err != nil {
			return nil
		}
		kind := head[0]
		if untyped {
			if kind = 0; len(text) == 4 { // a request for encryption
				if _, err := refuse.Write([]byte{'N'}); err != nil {
					return nil
				}
				continue
			}
		}
		if untyped = false; kind != 'X' {
			seen(kind, text)
		}
		if _, err := to.Write(message); err != nil {
			return nil
		}
	}
}
