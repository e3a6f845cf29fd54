package testutil

import (
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
)

// ServeTCP handles the connections to a loopback port, like [Serve], and returns its address.
func ServeTCP(t testing.TB, handle func(*net.TCPConn)) string {
	t.Helper()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	Serve(t, l, handle)
	return l.Addr().String()
}

// Serve handles each connection in a goroutine. It closes the listener when the test ends, and
// waits for the connections: their clients must have closed them, or have been closed before.
func Serve(t testing.TB, l *net.TCPListener, handle func(*net.TCPConn)) {
	var work sync.WaitGroup
	work.Go(func() {
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			work.Go(func() {
				defer c.Close()
				handle(c)
			})
		}
	})
	t.Cleanup(func() { l.Close(); work.Wait() })
}

// Echo returns what a connection sends.
func Echo(c *net.TCPConn) { _, _ = io.Copy(c, c) }

// Discard reads a connection to its end.
func Discard(c *net.TCPConn) { _, _ = io.Copy(io.Discard, c) }

// ServeUDP sends the reply to each datagram, unless it is nil. It closes the socket when the
// test ends.
func ServeUDP(t testing.TB, c *net.UDPConn, reply func(data []byte, from netip.AddrPort) []byte) {
	var work sync.WaitGroup
	work.Go(func() {
		b := make([]byte, 1<<16)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			if answer := reply(b[:n], from); answer != nil {
				_, _ = c.WriteToUDPAddrPort(answer, from)
			}
		}
	})
	t.Cleanup(func() { c.Close(); work.Wait() })
}

// EchoUDP sends each datagram back, like [ServeUDP].
func EchoUDP(t testing.TB, c *net.UDPConn) {
	ServeUDP(t, c, func(data []byte, _ netip.AddrPort) []byte { return data })
}

// ListenUDP opens a socket, which is closed when the test ends.
func ListenUDP(t testing.TB, addr string) *net.UDPConn {
	t.Helper()
	c, err := net.ListenPacket("udp4", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.UDPConn)
}
