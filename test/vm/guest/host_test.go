//go:build vmguest

package guest

import (
	"encoding/binary"
	"net"
	"os/exec"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"shaperd.dev/shaperd/test/lab"
)

// A host is a network namespace.
type host struct {
	ns netns.NsHandle
	*netlink.Handle
}

// newPair creates two connected hosts that are removed when the test ends: one has the
// interface "out" with 10.0.0.1, the other "in" with 10.0.0.2.
func newPair(t *testing.T) (sender, receiver host) {
	t.Helper()
	sender, receiver = newHost(t), newHost(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "out"
	attrs.Namespace = netlink.NsFd(sender.ns)
	must(t, "join", netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "in", PeerNamespace: netlink.NsFd(receiver.ns)}))
	sender.up(t, "out", "10.0.0.1/24")
	receiver.up(t, "in", "10.0.0.2/24")
	must(t, "wait for the sender's link", lab.AwaitUp(sender.Handle, "out"))
	must(t, "wait for the receiver's link", lab.AwaitUp(receiver.Handle, "in"))
	return sender, receiver
}

func newHost(t *testing.T) (h host) {
	t.Helper()
	runtime.LockOSThread()
	home, err := netns.Get()
	must(t, "open own namespace", err)
	defer home.Close()
	h.ns, err = netns.New()
	must(t, "create namespace", err)
	must(t, "return to own namespace", netns.Set(home))
	runtime.UnlockOSThread()
	t.Cleanup(func() { h.ns.Close() })
	h.Handle, err = netlink.NewHandleAt(h.ns)
	must(t, "open netlink", err)
	t.Cleanup(h.Handle.Close)
	return h
}

// up brings a link up, with an address unless it is empty.
func (h host) up(t *testing.T, link, addr string) {
	t.Helper()
	if addr != "" {
		a, err := netlink.ParseAddr(addr)
		must(t, "parse address", err)
		must(t, "add address", h.AddrAdd(h.link(t, link), a))
	}
	must(t, "set link up", h.LinkSetUp(h.link(t, link)))
}

func (h host) link(t *testing.T, name string) netlink.Link {
	t.Helper()
	link, err := h.LinkByName(name)
	must(t, "find "+name, err)
	return link
}

// do runs fn inside the host. Sockets and processes that fn creates stay there.
func (h host) do(t *testing.T, fn func()) {
	t.Helper()
	runtime.LockOSThread()
	home, err := netns.Get()
	must(t, "open own namespace", err)
	defer home.Close()
	must(t, "enter namespace", netns.Set(h.ns))
	fn()
	must(t, "return to own namespace", netns.Set(home))
	runtime.UnlockOSThread()
}

// run runs a program inside the host and returns its output.
func (h host) run(t *testing.T, name string, args ...string) string {
	t.Helper()
	var out []byte
	var err error
	h.do(t, func() { out, err = exec.Command(name, args...).CombinedOutput() })
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// datagrams is the number of datagrams in a delay measurement.
const datagrams = 10

// delays sends datagrams from sender to receiver, and returns the shortest and the longest transit time.
func delays(t *testing.T, sender, receiver host) (shortest, longest time.Duration) {
	t.Helper()
	to := &net.UDPAddr{IP: net.IPv4(10, 0, 0, 2), Port: 9}
	var in, out *net.UDPConn
	var err error
	receiver.do(t, func() { in, err = net.ListenUDP("udp4", to) })
	must(t, "listen", err)
	defer in.Close()
	sender.do(t, func() { out, err = net.DialUDP("udp4", nil, to) })
	must(t, "dial", err)
	defer out.Close()

	buf := make([]byte, 16)
	shortest = time.Hour
	for i := range datagrams + 1 {
		began := time.Now()
		_, err := out.Write(binary.BigEndian.AppendUint64(nil, uint64(i)))
		must(t, "send", err)
		must(t, "set deadline", in.SetReadDeadline(began.Add(5*time.Second)))
		_, err = in.Read(buf)
		must(t, "receive", err)
		if i == 0 {
			continue // it waited for neighbor resolution
		}
		took := time.Since(began)
		shortest, longest = min(shortest, took), max(longest, took)
	}
	return shortest, longest
}

func must(t *testing.T, doing string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", doing, err)
	}
}
