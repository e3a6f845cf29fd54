package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// prefix begins the name of every namespace and temporary folder, followed by the process that made it.
const prefix = "shaperd-demo-"

// Addresses. The client host has one address in a /24 of its own for each source.
var (
	proxyAddr      = netip.MustParseAddr("10.1.0.1") // of the shaper, on the client's side
	innerAddr      = netip.MustParseAddr("10.2.0.1") // of the shaper, on the downstream's side
	downstreamAddr = netip.MustParseAddr("10.2.0.5")
)

const (
	port           = 2775 // TCP and UDP
	downstreamLink = "in"
)

// A host is a network namespace.
type host struct {
	name   string
	home   netns.NsHandle // where this program was started
	ns     netns.NsHandle
	links  *netlink.Handle
	starts chan func()
	ended  chan struct{}
}

// A network is three hosts in a row: client, shaper, downstream.
type network struct{ client, shaper, downstream *host }

// newNetwork makes the three hosts and joins them. What it made, remove removes,
// even after an error.
func newNetwork() (n *network, err error) {
	n = &network{}
	for _, h := range []struct {
		role string
		to   **host
	}{{"client", &n.client}, {"shaper", &n.shaper}, {"downstream", &n.downstream}} {
		if *h.to, err = newHost(fmt.Sprintf("%s%d-%s", prefix, os.Getpid(), h.role)); err != nil {
			n.remove()
			return nil, err
		}
	}
	if err := n.wire(); err != nil {
		n.remove()
		return nil, err
	}
	return n, nil
}

func (n *network) remove() {
	for _, h := range []*host{n.client, n.shaper, n.downstream} {
		if h != nil {
			h.remove()
		}
	}
}

func (n *network) wire() error {
	clientAddrs := make([]netip.Addr, len(sources))
	for i, s := range sources {
		clientAddrs[i] = s.addr
	}
	return errors.Join(
		join(n.client, "up", n.shaper, "left"),
		join(n.shaper, "right", n.downstream, downstreamLink),
		n.client.address("up", 16, clientAddrs...),
		n.shaper.address("left", 16, proxyAddr),
		n.shaper.address("right", 24, innerAddr),
		n.downstream.address(downstreamLink, 24, downstreamAddr),
		n.client.defaultRoute(proxyAddr),
		n.downstream.defaultRoute(innerAddr),
		// Each frame that arrives is to be one segment with a time of its own, as a
		// wire would carry it.
		n.shaper.segmentAlone("right"),
		// With room in the accept queue gone, a connection gets a reset at once.
		n.downstream.sysctl("net/ipv4/tcp_abort_on_overflow", "1"),
	)
}

func newHost(name string) (*host, error) {
	h := &host{name: name, home: netns.None(), ns: netns.None(), starts: make(chan func()), ended: make(chan struct{})}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var err error
	if h.home, err = netns.Get(); err != nil {
		return nil, fmt.Errorf("open own namespace: %w", err)
	}
	h.ns, err = netns.NewNamed(name)
	h.leave()
	if err != nil {
		h.home.Close()
		return nil, fmt.Errorf("make network namespace %s: %w", name, err)
	}
	go h.launch()
	if h.links, err = netlink.NewHandleAt(h.ns); err == nil {
		err = h.up("lo")
	}
	// A sender that paces itself, as BBR does, would not be greedy.
	if err == nil {
		err = h.sysctl("net/ipv4/tcp_congestion_control", "reno")
	}
	if err != nil {
		h.remove()
		return nil, fmt.Errorf("set up %s: %w", name, err)
	}
	return h, nil
}

func (h *host) remove() {
	close(h.starts)
	<-h.ended
	if h.links != nil {
		h.links.Close()
	}
	h.ns.Close()
	h.home.Close()
	// What is left behind here, the next run removes.
	_ = netns.DeleteNamed(h.name)
}

// enter moves the calling goroutine's thread into the host until leave. Sockets
// opened there stay in the host.
func (h *host) enter() {
	runtime.LockOSThread()
	if err := netns.Set(h.ns); err != nil {
		panic(fmt.Sprintf("enter namespace %s: %v", h.name, err))
	}
}

func (h *host) leave() {
	if err := netns.Set(h.home); err != nil {
		panic(fmt.Sprintf("return to own namespace: %v", err))
	}
	runtime.UnlockOSThread()
}

// do runs fn inside the host.
func (h *host) do(fn func() error) error {
	h.enter()
	defer h.leave()
	return fn()
}

// launch starts the host's processes, all from one thread that lives as long as
// the host: the kernel ends them with the thread that started them, so that they
// never outlive this program, however it ends.
func (h *host) launch() {
	defer close(h.ended)
	runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
	if err := netns.Set(h.ns); err != nil {
		panic(fmt.Sprintf("enter namespace %s: %v", h.name, err))
	}
	for start := range h.starts {
		start()
	}
}

// start starts cmd inside the host.
func (h *host) start(cmd *exec.Cmd) error {
	// Its own process group: an interrupt from the terminal is for this program,
	// which ends what it started.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	started := make(chan error)
	h.starts <- func() { started <- cmd.Start() }
	return <-started
}

func (h *host) sysctl(name, value string) error {
	return h.do(func() error { return os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0) })
}

// join lays a cable between two hosts.
func join(a *host, aLink string, b *host, bLink string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = aLink
	attrs.MTU = 1500
	attrs.Namespace = netlink.NsFd(a.ns)
	cable := &netlink.Veth{LinkAttrs: attrs, PeerName: bLink, PeerNamespace: netlink.NsFd(b.ns)}
	if err := netlink.LinkAdd(cable); err != nil {
		return fmt.Errorf("join %s and %s: %w", a.name, b.name, err)
	}
	return errors.Join(a.up(aLink), b.up(bLink))
}

// change applies fn to one of the host's interfaces.
func (h *host) change(link, doing string, fn func(netlink.Link) error) error {
	l, err := h.links.LinkByName(link)
	if err == nil {
		err = fn(l)
	}
	if err != nil {
		return fmt.Errorf("%s %s in %s: %w", doing, link, h.name, err)
	}
	return nil
}

func (h *host) up(link string) error { return h.change(link, "set up", h.links.LinkSetUp) }

func (h *host) segmentAlone(link string) error {
	return h.change(link, "segment at", func(l netlink.Link) error { return h.links.LinkSetGSOMaxSegs(l, 1) })
}

func (h *host) address(link string, bits int, addrs ...netip.Addr) error {
	return h.change(link, "address", func(l netlink.Link) error {
		for _, a := range addrs {
			ipNet := &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, 32)}
			if err := h.links.AddrAdd(l, &netlink.Addr{IPNet: ipNet}); err != nil {
				return err
			}
		}
		return nil
	})
}

func (h *host) defaultRoute(via netip.Addr) error {
	everything := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}
	if err := h.links.RouteAdd(&netlink.Route{Dst: everything, Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("route by %s in %s: %w", via, h.name, err)
	}
	return nil
}

// sweep removes with remove what crashed runs left behind in dir: namespaces, and
// folders for configurations. Their daemons are gone: they die with the process
// that started them.
func sweep(dir string, remove func(path string) error) error {
	left, err := filepath.Glob(filepath.Join(dir, prefix+"*"))
	if err != nil {
		return err
	}
	for _, path := range left {
		if pid, ok := owner(filepath.Base(path)); !ok || unix.Kill(pid, 0) != unix.ESRCH {
			continue
		}
		if err := remove(path); err != nil {
			return fmt.Errorf("remove leftover %s: %w", path, err)
		}
	}
	return nil
}

func removeNamespace(path string) error { return netns.DeleteNamed(filepath.Base(path)) }

// owner returns the process that made the namespace or the folder called name.
func owner(name string) (pid int, ok bool) {
	rest, ours := strings.CutPrefix(name, prefix)
	digits, _, cut := strings.Cut(rest, "-")
	pid, err := strconv.Atoi(digits)
	return pid, ours && cut && err == nil && pid > 0
}
