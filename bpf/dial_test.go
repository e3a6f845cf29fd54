package bpf

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/test/lab"
)

// host is a network namespace of a test, with a thread that never leaves it. It ends with
// the process.
type host struct {
	t    testing.TB
	jobs chan func()
}

func newHost(t testing.TB) *host {
	t.Helper()
	h := &host{t: t, jobs: make(chan func())}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // and the thread ends with the goroutine
		ready <- unix.Unshare(unix.CLONE_NEWNET)
		for job := range h.jobs {
			job()
		}
	}()
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { close(h.jobs) })
	return h
}

// do runs a function in the namespace.
func (h *host) do(f func() error) {
	h.t.Helper()
	done := make(chan error)
	h.jobs <- func() { done <- f() }
	if err := <-done; err != nil {
		h.t.Fatal(err)
	}
}

// spawn runs a function on a separate thread in the namespace.
func (h *host) spawn(f func()) {
	var ns int
	h.do(func() (err error) {
		ns, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	go func() {
		defer unix.Close(ns)
		runtime.LockOSThread()
		if err := unix.Setns(ns, unix.CLONE_NEWNET); err != nil {
			panic(err)
		}
		f()
	}()
}

// connect creates a veth pair from the test's namespace to h, with an address at both
// ends, and a default route in h.
func (h *host) connect(name, near, far string) netlink.Link {
	t := h.t
	t.Helper()
	var pid int
	h.do(func() error { pid = unix.Gettid(); return nil })
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "eth0", PeerNamespace: netlink.NsPid(pid)}
	if err := netlink.LinkAdd(pair); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(pair) })
	set := func(name, address string) error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(address)
		if err != nil {
			return err
		}
		a.Flags = unix.IFA_F_NODAD
		return errors.Join(netlink.AddrAdd(l, a), netlink.LinkSetUp(l))
	}
	if err := set(name, near); err != nil {
		t.Fatal(err)
	}
	h.do(func() error {
		if err := set("eth0", far); err != nil {
			return err
		}
		a, _ := netlink.ParseAddr(near)
		return errors.Join(netlink.RouteAdd(&netlink.Route{Gw: a.IP}), lab.AwaitUp(&netlink.Handle{}, "eth0"))
	})
	if err := lab.AwaitUp(&netlink.Handle{}, name); err != nil {
		t.Fatal(err)
	}
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// withoutOffload makes the kernel finish checksums before packets leave at l.
func withoutOffload(t testing.TB, l netlink.Link) {
	t.Helper()
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(s)
	value := struct{ cmd, data uint32 }{unix.ETHTOOL_STXCSUM, 0}
	var request struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}
	copy(request.name[:], l.Attrs().Name)
	request.data = unsafe.Pointer(&value)
	if _, _, err := unix.Syscall(unix.SYS_IOCTL, uintptr(s), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); err != 0 {
		t.Fatal(err)
	}
}

// countingServer counts simultaneous connections.
type countingServer struct {
	net.Listener
	current, max, total atomic.Int64
}

func (l *countingServer) serve() {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		n := l.current.Add(1)
		l.total.Add(1)
		for most := l.max.Load(); n > most && !l.max.CompareAndSwap(most, n); most = l.max.Load() {
		}
		go func() {
			_, _ = c.Read(make([]byte, 1))
			l.current.Add(-1)
			_ = c.Close()
		}()
	}
}

// TestCap_Dial connects 50 clients at once through a router with a cap of 5 connections: the
// others are refused at once, or time out.
func TestCap_Dial(t *testing.T) {
	for _, c := range []struct {
		name    string
		inside  bool // at the client's side of the router, at ingress; else at the server's, at egress
		local   bool // clients on the router itself
		xdp     bool
		offload bool
		silent  bool
		address netip.AddrPort
	}{
		{name: "ingress", inside: true, offload: true, address: netip.MustParseAddrPort("10.2.0.2:80")},
		{name: "ingress, checksums in software", inside: true, address: netip.MustParseAddrPort("10.2.0.2:80")},
		{name: "ingress, silent", inside: true, offload: true, silent: true, address: netip.MustParseAddrPort("10.2.0.2:80")},
		{name: "egress", offload: true, address: netip.MustParseAddrPort("10.2.0.2:80")},
		{name: "egress, checksums in software", address: netip.MustParseAddrPort("10.2.0.2:80")},
		{name: "egress, local", local: true, offload: true, address: netip.MustParseAddrPort("10.2.0.2:80")},
		{name: "XDP", inside: true, xdp: true, offload: true, address: netip.MustParseAddrPort("10.2.0.2:80")},
	} {
		t.Run(c.name, func(t *testing.T) {
			const most, clients = 5, 50
			from, to := newHost(t), newHost(t)
			inside := from.connect("inside", "10.1.0.1/24", "10.1.0.2/24")
			outside := to.connect("outside", "10.2.0.1/24", "10.2.0.2/24")
			if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
				t.Fatal(err)
			}
			if !c.offload {
				withoutOffload(t, inside)
				withoutOffload(t, outside)
			}

			at := kernelConfig{Mode: programModes[shaper.AttachPolice], Ethernet: 1, Keep: 1, IdleTimeout: testIdleTimeout}
			where := inside
			if !c.inside {
				at.Egress = 1
				where = outside
			}
			b := &tcpBench{t: t, bench: newVariant(t, at, map[string]any{
				kernelVarClosingTimeout: uint64(1200 * time.Millisecond), kernelVarHalfOpenTimeout: uint64(1200 * time.Millisecond),
				kernelVarSweepInterval: uint64(5 * time.Millisecond), kernelVarRecheckInterval: uint64(1200 * time.Millisecond),
			})}
			b.clearMaps()
			l := shaper.Limit{Name: "all", MaxConnections: most}
			if c.silent {
				l = dropSilently(l)
			}
			b.setLimits(l)
			b.attach(where, c.inside, c.xdp)

			server := &countingServer{}
			to.do(func() (err error) {
				server.Listener, err = net.Listen("tcp", c.address.String())
				return err
			})
			var served sync.WaitGroup
			served.Go(server.serve)
			t.Cleanup(func() { _ = server.Close(); served.Wait() })

			timeout := 10 * time.Second // for retransmitted SYNs: a busy machine loses some
			if c.silent {
				timeout = 1500 * time.Millisecond // longer than a stall; SYNs that are sent again meanwhile are refused too
			}
			var wg sync.WaitGroup
			var connected, refused, late, other atomic.Int64
			release := make(chan struct{})
			decided := make(chan struct{}, clients)
			for range clients {
				wg.Add(1)
				client := func() {
					defer wg.Done()
					conn, err := net.DialTimeout("tcp", c.address.String(), timeout)
					var timeout net.Error
					switch {
					case err == nil:
						connected.Add(1)
					case errors.Is(err, syscall.ECONNREFUSED):
						refused.Add(1)
					case errors.As(err, &timeout) && timeout.Timeout():
						late.Add(1)
					default:
						other.Add(1)
						t.Error(err)
					}
					decided <- struct{}{}
					if err == nil {
						<-release
						_ = conn.Close()
					}
				}
				if c.local {
					go client()
				} else {
					from.spawn(client)
				}
			}
			for range clients {
				<-decided
			}
			b.expectInFlight(most)
			close(release)
			wg.Wait()
			want := fmt.Sprint(most, clients-most, 0, 0)
			if c.silent {
				want = fmt.Sprint(most, 0, clients-most, 0)
			}
			if got := fmt.Sprint(connected.Load(), refused.Load(), late.Load(), other.Load()); got != want {
				t.Errorf("connected, refused, timed out, other: %s, want %s", got, want)
			}
			if n := server.max.Load(); n > most {
				t.Errorf("the server had %d at once", n)
			}
			// Sooner than by the timeouts of half-open and closing connections.
			end := time.Now().Add(time.Second)
			for b.counters().InFlight > 0 && time.Now().Before(end) {
				time.Sleep(time.Millisecond)
			}
			b.expectInFlight(0)
			b.eventually(0, 0)
		})
	}
}

// attach attaches the programs to an interface.
func (b *tcpBench) attach(l netlink.Link, ingress, xdp bool) {
	b.t.Helper()
	at := func(ingress bool, r attach.Role, program *ebpf.Program) {
		b.t.Helper()
		h, err := attach.Attach(attach.Options{At: attach.Point{Ifindex: l.Attrs().Index, Ingress: ingress}, Role: r, Program: program, Pin: filepath.Join(pins, fmt.Sprint("dial", r))})
		if err != nil {
			b.t.Fatal(err)
		}
		b.t.Cleanup(func() { _ = h.Detach() })
	}
	at(!ingress, attach.ReplyTracker, b.ShaperdReplies)
	if !xdp {
		at(ingress, attach.Limiter, b.ShaperdTc)
		return
	}
	// A veth's native XDP sends nothing back to a peer without XDP.
	h, err := link.AttachXDP(link.XDPOptions{Interface: l.Attrs().Index, Program: b.ShaperdXdp, Flags: link.XDPGenericMode})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = h.Close() })
}
