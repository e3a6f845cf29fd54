package bpf

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

// TestTrain_UnknownSegments runs a train without a segment count, as guests send them.
func TestTrain_UnknownSegments(t *testing.T) {
	t.Parallel()
	b := newTCP(t, shaper.AttachPolice, shaper.Limit{Name: "p", Packets: shaper.Frequency{N: 1000, Per: time.Second}, MaxDelay: time.Second})
	data := dial(testClient).nextSegment(client, ack, 1000)
	for _, counted := range []uint32{10, 0} {
		var out skb
		options := &ebpf.RunOptions{Data: data, DataOut: b.out[:], Context: skb{GSOSize: 100, GSOSegments: counted}, ContextOut: &out}
		if _, err := b.ShaperdTc.Run(options); err != nil {
			t.Fatal(err)
		}
		b.wantSegments(t, 10)
	}
}

func (b *bench) wantSegments(t *testing.T, want uint32) {
	t.Helper()
	var got uint32
	if err := b.TestSegments.Get(&got); err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("%d segments were counted, want %d", got, want)
	}
}

// TestTrain_FromTap sends a train through a tap, as a virtual machine does.
func TestTrain_FromTap(t *testing.T) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	req, err := unix.NewIfreq("guest0")
	if err != nil {
		t.Fatal(err)
	}
	req.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		t.Fatal(err)
	}
	l, err := netlink.LinkByName("guest0")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(l); err != nil {
		t.Fatal(err)
	}
	b := newTCP(t, shaper.AttachPolice, shaper.Limit{Name: "p", Packets: shaper.Frequency{N: 1000, Per: time.Second}, MaxDelay: time.Second})
	if err := b.TestNow.Set(b.now); err != nil {
		t.Fatal(err)
	}
	b.attach(l, true, false)
	header := []byte{1, 1} // struct virtio_net_hdr: NEEDS_CSUM, GSO_TCPV4
	for _, n := range []uint16{54, 1448, 34, 16} {
		header = binary.NativeEndian.AppendUint16(header, n)
	}
	if _, err := unix.Write(fd, append(header, dial(testClient).nextSegment(client, ack, 14480)...)); err != nil {
		t.Fatal(err)
	}
	within(t, 5*time.Second, func() bool {
		var counted uint32
		return b.TestSegments.Get(&counted) == nil && counted > 0
	})
	b.wantSegments(t, 10)
}
