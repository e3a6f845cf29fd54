//go:build vmguest

package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/test/lab"
)

// line is a veth pair to another host.
type line struct {
	t        *testing.T
	from     netlink.Link
	out, in  int
	expected int // payload of each frame, bytes
}

const linePayload = 1450

func newLine(t *testing.T, name string, ingress bool) *line {
	t.Helper()
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "peer0"}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(veth) })
	l := &line{t: t, expected: linePayload}
	var err error
	if l.from, err = netlink.LinkByName(name); err != nil {
		t.Fatal(err)
	}
	far := newFarHost(t)
	peer, err := netlink.LinkByName("peer0")
	if err == nil {
		err = netlink.LinkSetNsFd(peer, far.fd)
	}
	if err := errors.Join(err, netlink.LinkSetUp(l.from)); err != nil {
		t.Fatal(err)
	}
	near, away := 0, 0
	far.do(func() {
		if peer, err = netlink.LinkByName("peer0"); err == nil {
			err = errors.Join(netlink.LinkSetUp(peer), lab.AwaitUp(&netlink.Handle{}, "peer0"))
		}
		away = packetSocket(t, peer, unix.ETH_P_IP)
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := lab.AwaitUp(&netlink.Handle{}, name); err != nil {
		t.Fatal(err)
	}
	near = packetSocket(t, l.from, unix.ETH_P_IP)
	l.out, l.in = near, away
	if ingress {
		l.out, l.in = away, near
	}
	for _, s := range []int{near, away} {
		if err := errors.Join(
			unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1),
			unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20),
			unix.SetsockoptInt(s, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 512<<20),
		); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(100 * time.Millisecond)
	return l
}

// arrival is a received frame.
type arrival struct {
	at     time.Duration
	source byte
	ce     bool
}

// offer sends frames of a source every interval for a while.
func (l *line) offer(source byte, interval, span time.Duration, ecn byte) (sent int) {
	frame := make([]byte, 14+20+8+l.expected)
	copy(frame, datagram(source))
	binary.BigEndian.PutUint16(frame[16:], uint16(len(frame)-14))
	binary.BigEndian.PutUint16(frame[38:], uint16(8+l.expected))
	frame[15] = ecn
	headerSum(frame[14:34])
	start := time.Now()
	for {
		due := int(time.Since(start)/interval) + 1
		if time.Since(start) > span {
			return sent
		}
		for ; sent < due; sent++ {
			if _, err := unix.Write(l.out, frame); err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EAGAIN) {
				l.t.Error(err)
				return sent
			}
		}
		time.Sleep(interval)
	}
}

func headerSum(header []byte) {
	header[10], header[11] = 0, 0
	var sum uint32
	for i := 0; i < len(header); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(header[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(header[10:], ^uint16(sum))
}

// collect reads frames until none arrives for a while after stop.
func (l *line) collect(stop <-chan struct{}) (all []arrival) {
	buf, oob := make([]byte, 2048), make([]byte, 256)
	poll := []unix.PollFd{{Fd: int32(l.in), Events: unix.POLLIN}}
	for {
		n, oobn, _, from, err := unix.Recvmsg(l.in, buf, oob, 0)
		if errors.Is(err, unix.EAGAIN) {
			if ready, _ := unix.Poll(poll, 500); ready == 0 {
				select {
				case <-stop:
					return all
				default:
				}
			}
			continue
		}
		if err != nil {
			l.t.Error(err)
			return all
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); !ok || ll.Pkttype == unix.PACKET_OUTGOING || n != 42+l.expected {
			continue
		}
		messages, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil || len(messages) == 0 {
			l.t.Fatalf("no time stamp: %v", err)
		}
		ts := (*unix.Timespec)(unsafe.Pointer(&messages[0].Data[0]))
		all = append(all, arrival{time.Duration(ts.Nano()), buf[29], buf[15]&3 == 3})
	}
}

// measure runs senders and returns the arrivals by source.
func (l *line) measure(senders ...func()) map[byte][]arrival {
	stop, done := make(chan struct{}), make(chan []arrival)
	go func() { done <- l.collect(stop) }()
	ended := make(chan struct{})
	for _, s := range senders {
		go func() { s(); ended <- struct{}{} }()
	}
	for range senders {
		<-ended
	}
	close(stop)
	by := map[byte][]arrival{}
	for _, a := range <-done {
		by[a.source] = append(by[a.source], a)
	}
	return by
}

// rateOf returns the mean rate in units/s, and sigma: the largest excess over that
// rate in any interval, in units.
func rateOf(all []arrival, nominal float64) (mean, sigma float64) {
	span := all[len(all)-1].at - all[0].at
	mean = float64(len(all)-1) / span.Seconds()
	low := 0.0
	for i, a := range all {
		level := float64(i) - nominal*(a.at-all[0].at).Seconds()
		low = min(low, level)
		sigma = max(sigma, level+1-low)
	}
	return mean, sigma
}

func TestVMShape(t *testing.T) {
	for _, ingress := range []bool{false, true} {
		for _, mbits := range []uint64{10, 100} {
			t.Run(fmt.Sprintf("%s %d Mbit/s", direction(ingress), mbits), func(t *testing.T) {
				l := newLine(t, "shape0", ingress)
				p := openPlane(t)
				a := shaper.Attachment{Name: "here", Interfaces: []string{"shape0"}, Direction: direction(ingress), Mode: shaper.AttachShape, Queue: 100_000}
				p.apply([]shaper.Limit{{
					Name: "l", Match: shaper.Match{Attach: []string{"here"}}, Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
					Rate: mbits * 1e6, MaxDelay: 50 * time.Millisecond,
				}}, a)
				nominal := float64(mbits) * 1e6 / 8 / linePayload
				interval := time.Duration(float64(time.Second) / nominal)
				by := l.measure(
					func() { l.offer(1, interval/2, 2*time.Second, 0) },
					func() { l.offer(2, interval*2, 2*time.Second, 0) },
				)
				if len(by[1]) < 100 || len(by[2]) < 100 {
					t.Fatalf("%d and %d packets arrived", len(by[1]), len(by[2]))
				}
				mean, sigma := rateOf(by[1], nominal)
				t.Logf("%d packets: %+.3f %% of the rate, sigma %.2f", len(by[1]), (mean/nominal-1)*100, sigma)
				other, _ := rateOf(by[2], nominal)
				t.Logf("the other source, within its rate: %.1f of %.1f a second", other, nominal/2)
				// Never faster. How much slower depends on the load of the host, as the
				// guest's emulation is slow. The other source, which is not delayed, shows
				// how much gets through.
				least := 0.7 * nominal * min(1, other/(nominal/2))
				if mbits == 100 {
					least *= 0.5 // at higher rates more packets are late
				}
				if mean > nominal*1.02 || mean < least {
					t.Errorf("%.1f packets a second, want %.1f, and no less than %.1f", mean, nominal, least)
				}
				if sigma > 0.3*nominal {
					t.Errorf("sigma is %.1f packets, more than a stall of 300 ms explains", sigma)
				}
			})
		}
	}
}
