package lab

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// A Star is hosts around a switch: all are in one network.
type Star struct {
	hub  *Host
	bits int
	all  []*Host
}

// StarLink is the interface of each host in a star.
const StarLink = "net"

// bridge is the interface of the switch that connects the hosts.
const bridge = "bridge"

// NewStar creates a star without hosts. The prefix of its network has the given number of bits.
func NewStar(bits int) (*Star, error) {
	hub, err := NewHost("switch")
	if err != nil {
		return nil, err
	}
	s := &Star{hub: hub, bits: bits}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = bridge
	if err := hub.Links.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		s.Remove()
		return nil, fmt.Errorf("add a bridge in %s: %w", hub.Name, err)
	}
	if err := hub.Up(bridge); err != nil {
		s.Remove()
		return nil, err
	}
	return s, nil
}

// Add creates a host with addresses in the star's network. Remove removes it.
func (s *Star) Add(role string, addrs ...netip.Addr) (*Host, error) {
	h, err := NewHost(role)
	if err != nil {
		return nil, err
	}
	s.all = append(s.all, h)
	port := fmt.Sprint("port", len(s.all))
	return h, errors.Join(
		Join(h, StarLink, s.hub, port),
		s.hub.withLink(port, "connect", func(l netlink.Link) error {
			b, err := s.hub.Links.LinkByName(bridge)
			if err != nil {
				return err
			}
			return s.hub.Links.LinkSetMaster(l, b)
		}),
		h.AddAddress(StarLink, s.bits, addrs...))
}

// Remove removes all hosts.
func (s *Star) Remove() {
	for _, h := range s.all {
		h.Remove()
	}
	s.hub.Remove()
}
