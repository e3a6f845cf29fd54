package netns

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// A host is a network namespace.
type host struct {
	name    string
	ns      netns.NsHandle
	links   *netlink.Handle
	starts  chan func()
	started sync.WaitGroup
}

// newHost makes a namespace that lives until the test ends.
func newHost(t testing.TB, name string) *host {
	t.Helper()
	h := &host{name: name, ns: netns.None(), starts: make(chan func())}
	t.Cleanup(h.remove)

	var err error
	runtime.LockOSThread()
	h.ns, err = netns.NewNamed(name)
	if back := netns.Set(home); back != nil {
		panic(fmt.Sprintf("return to own namespace: %v", back))
	}
	runtime.UnlockOSThread()
	if err != nil {
		t.Fatalf("make namespace %s: %v", name, err)
	}
	if h.links, err = netlink.NewHandleAt(h.ns); err != nil {
		t.Fatalf("open netlink in %s: %v", name, err)
	}
	h.started.Go(h.launch)

	h.sysctl(t, "net/ipv6/conf/all/accept_dad", "0")
	h.sysctl(t, "net/ipv6/conf/default/accept_dad", "0")
	// BBR paces what it sends, and would smooth what the daemon does not.
	h.sysctl(t, "net/ipv4/tcp_congestion_control", plainCongestionControl(t, h))
	lo, err := h.links.LinkByName("lo")
	if err != nil {
		t.Fatalf("find lo in %s: %v", name, err)
	}
	if err := h.links.LinkSetUp(lo); err != nil {
		t.Fatalf("set lo up in %s: %v", name, err)
	}
	return h
}

func (h *host) remove() {
	close(h.starts)
	h.started.Wait()
	if h.links != nil {
		h.links.Close()
	}
	if h.ns.IsOpen() {
		h.ns.Close()
		// What is left behind here, the next run removes.
		_ = netns.DeleteNamed(h.name)
	}
}

// do runs fn inside the host. Sockets that fn opens stay there.
func (h *host) do(fn func()) {
	runtime.LockOSThread()
	h.enter()
	defer func() {
		if err := netns.Set(home); err != nil {
			panic(fmt.Sprintf("return to own namespace: %v", err))
		}
		runtime.UnlockOSThread()
	}()
	fn()
}

func (h *host) enter() {
	if err := netns.Set(h.ns); err != nil {
		panic(fmt.Sprintf("enter namespace %s: %v", h.name, err))
	}
}

// launch starts the host's processes, all from one thread that lives as long as
// the host, because the kernel ends them when the thread that started them ends.
// So they never outlive the test, however it ends. The thread stays locked: it
// ends with this goroutine.
func (h *host) launch() {
	runtime.LockOSThread()
	h.enter()
	for start := range h.starts {
		start()
	}
}

// start starts cmd inside the host.
func (h *host) start(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	done := make(chan error)
	h.starts <- func() { done <- cmd.Start() }
	return <-done
}

func (h *host) sysctl(t testing.TB, name, value string) {
	t.Helper()
	var err error
	h.do(func() { err = os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0) })
	if err != nil {
		t.Fatalf("set %s in %s: %v", name, h.name, err)
	}
}

func plainCongestionControl(t testing.TB, h *host) string {
	t.Helper()
	var names []byte
	var err error
	h.do(func() { names, err = os.ReadFile("/proc/sys/net/ipv4/tcp_allowed_congestion_control") })
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(names), "cubic") {
		return "cubic"
	}
	return "reno"
}

// listenTCP listens at the address at inside the host until the test ends.
func (h *host) listenTCP(t testing.TB, at netip.AddrPort) *net.TCPListener {
	t.Helper()
	var l net.Listener
	var err error
	config := net.ListenConfig{}
	config.SetMultipathTCP(false)
	h.do(func() { l, err = config.Listen(context.Background(), "tcp", at.String()) })
	if err != nil {
		t.Fatalf("listen in %s: %v", h.name, err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

// dialTCP connects from the address from inside the host. The caller closes.
func (h *host) dialTCP(from netip.Addr, to netip.AddrPort) (*net.TCPConn, error) {
	var c net.Conn
	var err error
	d := net.Dialer{
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)),
		Timeout:   5 * time.Second,
	}
	h.do(func() { c, err = d.Dial("tcp", to.String()) })
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// mustDial is dialTCP for the test's own goroutine. It closes when the test ends.
func (h *host) mustDial(t testing.TB, from netip.Addr, to netip.AddrPort) *net.TCPConn {
	t.Helper()
	c, err := h.dialTCP(from, to)
	if err != nil {
		t.Fatalf("dial from %s: %v", h.name, err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// listenUDP opens a datagram socket at the address at inside the host until the
// test ends.
func (h *host) listenUDP(t testing.TB, at netip.AddrPort) *net.UDPConn {
	t.Helper()
	var c *net.UDPConn
	var err error
	h.do(func() { c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at)) })
	if err != nil {
		t.Fatalf("listen in %s: %v", h.name, err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}
