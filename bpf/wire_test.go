package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// wire is a veth pair on which raw frames are sent and counted. It has no others: it has no IPv6, of which the kernel
// would send some.
type wire struct {
	t        *testing.T
	from, to netlink.Link
	out, in  int // packet sockets
}

func newWire(t *testing.T, name string) *wire {
	t.Helper()
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name + "0"}, PeerName: name + "1"}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(veth) })
	w := &wire{t: t}
	for i, at := range []*netlink.Link{&w.from, &w.to} {
		l, err := netlink.LinkByName(fmt.Sprint(name, i))
		if err != nil {
			t.Fatal(err)
		}
		withoutIPv6 := filepath.Join("/proc/sys/net/ipv6/conf", l.Attrs().Name, "disable_ipv6")
		if err := errors.Join(os.WriteFile(withoutIPv6, []byte("1"), 0), netlink.LinkSetUp(l)); err != nil {
			t.Fatal(err)
		}
		*at = l
	}
	for i := range 2 {
		if err := lab.AwaitUp(&netlink.Handle{}, fmt.Sprint(name, i)); err != nil {
			t.Fatal(err)
		}
	}
	w.out, w.in = packetSocket(t, w.from, 0), packetSocket(t, w.to, unix.ETH_P_IP)
	return w
}

func packetSocket(t *testing.T, l netlink.Link, protocol uint16) int {
	t.Helper()
	protocol = protocol<<8 | protocol>>8
	s, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK, int(protocol))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(s) })
	if err := unix.Bind(s, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: l.Attrs().Index}); err != nil {
		t.Fatal(err)
	}
	return s
}

// send sends n datagrams of a source and returns how many arrive.
func (w *wire) send(source byte, n int) int { return w.exchange(source, n, 0) }

// exchange is send with a longer timeout until the expected number has arrived.
func (w *wire) exchange(source byte, n, expected int) int {
	w.t.Helper()
	frame := datagram(source)
	for range n {
		// A drop at egress returns ENOBUFS.
		if _, err := unix.Write(w.out, frame); err != nil && !errors.Is(err, unix.ENOBUFS) {
			w.t.Fatal(err)
		}
	}
	arrived := 0
	buf := make([]byte, 2048)
	poll := []unix.PollFd{{Fd: int32(w.in), Events: unix.POLLIN}}
	for {
		timeout := 50 // ms
		if arrived < expected {
			timeout = 2000
		}
		switch _, err := unix.Poll(poll, timeout); {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			w.t.Fatal(err)
		}
		got, from, err := unix.Recvfrom(w.in, buf, 0)
		if errors.Is(err, unix.EAGAIN) {
			return arrived
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype != unix.PACKET_OUTGOING && got == len(frame) && buf[29] == source {
			arrived++
		}
	}
}

// datagram returns a UDP datagram of 100 bytes from 10.0.0.source to port 53.
func datagram(source byte) []byte {
	b := make([]byte, 14+20+8+100)
	copy(b, net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	b[12] = 0x08
	b[14], b[22], b[23] = 0x45, 64, ipUDP
	binary.BigEndian.PutUint16(b[16:], uint16(len(b)-14))
	copy(b[26:], []byte{10, 0, 0, source, 10, 0, 0, 99})
	binary.BigEndian.PutUint16(b[34:], 1234)
	binary.BigEndian.PutUint16(b[36:], 53)
	binary.BigEndian.PutUint16(b[38:], 108)
	return b
}

func (w *wire) want(p *testPlane, source byte, n, want int) {
	w.t.Helper()
	if got := w.exchange(source, n, want); got != want {
		w.t.Errorf("%d of %d datagrams arrived, want %d", got, n, want)
	}
}
