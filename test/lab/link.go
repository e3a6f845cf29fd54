package lab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Join connects two hosts by a veth pair, one interface at each.
func Join(a *Host, aLink string, b *Host, bLink string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = aLink
	attrs.MTU = 1500
	attrs.Namespace = netlink.NsFd(a.ns)
	cable := &netlink.Veth{LinkAttrs: attrs, PeerName: bLink, PeerNamespace: netlink.NsFd(b.ns)}
	if err := netlink.LinkAdd(cable); err != nil {
		return fmt.Errorf("join %s and %s: %w", a.Name, b.Name, err)
	}
	return errors.Join(a.Up(aLink), b.Up(bLink), AwaitUp(a.Links, aLink), AwaitUp(b.Links, bLink))
}

// AwaitUp waits until one end of a link is operationally up, after both ends were set up, and its
// IPv6 addresses without duplicate address detection are in use. The kernel does this
// asynchronously: until then the end that was set up first has no queue and drops packets, and
// neighbors cannot resolve its addresses.
func AwaitUp(h *netlink.Handle, link string) error {
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		l, err := h.LinkByName(link)
		if err != nil {
			return fmt.Errorf("wait for %s: %w", link, err)
		}
		addressed, err := hasAddresses(h, l)
		switch {
		case err != nil && !errors.Is(err, netlink.ErrDumpInterrupted): // by a change of addresses
			return fmt.Errorf("wait for the addresses of %s: %w", link, err)
		case l.Attrs().OperState == netlink.OperUp && addressed:
			return nil
		case time.Now().After(end):
			return fmt.Errorf("wait for %s: its state is %v, its addresses are in use: %v", link, l.Attrs().OperState, addressed)
		}
	}
}

// hasAddresses reports whether the interface's IPv6 addresses are in use. The kernel adds their
// local routes after it has joined the multicast groups for neighbor discovery.
func hasAddresses(h *netlink.Handle, l netlink.Link) (bool, error) {
	addrs, err := h.AddrList(l, netlink.FAMILY_V6)
	if err != nil {
		return false, err
	}
	for _, a := range addrs {
		if a.Flags&unix.IFA_F_NODAD == 0 {
			continue
		}
		routes, err := h.RouteGet(a.IP)
		if errors.Is(err, unix.ENETUNREACH) || err == nil && routes[0].Type != unix.RTN_LOCAL {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("route to %s: %w", a.IP, err)
		}
	}
	return true, nil
}

// withLink calls fn with one of the host's interfaces.
func (h *Host) withLink(link, doing string, fn func(netlink.Link) error) error {
	l, err := h.Links.LinkByName(link)
	if err == nil {
		err = fn(l)
	}
	if err != nil {
		return fmt.Errorf("%s %s in %s: %w", doing, link, h.Name, err)
	}
	return nil
}

// Up brings an interface up.
func (h *Host) Up(link string) error { return h.withLink(link, "set up", h.Links.LinkSetUp) }

// SetMaxSegments sets the maximum number of segments in a super-packet that enters a link. With 1,
// each frame that arrives is one segment with its own timestamp, as on a wire.
func (h *Host) SetMaxSegments(link string, n int) error {
	return h.withLink(link, "segment at", func(l netlink.Link) error { return h.Links.LinkSetGSOMaxSegs(l, n) })
}

// AddAddress adds addresses to an interface that is up, and waits until they are in use.
func (h *Host) AddAddress(link string, bits int, addrs ...netip.Addr) error {
	return h.withLink(link, "address", func(l netlink.Link) error {
		for _, a := range addrs {
			addr := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, a.BitLen())}}
			if a.Is6() {
				addr.Flags = unix.IFA_F_NODAD
			}
			if err := h.Links.AddrAdd(l, addr); err != nil {
				return err
			}
		}
		return AwaitUp(h.Links, link)
	})
}

// AddDefaultRoute adds a default route via the address, for its IP version.
func (h *Host) AddDefaultRoute(via netip.Addr) error {
	everything := &net.IPNet{IP: make(net.IP, via.BitLen()/8), Mask: net.CIDRMask(0, via.BitLen())}
	if err := h.Links.RouteAdd(&netlink.Route{Dst: everything, Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("route via %s in %s: %w", via, h.Name, err)
	}
	return nil
}

// Counters are the receive counters of an interface.
type Counters struct{ Packets, Bytes uint64 }

// Received returns the receive counters of an interface.
func (h *Host) Received(link string) (c Counters, err error) {
	err = h.withLink(link, "read counters of", func(l netlink.Link) error {
		s := l.Attrs().Statistics
		c = Counters{s.RxPackets, s.RxBytes}
		return nil
	})
	return c, err
}
