//go:build vmguest

package guest

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/test/lab"
)

// The addresses of a pair of hosts.
var (
	senderAddr   = netip.MustParseAddr("10.0.0.1")
	receiverAddr = netip.MustParseAddr("10.0.0.2")
)

// newPair creates two connected hosts that are removed when the test ends: the sender has the
// interface "out", the receiver "in".
func newPair(t *testing.T) (sender, receiver host) {
	t.Helper()
	sender, receiver = newHost(t, "sender"), newHost(t, "receiver")
	must(t, "connect the hosts", errors.Join(
		lab.Join(sender.Host, "out", receiver.Host, "in"),
		sender.AddAddress("out", 24, senderAddr),
		receiver.AddAddress("in", 24, receiverAddr)))
	return sender, receiver
}

// A host fails its test on errors.
type host struct{ *lab.Host }

func newHost(t *testing.T, role string) host {
	t.Helper()
	h, err := lab.NewHost(role)
	must(t, "create host", err)
	t.Cleanup(h.Remove)
	return host{h}
}

func (h host) link(t *testing.T, name string) netlink.Link {
	t.Helper()
	link, err := h.Links.LinkByName(name)
	must(t, "find "+name, err)
	return link
}

// run runs a program inside the host and returns its output.
func (h host) run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := h.Output(name, args...)
	must(t, "run", err)
	return out
}

// datagrams is the number of datagrams in a delay measurement.
const datagrams = 10

// delays sends datagrams from sender to receiver, and returns the shortest and the longest transit time.
func delays(t *testing.T, sender, receiver host) (shortest, longest time.Duration) {
	t.Helper()
	to := netip.AddrPortFrom(receiverAddr, 9)
	in, err := receiver.ListenUDP(to)
	must(t, "listen", err)
	defer in.Close()
	out, err := sender.DialUDP(senderAddr, to)
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
