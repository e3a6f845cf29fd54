package bpf

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

// acknowledging adds n to a segment's acknowledgment number. A wrong checksum stays wrong, and an
// offloaded one stays unchanged.
func acknowledging(tcp []byte, n uint32, unsummed bool) {
	was := binary.BigEndian.Uint32(tcp[8:])
	is := was + n
	binary.BigEndian.PutUint32(tcp[8:], is)
	if unsummed {
		return
	}
	sum := uint32(^binary.BigEndian.Uint16(tcp[16:])) + ^was>>16 + ^was&0xffff + is>>16 + is&0xffff
	binary.BigEndian.PutUint16(tcp[16:], ^fold16(sum))
}

func fold16(sum uint32) uint16 {
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}

// readReplies reads the replies, and records the receiver's initial sequence numbers.
func (e *escape) readReplies() {
	var buf [4096]byte
	for {
		n, err := unix.Read(e.tap, buf[:])
		if err != nil {
			return
		}
		p := buf[vnetHeader:max(n, vnetHeader)]
		if e.gate.bare {
			continue // no test counts connections there
		}
		at := 0
		switch {
		case len(p) >= 54 && p[12] == 0x08 && p[13] == 0 && p[23] == ipTCP:
			at = 34
		case len(p) >= 74 && p[12] == 0x86 && p[20] == ipTCP:
			at = 54
		default:
			continue
		}
		if p[at+13]&(syn|ack) == syn|ack {
			e.isn[binary.BigEndian.Uint16(p[at+2:])] = binary.BigEndian.Uint32(p[at+4:]) + 1
		}
	}
}

// settle waits until all packets have arrived or were dropped: it sends a marker after
// them and waits for it.
func (e *escape) settle() {
	e.passes++
	mark := binary.BigEndian.AppendUint64(nil, e.passes)
	source := netip.AddrFrom4([4]byte{10, 1, 255, 1})
	b := builder{source: source, to: escapeTo4}
	frame := b.frame(b.packet(ipUDP, udpDatagram(markPort, markPort, mark)))
	poll := []unix.PollFd{{Fd: int32(e.marker), Events: unix.POLLIN}}
	for range 100 {
		e.write(append(make([]byte, vnetHeader), frame...))
		for {
			var buf [64]byte
			n, _, err := unix.Recvfrom(e.marker, buf[:], 0)
			if err == nil && string(buf[:n]) == string(mark) {
				return
			}
			if errors.Is(err, unix.EAGAIN) {
				if n, _ := unix.Poll(poll, 100); n == 0 {
					break
				}
			}
		}
	}
	e.t.Fatal("no marker arrives")
}

func (e *escape) accept() {
	for i, s := range e.listen {
		for {
			fd, from, err := unix.Accept4(s, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			if err != nil {
				break
			}
			c := &accepted{fd: fd, from: addrPort(from), port: []uint16{escapePort, otherPort}[i], to: escapeTo4}
			if !c.from.Addr().Is4() {
				c.to = escapeTo6
			}
			e.conns = append(e.conns, c)
			e.accepted++
		}
	}
}

func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// receive empties all sockets.
func (e *escape) receive() {
	e.accept()
	for _, c := range e.conns {
		for {
			n, err := unix.Read(c.fd, e.buf)
			if n <= 0 || err != nil {
				break
			}
			e.add(got{delivery{shaper.TCP, c.from.Addr(), c.port, uint64(n)}, false}, false)
		}
	}
	for i, s := range e.datagram {
		for {
			n, from, err := unix.Recvfrom(s, e.buf, 0)
			if err != nil {
				break
			}
			source := addrPort(from).Addr()
			if ofRouter(source) {
				continue
			}
			if i < 2 {
				e.add(got{delivery{shaper.UDP, source, []uint16{escapePort, otherPort}[i], uint64(n)}, false}, true)
				continue
			}
			p := e.buf[:n]
			protocol := []byte{ipUDP, ipICMP, ipSCTP, ipUnknown}[(i-2)%4]
			if source.Is4() {
				p = p[int(p[0]&0xf)*4:]
			}
			d := delivery{source: source, bytes: uint64(len(p))}
			switch protocol {
			case ipICMP:
				d.protocol = shaper.ICMP
			case ipUDP:
				if len(p) < 8 {
					continue
				}
				d.protocol, d.port, d.bytes = shaper.UDP, binary.BigEndian.Uint16(p[2:]), uint64(len(p)-8)
				if d.port == markPort {
					continue
				}
			}
			e.add(got{d, true}, true)
		}
	}
}

// ofRouter reports whether an address is the router's, which sends neighbor solicitations and errors.
func ofRouter(a netip.Addr) bool {
	return a.IsLinkLocalUnicast() || slices.Contains(routerAddrs, a)
}

func (e *escape) add(g got, datagram bool) {
	e.got = append(e.got, g)
	e.bytes += g.bytes
	if datagram {
		e.received++
	}
}
