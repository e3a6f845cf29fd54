package netns

import (
	"context"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/test/lab"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// A host is removed when the test ends, and so is everything it opens.
type host struct{ *lab.Host }

func newHost(t testing.TB, role string) *host {
	t.Helper()
	h, err := lab.NewHost(role)
	must(t, err)
	t.Cleanup(h.Remove)
	return &host{h}
}

func (h *host) mustLink(t testing.TB, name string) netlink.Link {
	t.Helper()
	link, err := h.Links.LinkByName(name)
	if err != nil {
		t.Fatalf("find %s in %s: %v", name, h.Name, err)
	}
	return link
}

func (h *host) listenTCP(t testing.TB, at netip.AddrPort) *net.TCPListener {
	t.Helper()
	l, err := h.Listen(at)
	must(t, err)
	t.Cleanup(func() { l.Close() })
	return l
}

// dialTCP connects from the address from inside the host. The caller closes.
func (h *host) dialTCP(from netip.Addr, to netip.AddrPort) (*net.TCPConn, error) {
	return h.Dial(context.Background(), from, to, patience)
}

// mustDial is dialTCP for the test's own goroutine.
func (h *host) mustDial(t testing.TB, from netip.Addr, to netip.AddrPort) *net.TCPConn {
	t.Helper()
	c, err := h.dialTCP(from, to)
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

func (h *host) listenUDP(t testing.TB, at netip.AddrPort) *net.UDPConn {
	t.Helper()
	c, err := h.ListenUDP(at)
	must(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

// A capture fails its test if it is incomplete.
type capture struct {
	*lab.Capture
	t testing.TB
}

// capture records the frames received at a link, from or to a port.
func (h *host) capture(t testing.TB, link string, port uint16, frames int) *capture {
	t.Helper()
	return h.captureFiltered(t, link, lab.Filter{Port: port, Incoming: true}, frames)
}

func (h *host) captureFiltered(t testing.TB, link string, filter lab.Filter, frames int) *capture {
	t.Helper()
	c, err := h.Capture(link, filter, frames)
	must(t, err)
	t.Cleanup(c.Close)
	return &capture{c, t}
}

// stop ends the capture and returns the arrivals.
func (c *capture) stop() []lab.Arrival {
	c.t.Helper()
	list, err := c.Finish()
	must(c.t, err)
	return list
}

// kernelDrops returns how many packets the kernel has dropped because of full queues: in
// the softnet backlog of the whole machine, and in the receive buffers of the host's UDP
// sockets.
func kernelDrops(t testing.TB, h *host) (drops int) {
	t.Helper()
	var softnet, snmp []byte
	must(t, h.Do(func() (err error) {
		if softnet, err = os.ReadFile("/proc/thread-self/net/softnet_stat"); err != nil {
			return err
		}
		snmp, err = os.ReadFile("/proc/thread-self/net/snmp")
		return err
	}))
	for line := range strings.Lines(string(softnet)) { // one line per processor: received, dropped, ...
		dropped, err := strconv.ParseUint(strings.Fields(line)[1], 16, 32)
		must(t, err)
		drops += int(dropped)
	}
	var names []string
	for line := range strings.Lines(string(snmp)) {
		fields := strings.Fields(line)
		if fields[0] != "Udp:" {
			continue
		}
		if names == nil {
			names = fields
			continue
		}
		n, err := strconv.Atoi(fields[slices.Index(names, "RcvbufErrors")])
		must(t, err)
		drops += n
	}
	return drops
}
