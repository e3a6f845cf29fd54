package main

import (
	"errors"
	"fmt"
	"net/netip"

	"shaperd/test/lab"
)

const (
	port           = 2775 // TCP and UDP, at the proxy and at the downstream
	downstreamLink = "in"
)

// Addresses. The client has one for each source.
var (
	proxyAddr      = netip.MustParseAddr("10.1.0.1") // of the middle, on the client's side
	innerAddr      = netip.MustParseAddr("10.2.0.1") // of the middle, on the downstream's side
	downstreamAddr = netip.MustParseAddr("10.2.0.5")
	atProxy        = netip.AddrPortFrom(proxyAddr, port)
	atDownstream   = netip.AddrPortFrom(downstreamAddr, port)
)

// sources are the client's addresses.
const sources = 64

// source is the client's address i, each in a /24 of its own.
func source(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, byte(1 + i), 10}) }

// A network is three hosts in a row. What is measured stands on the one in the middle.
type network struct{ client, middle, downstream *lab.Host }

// newNetwork makes the three hosts and joins them.
func newNetwork() (n *network, err error) {
	n = &network{}
	for role, to := range map[string]**lab.Host{"client": &n.client, "middle": &n.middle, "downstream": &n.downstream} {
		if *to, err = lab.NewHost(role); err != nil {
			n.remove()
			return nil, err
		}
	}
	all := make([]netip.Addr, sources)
	for i := range all {
		all[i] = source(i)
	}
	err = errors.Join(
		lab.Join(n.client, "up", n.middle, "left"),
		lab.Join(n.middle, "right", n.downstream, downstreamLink),
		n.client.Address("up", 16, all...),
		n.middle.Address("left", 16, proxyAddr),
		n.middle.Address("right", 24, innerAddr),
		n.downstream.Address(downstreamLink, 24, downstreamAddr),
		n.client.Route(proxyAddr),
		n.downstream.Route(innerAddr),
		n.middle.Sysctl("net/ipv4/ip_forward", "1"),
	)
	for _, h := range []*lab.Host{n.client, n.middle, n.downstream} {
		err = errors.Join(err,
			// Thousands of connections a second leave as many ports in TIME-WAIT.
			h.Sysctl("net/ipv4/ip_local_port_range", "3000 65000"),
			h.Sysctl("net/ipv4/tcp_tw_reuse", "1"),
			h.Sysctl("net/core/somaxconn", "16384"),
			h.Sysctl("net/ipv4/tcp_max_syn_backlog", "16384"))
	}
	if err != nil {
		n.remove()
		return nil, fmt.Errorf("set up the network: %w", err)
	}
	return n, nil
}

func (n *network) remove() {
	for _, h := range []*lab.Host{n.client, n.middle, n.downstream} {
		if h != nil {
			h.Remove()
		}
	}
}
