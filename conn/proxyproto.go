// Owner: the loop's thread.

package conn

import (
	"bufio"
	"bytes"
	"net"
	"net/netip"

	proxyproto "github.com/pires/go-proxyproto"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// The PROXY protocol (haproxy.org/download/3.0/doc/proxy-protocol.txt): a proxy sends the
// client's addresses in a header before the first byte of the connection.

const (
	// maxHeader is the longest header accepted: version 2, with room for TLVs.
	maxHeader = 16 + 4096

	// maxHeaderV1 is the longest line of version 1.
	maxHeaderV1 = 107

	// headerTimeout is the time within which the header must arrive.
	headerTimeout = 5 * leaky.Second
)

var headerSignature = []byte("\r\n\r\n\x00\r\nQUIT\n")

// headerLength returns the length of the header at the start of b, 0 if more bytes are
// needed to determine it, or -1 if b does not begin with a header.
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
		b = b[:min(len(b), maxHeaderV1)]
		if end := bytes.Index(b, []byte("\r\n")); end >= 0 {
			return end + 2
		}
		if len(b) < maxHeaderV1 {
			return 0
		}
	}
	return -1
}

// readHeader consumes the PROXY header once it is complete, and then starts admission.
func (s *session) readHeader(now leaky.Time) {
	if !s.client.readable {
		return
	}
	b := s.proxy.loop.scratch[:maxHeader]
	n, errno := sock.Peek(s.client.fd, b)
	if errno == unix.EAGAIN {
		s.client.readable = false
		return
	}
	length := -1
	if errno == 0 && n > 0 {
		length = headerLength(b[:n])
	}
	if length >= 0 && length > n || length == 0 {
		if s.client.mustPoll { // the client has ended its stream
			s.rejectHeader(now)
		}
		return
	}
	var header *proxyproto.Header
	var err error
	if length > 0 {
		header, err = proxyproto.Read(bufio.NewReaderSize(bytes.NewReader(b[:length]), length))
	}
	if length < 0 || err != nil {
		s.rejectHeader(now)
		return
	}
	if _, errno := sock.Recv(s.client.fd, b[:length]); errno != 0 {
		s.abort(shaper.ResetByClient, now)
		return
	}
	if from, to, ok := header.TCPAddrs(); ok && !header.Command.IsLocal() {
		s.clientAddr, s.originalDst = sock.Unmap(from.AddrPort()), sock.Unmap(to.AddrPort())
		s.flow.Source, s.flow.Destination = s.clientAddr.Addr(), s.originalDst.Addr()
	}
	if !header.Command.IsLocal() {
		s.readTLVs(header)
	}
	s.proxy.loop.pacer.Cancel(&s.timer)
	s.stage = stageWaiting
	s.proxy.admission.acquire(&s.waiter, now)
}

// readTLVs takes over the values in a header; if they are malformed none.
func (s *session) readTLVs(header *proxyproto.Header) {
	list, err := header.TLVs()
	if err != nil {
		return
	}
	for _, v := range list[:min(len(list), shaper.MaxTLVs)] {
		s.flow.TLVs = append(s.flow.TLVs, s.proxy.shaper.NewTLV(uint8(v.Type), v.Value))
	}
}

func (s *session) rejectHeader(now leaky.Time) {
	s.proxy.trafficLog.warn("invalid PROXY header", "listener", s.name, "source", s.flow.Source)
	s.abort(shaper.BadProxyHeader, now)
}

// proxyHeader returns the header that is sent to the downstream before the first byte, or
// nil.
func (s *session) proxyHeader(now leaky.Time) ([]byte, error) {
	config := s.config.Load()
	version := config.SendProxy
	if version == shaper.NoProxy {
		return nil, nil
	}
	if !s.originalDst.IsValid() {
		s.originalDst = localAddr(s.client.fd)
	}
	header := proxyproto.HeaderProxyFromAddrs(byte(version), net.TCPAddrFromAddrPort(s.clientAddr), net.TCPAddrFromAddrPort(s.originalDst))
	if config.SendStanding {
		if err := header.SetTLVs(s.standingTLVs(now)); err != nil {
			return nil, err
		}
	}
	return header.Format()
}

// proxyHeader returns the header that is sent before each datagram of f, or nil.
func (f *udpFlow) proxyHeader() []byte {
	if f.listener.config.Load().SendProxy == shaper.NoProxy {
		return nil
	}
	to := netip.AddrPortFrom(f.key.local, f.flow.Port)
	if !f.key.local.IsValid() {
		to = netip.AddrPortFrom(localAddr(f.key.port.fd).Addr(), f.flow.Port)
	}
	b, err := proxyproto.HeaderProxyFromAddrs(2, net.UDPAddrFromAddrPort(sock.Unmap(f.key.client)), net.UDPAddrFromAddrPort(sock.Unmap(to))).Format()
	if err != nil {
		return nil
	}
	return b
}
