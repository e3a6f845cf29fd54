package main

import (
	"errors"
	"fmt"
	"net/netip"

	"shaperd.dev/shaperd/test/lab"
)

const (
	port           = 2775 // TCP and UDP, at the proxy and at the downstream
	downstreamLink = "in"
)

// Addresses. The client has one per source.
var (
	proxyAddr      = netip.MustParseAddr("10.1.0.1") // of the middle host, on the client's side
	innerAddr      = netip.MustParseAddr("10.2.0.1") // of the middle host, on the downstream's side
	downstreamAddr = netip.MustParseAddr("10.2.0.5")
	atProxy        = netip.AddrPortFrom(proxyAddr, port)
	atDownstream   = netip.AddrPortFrom(downstreamAddr, port)
)

// sources is the number of client addresses.
const sources = 64

// source returns the client's address i. Each is in its own /24.
func source(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, byte(1 + i), 10}) }

// A network is three hosts in a row. The program under test runs on the middle one.
type network struct{ client, middle, downstream *lab.Host }

// newNetwork creates the three hosts and connects them.
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
		n.client.AddAddress("up", 16, all...),
		n.middle.AddAddress("left", 16, proxyAddr),
		n.middle.AddAddress("right", 24, innerAddr),
		n.downstream.AddAddress(downstreamLink, 24, downstreamAddr),
		n.client.AddDefaultRoute(proxyAddr),
		n.downstream.AddDefaultRoute(innerAddr),
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
