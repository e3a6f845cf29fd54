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

const port = 2775 // TCP and UDP

// newNetwork creates client, shaper and downstream.
func newNetwork() (*lab.Row, error) {
	clients := make([]netip.Addr, len(sources))
	for i, s := range sources {
		clients[i] = s.addr
	}
	n, err := lab.NewRow(lab.RowAddresses{
		Clients: clients, Outer: []netip.Addr{proxyAddr}, OuterBits: 16,
		Inner: innerAddr, Downstream: downstreamAddr, InnerBits: 24,
	})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(
		n.Middle.SetMaxSegments(lab.MiddleRight, 1),
		// When the accept queue is full, a connection is reset at once.
		n.Downstream.Sysctl("net/ipv4/tcp_abort_on_overflow", "1"),
	); err != nil {
		n.Remove()
		return nil, err
	}
	return n, nil
}
