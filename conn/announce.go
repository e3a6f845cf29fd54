package conn

import (
	"bufio"
	"bytes"
	"net"
	"net/netip"

	proxyproto "github.com/pires/go-proxyproto"
	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// The PROXY protocol (haproxy.org/download/3.0/doc/proxy-protocol.txt): who forwards a
// connection announces whose it is in a header before the first byte.

const (
	// maxHeader bounds a header of version 2 with all that it may carry beside
	// addresses; one of version 1 is a line of at most maxLine bytes.
	maxHeader = 16 + 4096
	maxLine   = 107

	// headerTimeout is how long a header may take to come.
	headerTimeout = 5 * leaky.Second
)

var headerSignature = []byte("\r\n\r\n\x00\r\nQUIT\n")

// headerLength returns how long the header is that b begins with, 0 while that is not to
// be seen yet, or -1 when it is not one.
func headerLength(b []byte) int {
	const line = "PROXY "
	switch {
	case bytes.HasPrefix(headerSignature, b[:min(len(b), len(headerSignature))]):
		if len(b) < 16 {
			return 0
		}
		n := 16 + int(b[14])<<8 + int(b[15])
		if n > maxHeader {
			return -1
		}
		return n
	case bytes.HasPrefix([]byte(line), b[:min(len(b), len(line))]):
		b = b[:min(len(b), maxLine)]
		if end := bytes.Index(b, []byte("\r\n")); end >= 0 {
			return end + 2
		}
		if len(b) < maxLine {
			return 0
		}
	}
	return -1
}

// hear waits for the header of s, takes it in, and brings s to the gates.
func (s *session) hear(now leaky.Time) {
	if !s.client.readable {
		return
	}
	b := s.proxy.loop.scratch[:maxHeader]
	n, _, err := unix.Recvfrom(s.client.fd, b, unix.MSG_PEEK|unix.MSG_DONTWAIT)
	if err == unix.EAGAIN {
		s.client.readable = false
		return
	}
	length := -1
	if err == nil && n > 0 {
		length = headerLength(b[:n])
	}
	if length >= 0 && length > n || length == 0 {
		if s.client.unsure { // no more is to come
			s.badHeader(now)
		}
		return
	}
	var header *proxyproto.Header
	if length > 0 {
		header, err = proxyproto.Read(bufio.NewReaderSize(bytes.NewReader(b[:length]), length))
	}
	if length < 0 || err != nil {
		s.badHeader(now)
		return
	}
	if _, errno := recv(s.client.fd, b[:length]); errno != 0 {
		s.abort(shaper.ResetByClient, now)
		return
	}
	if from, to, ok := header.TCPAddrs(); ok && !header.Command.IsLocal() {
		s.from, s.asked = unmapped(from.AddrPort()), unmapped(to.AddrPort())
		s.flow.Source = s.from.Addr()
	}
	s.proxy.loop.pacer.Cancel(&s.timer)
	s.stage = entering
	s.proxy.gates.enter(&s.entrant, now)
}

func (s *session) badHeader(now leaky.Time) {
	s.proxy.refused.note("no valid PROXY header", "listener", s.name, "source", s.flow.Source)
	s.abort(shaper.BadProxyHeader, now)
}

func unmapped(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

// announcement is the header that goes to the downstream of s before anything else, or nil.
func (s *session) announcement() ([]byte, error) {
	version := s.config.Load().SendProxy
	if version == 0 {
		return nil, nil
	}
	if !s.asked.IsValid() {
		s.asked = localAddr(s.client.fd)
	}
	return proxyproto.HeaderProxyFromAddrs(version, net.TCPAddrFromAddrPort(s.from), net.TCPAddrFromAddrPort(s.asked)).Format()
}

// announcement is the header before each datagram of f, or nil.
func (f *udpFlow) announcement() []byte {
	if f.site.config.Load().SendProxy == 0 {
		return nil
	}
	to := netip.AddrPortFrom(f.key.asked, f.flow.Port)
	if !f.key.asked.IsValid() {
		to = netip.AddrPortFrom(localAddr(f.key.port.fd).Addr(), f.flow.Port)
	}
	b, err := proxyproto.HeaderProxyFromAddrs(2, net.UDPAddrFromAddrPort(unmapped(f.key.client)), net.UDPAddrFromAddrPort(unmapped(to))).Format()
	if err != nil {
		return nil
	}
	return b
}

// localAddr is what a socket is bound to.
func localAddr(fd int) netip.AddrPort {
	e, _ := endpointOf(fd)
	return unmapped(e.Addr)
}
