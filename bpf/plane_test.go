package bpf

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// wire is two ends of a veth pair, on which frames are sent and counted as they are.
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
		if err := netlink.LinkSetUp(l); err != nil {
			t.Fatal(err)
		}
		*at = l
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

// exchange is send, and has patience until as many have arrived as are expected.
func (w *wire) exchange(source byte, n, expected int) int {
	w.t.Helper()
	frame := datagram(source)
	for range n {
		// A drop at egress comes back as ENOBUFS.
		if _, err := unix.Write(w.out, frame); err != nil && !errors.Is(err, unix.ENOBUFS) {
			w.t.Fatal(err)
		}
	}
	arrived := 0
	buf := make([]byte, 2048)
	poll := []unix.PollFd{{Fd: int32(w.in), Events: unix.POLLIN}}
	for {
		patience := 50 // ms
		if arrived < expected {
			patience = 2000
		}
		if _, err := unix.Poll(poll, patience); err != nil && !errors.Is(err, unix.EINTR) {
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

// datagram is 100 bytes of UDP from 10.0.0.source to port 53.
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

// hasTCX reports whether the kernel is from after 6.6, by its version.
func hasTCX(t *testing.T) bool {
	t.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	return major > 6 || major == 6 && minor >= 6
}

// hooks are those that the kernel has.
func hooks(t *testing.T) []Hook {
	if hasTCX(t) {
		return []Hook{TCX, Clsact, XDP}
	}
	return []Hook{Clsact, XDP}
}

// tenAnHour lets ten datagrams of each source pass, and the next one in 6 minutes.
func tenAnHour(attachment string) shaper.Limit {
	return shaper.Limit{
		Name: "ten", Match: shaper.Match{Attach: []string{attachment}},
		Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
		Packets: shaper.Frequency{N: 10, Per: time.Hour}, BurstPackets: 9,
	}
}

// testPlane is a plane with pins of the test's own.
type testPlane struct {
	*Plane
	t         *testing.T
	shaper    *shaper.Shaper
	clock     *leaky.Clock
	pins      string
	keys      int
	listeners []netip.AddrPort
	logged    syncBuffer
}

// syncBuffer is a buffer for several goroutines.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func openPlane(t *testing.T) *testPlane {
	t.Helper()
	p := &testPlane{t: t, keys: 1024, pins: filepath.Join(pins, strings.NewReplacer("/", "-", ".", "-").Replace(t.Name()))}
	p.open()
	t.Cleanup(func() {
		if p.Plane != nil {
			_ = p.Close()
		}
	})
	return p
}

func (p *testPlane) open() {
	p.t.Helper()
	p.shaper, p.clock = shaper.New(1024), leaky.NewClock()
	plane, err := Open(p.shaper, p.clock, p.pins, p.keys, slog.New(slog.NewTextHandler(io.MultiWriter(p.t.Output(), &p.logged), nil)))
	if err != nil {
		p.t.Fatal(err)
	}
	p.Plane = plane
}

func (p *testPlane) apply(limits []shaper.Limit, attachments ...Attachment) {
	p.t.Helper()
	if err := p.tryApply(limits, attachments...); err != nil {
		p.t.Fatal(err)
	}
}

func (p *testPlane) tryApply(limits []shaper.Limit, attachments ...Attachment) error {
	var names []shaper.Attachment
	for _, a := range attachments {
		names = append(names, shaper.Attachment{Name: a.Name})
	}
	policy, err := p.shaper.Compile(limits, nil, names, nil, false)
	if err != nil {
		return err
	}
	c, err := p.Prepare(attachments, p.listeners, policy)
	if err != nil {
		return err
	}
	return c.Commit()
}

// TestCommitUnsaved puts a policy in force that the registry has no room for: it is in
// force, and the fault is shown.
func TestCommitUnsaved(t *testing.T) {
	p := openPlane(t)
	here := Attachment{Name: "here", Interfaces: []string{"elsewhere0"}, Mode: Police}
	a, b := shaper.Limit{Name: "a", Packets: perSecond(1)}, shaper.Limit{Name: "b", Packets: perSecond(1)}
	p.apply(attached(a), here)
	text, err := json.Marshal(p.kernel.registry)
	if err != nil {
		t.Fatal(err)
	}
	filler, err := json.Marshal(&knownLimit{Number: 99})
	if err != nil {
		t.Fatal(err)
	}
	room := int(registrySpec.ValueSize) - len(text) - len(filler) - 40 // less than a limit takes
	p.kernel.Limits[strings.Repeat("x", room)] = &knownLimit{Number: 99}
	p.apply(attached(a, b), here)
	if p.policy.Len() != 2 || p.faults["registry"] == "" {
		t.Errorf("%d limits are in force, and the registry's fault is %q", p.policy.Len(), p.faults["registry"])
	}
}

// crash ends the plane as a killed daemon would.
func (p *testPlane) crash() {
	p.Release()
}

func (w *wire) want(p *testPlane, source byte, n, want int) {
	w.t.Helper()
	if got := w.exchange(source, n, want); got != want {
		w.t.Errorf("%d of %d datagrams arrived, want %d", got, n, want)
	}
}

func TestPolice(t *testing.T) {
	for _, c := range []struct {
		hook    Hook
		ingress bool
	}{{Auto, false}, {Auto, true}, {TCX, false}, {TCX, true}, {Clsact, false}, {Clsact, true}, {XDP, true}} {
		t.Run(c.hook.String()+" "+way(c.ingress), func(t *testing.T) {
			w := newWire(t, "police")
			p := openPlane(t)
			if c.hook == TCX && !hasTCX(t) {
				err := p.tryApply(nil, Attachment{Name: "here", Interfaces: []string{"police0"}, Mode: Police, Hook: TCX})
				if !errors.Is(err, ebpf.ErrNotSupported) {
					t.Fatalf("%v, want that it is not supported", err)
				}
				return
			}
			a := Attachment{Name: "here", Interfaces: []string{"police0"}, Ingress: c.ingress, Mode: Police, Hook: c.hook}
			if c.ingress {
				a.Interfaces = []string{"police1"}
			}
			w.want(p, 1, 50, 50)
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 50, 10)
			w.want(p, 2, 50, 10)
			w.want(p, 1, 50, 0)
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			p.Plane = nil
			w.want(p, 1, 50, 50)
			if left, err := os.ReadDir(p.pins); err == nil && len(left) > 0 {
				t.Errorf("pins are left: %v", left)
			}
		})
	}
}

// A table that is too small is said to be so, soon.
func TestNoRoomForBuckets(t *testing.T) {
	w := newWire(t, "full")
	p := &testPlane{t: t, keys: 4, pins: filepath.Join(pins, "NoRoomForBuckets")}
	p.open()
	t.Cleanup(func() { _ = p.Close() })
	p.apply([]shaper.Limit{tenAnHour("here")}, Attachment{Name: "here", Interfaces: []string{"full0"}, Mode: Police})
	for source := range byte(40) {
		w.send(1+source, 20)
	}
	within(t, 15*time.Second, func() bool { return strings.Contains(p.logged.String(), `raise \"buckets\"`) })
	if s, err := p.Status(); err != nil || s.Buckets.EvictedIndebted == 0 {
		t.Errorf("%+v, %v", s, err)
	}
}

// What a daemon leaves goes on, or passes everything, and the next one takes over
// with every bucket.
func TestDaemonKilled(t *testing.T) {
	for _, hook := range hooks(t) {
		t.Run(hook.String(), func(t *testing.T) {
			w := newWire(t, "killed")
			p := openPlane(t)
			a := Attachment{Name: "here", Interfaces: []string{"killed1"}, Ingress: true, Mode: Police, Hook: hook, Keep: true}
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 20, 10)
			p.crash()
			w.want(p, 1, 20, 0)
			w.want(p, 2, 20, 10)
			p.open()
			w.want(p, 2, 20, 0)
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 20, 0)
			w.want(p, 3, 20, 10)

			a.Keep = false
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 20, 0)
			p.crash()
			w.want(p, 1, 20, 0)
			stale(t, p)
			w.want(p, 1, 20, 20)
			if err := Detach(p.pins); err != nil {
				t.Fatal(err)
			}
			p.Plane = nil
			w.want(p, 1, 20, 20)
			assertNothing(t, w.to, p.pins)
		})
	}
}

// stale makes the last heartbeat an old one.
func stale(t *testing.T, p *testPlane) {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(folder(p.pins, 1024), kernelMapHeartbeats), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := m.Put(uint32(0), uint64(1)); err != nil {
		t.Fatal(err)
	}
	within(t, 10*time.Second, func() bool { return monotonic() > 6*leaky.Second }) // for a host that has just booted
}

// assertNothing asserts that no trace is left. The kernel lets go of what was pinned a
// moment after its file is gone.
func assertNothing(t *testing.T, l netlink.Link, pins string) {
	t.Helper()
	if _, err := os.Stat(pins); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pins are left: %v", err)
	}
	left := leftAt(t, l)
	for end := time.Now().Add(10 * time.Second); len(left) > 0 && time.Now().Before(end); left = leftAt(t, l) {
		time.Sleep(10 * time.Millisecond)
	}
	if len(left) > 0 {
		t.Errorf("at %s are left: %v", l.Attrs().Name, left)
	}
}

// leftAt lists the programs and filters at an interface.
func leftAt(t *testing.T, l netlink.Link) (left []string) {
	t.Helper()
	for _, kind := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress, ebpf.AttachXDP} {
		q, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: kind})
		if err == nil && len(q.Programs) > 0 {
			left = append(left, kind.String())
		}
	}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		if filters, err := netlink.FilterList(l, parent); err == nil && len(filters) > 0 {
			left = append(left, fmt.Sprint(filters))
		}
	}
	now, err := netlink.LinkByIndex(l.Attrs().Index)
	if err != nil {
		t.Fatal(err)
	}
	if now.Attrs().Xdp != nil && now.Attrs().Xdp.Attached {
		left = append(left, "XDP")
	}
	return left
}

// What is taken away, or comes back, is found soon.
func TestMended(t *testing.T) {
	for _, hook := range hooks(t) {
		t.Run(hook.String(), func(t *testing.T) {
			w := newWire(t, "mend")
			p := openPlane(t)
			a := Attachment{Name: "here", Interfaces: []string{"mend*"}, Ingress: true, Mode: Police, Hook: hook}
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 20, 10)
			takeAway(t, w.to, hook)
			w.want(p, 1, 20, 20)
			within(t, 15*time.Second, func() bool { return w.send(1, 20) == 0 })

			if err := netlink.LinkDel(w.from); err != nil {
				t.Fatal(err)
			}
			again := newWire(t, "mend")
			within(t, 15*time.Second, func() bool { return again.send(1, 20) == 0 })
		})
	}
}

// takeAway removes the program from an interface as another tool would.
func takeAway(t *testing.T, l netlink.Link, hook Hook) {
	t.Helper()
	switch hook {
	case Clsact:
		if err := netlink.QdiscDel(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
		}}); err != nil {
			t.Fatal(err)
		}
	default:
		it := new(link.Iterator)
		defer it.Close()
		for it.Next() {
			raw, ok := it.Take().(interface {
				Info() (*link.Info, error)
				Detach() error
			})
			if !ok {
				t.Fatal("this link cannot be detached")
			}
			info, err := raw.Info()
			if err != nil {
				t.Fatal(err)
			}
			tcx, xdp := info.TCX(), info.XDP()
			if tcx != nil && tcx.Ifindex == uint32(l.Attrs().Index) || xdp != nil && xdp.Ifindex == uint32(l.Attrs().Index) {
				if err := raw.Detach(); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
}

func within(t *testing.T, limit time.Duration, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("not within %v", limit)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// A changed rate keeps the backlog in packets.
func TestReloadKeepsBacklog(t *testing.T) {
	w := newWire(t, "reload")
	p := openPlane(t)
	a := Attachment{Name: "here", Interfaces: []string{"reload1"}, Ingress: true, Mode: Police}
	l := tenAnHour("here")
	p.apply([]shaper.Limit{l}, a)
	w.want(p, 1, 5, 5)
	l.Packets.N = 20 // nine in hand at the old rate are nine in hand at the new one
	p.apply([]shaper.Limit{l}, a)
	w.want(p, 1, 20, 5)
	l.Name = "another" // is a limit of its own
	p.apply([]shaper.Limit{l}, a)
	w.want(p, 1, 20, 10)
	l.Name = "ten"
	p.apply([]shaper.Limit{l}, a)
	w.want(p, 1, 20, 0)
}

// A daemon with a table of another size takes over what is attached, and leaves
// nothing of the old one.
func TestAnotherSize(t *testing.T) {
	for _, hook := range hooks(t) {
		t.Run(hook.String(), func(t *testing.T) {
			w := newWire(t, "size")
			p := openPlane(t)
			a := Attachment{Name: "here", Interfaces: []string{"size1"}, Ingress: true, Mode: Police, Hook: hook, Keep: true}
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 20, 10)
			p.crash()
			p.keys = 4096
			p.open()
			w.want(p, 1, 20, 0) // of the old table still
			p.apply([]shaper.Limit{tenAnHour("here")}, a)
			w.want(p, 1, 20, 10)
			if folders, err := filepath.Glob(filepath.Join(p.pins, "*")); err != nil || len(folders) != 1 {
				t.Errorf("%v, %v: want one folder", folders, err)
			}
			p.crash()
			w.want(p, 1, 20, 0)
			if err := Detach(p.pins); err != nil {
				t.Fatal(err)
			}
			p.Plane = nil
			assertNothing(t, w.to, p.pins)
		})
	}
}
