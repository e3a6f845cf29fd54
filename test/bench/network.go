package main

import (
	"errors"
	"fmt"
	"net/netip"

	"shaperd.dev/shaperd/test/lab"
)

const port = 2775 // TCP and UDP, at the proxy and at the downstream

// Addresses. The client has one per source.
var (
	proxyAddr      = netip.MustParseAddr("10.1.0.1") // of the middle host, on the client's side
	innerAddr      = netip.MustParseAddr("10.2.0.1") // of the middle host, on the downstream's side
	downstreamAddr = netip.MustParseAddr("10.2.0.5")
	atProxy        = netip.AddrPortFrom(proxyAddr, port)
	atDownstream   = netip.AddrPortFrom(downstreamAddr, port)
)

// sources is the number of client addresses.
const sources = 100

// source returns the client's address i. Each is in its own /24.
func source(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, byte(1 + i), 10}) }

// newNetwork creates the three hosts and connects them. The program under test runs on the middle one.
func newNetwork() (*lab.Row, error) {
	clients := make([]netip.Addr, sources)
	for i := range clients {
		clients[i] = source(i)
	}
	n, err := lab.NewRow(lab.RowAddresses{
		Clients: clients, Outer: []netip.Addr{proxyAddr}, OuterBits: 16,
		Inner: innerAddr, Downstream: downstreamAddr, InnerBits: 24,
	})
	if err != nil {
		return nil, err
	}
	err = n.Middle.Sysctl("net/ipv4/ip_forward", "1")
	for _, h := range []*lab.Host{n.Client, n.Middle, n.Downstream} {
		err = errors.Join(err,
			// Thousands of connections a second leave as many ports in TIME-WAIT.
			h.Sysctl("net/ipv4/ip_local_port_range", "3000 65000"),
			h.Sysctl("net/ipv4/tcp_tw_reuse", "1"),
			h.Sysctl("net/core/somaxconn", "16384"),
			h.Sysctl("net/ipv4/tcp_max_syn_backlog", "16384"))
	}
	if err != nil {
		n.Remove()
		return nil, fmt.Errorf("set up the network: %w", err)
	}
	return n, nil
}
