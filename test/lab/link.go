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

// Join lays a cable between two hosts, an interface at each end.
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

// AwaitUp waits until the end of a cable is up, both ends having been set so, and has its addresses
// of IPv6 that are not probed for duplicates. Until workers of the kernel get to it the end that was
// set up first drops what is sent, as it has no queue, and neighbours are not told where an address is.
func AwaitUp(h *netlink.Handle, link string) error {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		l, err := h.LinkByName(link)
		if err != nil {
			return fmt.Errorf("wait for %s: %w", link, err)
		}
		addressed, err := hasAddresses(h, l)
		switch {
		case err != nil:
			return fmt.Errorf("wait for the addresses of %s: %w", link, err)
		case l.Attrs().OperState == netlink.OperUp && addressed:
			return nil
		case time.Now().After(end):
			return fmt.Errorf("wait for %s: it is %v, with its addresses: %v", link, l.Attrs().OperState, addressed)
		}
	}
}

// hasAddresses reports whether the addresses of IPv6 that an interface was given are in use. The
// kernel routes them to itself after it has joined the groups in which neighbours ask for them.
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

// change applies fn to one of the host's interfaces.
func (h *Host) change(link, doing string, fn func(netlink.Link) error) error {
	l, err := h.Links.LinkByName(link)
	if err == nil {
		err = fn(l)
	}
	if err != nil {
		return fmt.Errorf("%s %s in %s: %w", doing, link, h.Name, err)
	}
	return nil
}

// Up sets an interface up.
func (h *Host) Up(link string) error { return h.change(link, "set up", h.Links.LinkSetUp) }

// Segments sets of how many segments a super-packet that enters a link may be. With 1
// each frame that arrives is one segment with a time of its own, as a wire would carry
// it.
func (h *Host) Segments(link string, n int) error {
	return h.change(link, "segment at", func(l netlink.Link) error { return h.Links.LinkSetGSOMaxSegs(l, n) })
}

// Address gives addresses to an interface that is up, and waits until they are in use.
func (h *Host) Address(link string, bits int, addrs ...netip.Addr) error {
	return h.change(link, "address", func(l netlink.Link) error {
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

// Route routes everything of via's IP version by via.
func (h *Host) Route(via netip.Addr) error {
	everything := &net.IPNet{IP: make(net.IP, via.BitLen()/8), Mask: net.CIDRMask(0, via.BitLen())}
	if err := h.Links.RouteAdd(&netlink.Route{Dst: everything, Gw: via.AsSlice()}); err != nil {
		return fmt.Errorf("route by %s in %s: %w", via, h.Name, err)
	}
	return nil
}

// Counters are what an interface has received.
type Counters struct{ Packets, Bytes uint64 }

// Received reads an interface's counters.
func (h *Host) Received(link string) (c Counters, err error) {
	err = h.change(link, "read counters of", func(l netlink.Link) error {
		s := l.Attrs().Statistics
		c = Counters{s.RxPackets, s.RxBytes}
		return nil
	})
	return c, err
}
