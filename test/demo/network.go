package main

import (
	"errors"
	"net/netip"

	"shaperd.dev/shaperd/test/lab"
)

// Addresses. The client host has one address per source, each in its own /24.
var (
	proxyAddr      = netip.MustParseAddr("10.1.0.1") // of the shaper, on the client's side
	innerAddr      = netip.MustParseAddr("10.2.0.1") // of the shaper, on the downstream's side
	downstreamAddr = netip.MustParseAddr("10.2.0.5")
)

const (
	port           = 2775 // TCP and UDP
	downstreamLink = "in"
)

// A network is three hosts in a row: client, shaper, downstream.
type network struct{ client, shaper, downstream *lab.Host }

// newNetwork creates the three hosts and connects them.
func newNetwork() (n *network, err error) {
	n = &network{}
	for _, h := range []struct {
		role string
		to   **lab.Host
	}{{"client", &n.client}, {"shaper", &n.shaper}, {"downstream", &n.downstream}} {
		if *h.to, err = lab.NewHost(h.role); err != nil {
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
	for _, h := range []*lab.Host{n.client, n.shaper, n.downstream} {
		if h != nil {
			h.Remove()
		}
	}
}

func (n *network) wire() error {
	clientAddrs := make([]netip.Addr, len(sources))
	for i, s := range sources {
		clientAddrs[i] = s.addr
	}
	return errors.Join(
		lab.Join(n.client, "up", n.shaper, "left"),
		lab.Join(n.shaper, "right", n.downstream, downstreamLink),
		n.client.AddAddress("up", 16, clientAddrs...),
		n.shaper.AddAddress("left", 16, proxyAddr),
		n.shaper.AddAddress("right", 24, innerAddr),
		n.downstream.AddAddress(downstreamLink, 24, downstreamAddr),
		n.client.AddDefaultRoute(proxyAddr),
		n.downstream.AddDefaultRoute(innerAddr),
		n.shaper.SetMaxSegments("right", 1),
		// When the accept queue is full, a connection is reset at once.
		n.downstream.Sysctl("net/ipv4/tcp_abort_on_overflow", "1"),
	)
}
