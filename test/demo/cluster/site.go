package main

import (
	"errors"
	"net/netip"

	"shaperd.dev/shaperd/test/lab"
)

// gateways is the number of gateways in front of the downstream.
const gateways = 3

// Addresses, all in one network.
var (
	downstreamAddr = netip.MustParseAddr("10.9.0.5")
	storeAddr      = netip.MustParseAddr("10.9.0.9")
	atDownstream   = netip.AddrPortFrom(downstreamAddr, port)
	atStore        = netip.AddrPortFrom(storeAddr, 6379)
)

const port = 3270 // of the downstream and of the gateways

func gatewayAddr(i int) netip.Addr   { return netip.AddrFrom4([4]byte{10, 9, 0, byte(11 + i)}) }
func atGateway(i int) netip.AddrPort { return netip.AddrPortFrom(gatewayAddr(i), port) }
func gatewayName(i int) string       { return "gw" + string(rune('1'+i)) }
func otherGateways(i int) []netip.Addr {
	return []netip.Addr{gatewayAddr((i + 1) % gateways), gatewayAddr((i + 2) % gateways)}
}
func hotSource(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 9, 1, byte(1 + i)}) }
func usualSource(at, i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 9, byte(2 + at), byte(1 + i)})
}

// A site is the hosts of one run.
type site struct {
	star       *lab.Star
	clients    *lab.Host
	gateways   [gateways]*lab.Host
	store      *lab.Host
	downstream *lab.Host
}

func newSite() (*site, error) {
	star, err := lab.NewStar(16)
	if err != nil {
		return nil, err
	}
	s := &site{star: star}
	var sources []netip.Addr
	for i := range hotSources {
		sources = append(sources, hotSource(i))
	}
	for at := range gateways {
		for i := range usualSources {
			sources = append(sources, usualSource(at, i))
		}
	}
	var errs [4 + gateways]error
	s.clients, errs[0] = star.Add("clients", sources...)
	s.store, errs[1] = star.Add("store", storeAddr)
	s.downstream, errs[2] = star.Add("downstream", downstreamAddr)
	for i := range s.gateways {
		if s.gateways[i], errs[3+i] = star.Add(gatewayName(i), gatewayAddr(i)); errs[3+i] == nil {
			errs[3+i] = errors.Join(
				// Each frame that arrives is one segment with its own timestamp.
				s.gateways[i].SetMaxSegments(lab.StarLink, 1),
				// What the hot spot leaves behind when it moves is soon gone.
				s.gateways[i].Sysctl("net/ipv4/tcp_rmem", "4096 65536 65536"))
		}
	}
	if err := errors.Join(errs[:]...); err != nil {
		star.Remove()
		return nil, err
	}
	return s, nil
}

// cutOff makes a gateway lose all packets to and from the store and the other gateways. It still
// serves its clients.
func (s *site) cutOff(i int) error {
	lost := append(otherGateways(i), storeAddr)
	return s.gateways[i].Apply(lab.Cut{From: lost, To: lost})
}

func (s *site) mend(i int) error { return s.gateways[i].Apply(lab.Cut{}) }
