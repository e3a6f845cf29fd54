package conn

import (
	"net"
	"net/netip"
	"strconv"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// Listen is the configuration of a listener: where traffic enters and where it goes.
type Listen struct {
	Name       string
	Endpoints  []Endpoint
	Downstream []Downstream // in order; the next one if a dial fails
	Balance    Balance
	SlowStart  time.Duration // until a recovered downstream has its full share
	Check      Check

	// EjectAfter is the number of consecutive failed dials after which a downstream gets no
	// connections for EjectFor, unless there is no other; 0 means never.
	EjectAfter int
	EjectFor   time.Duration

	// AcceptProxyFrom is the sources that begin each TCP connection with a PROXY protocol header.
	// Limits then apply to the source in the header.
	AcceptProxyFrom []netip.Prefix

	// SendProxy is the version, 1 or 2, of the PROXY protocol header that is sent to the downstream
	// before the first byte, and before each datagram; 0 means none. Version 1 is for TCP only.
	SendProxy byte

	// Transparent makes downstreams see the addresses of sources, and the listener accept what is
	// addressed to other hosts, if Endpoints has their addresses. The rules of package tproxy make the
	// kernel deliver that traffic here, and the downstreams' replies. It requires CAP_NET_RAW or
	// CAP_NET_ADMIN.
	Transparent bool

	Timeouts
	IdleTimeout time.Duration // of a UDP flow
	MaxFlows    int           // UDP flows at once

	// MaxFlowsPerSource is the maximum of concurrent UDP flows per IPv4 address or IPv6 /64; 0 means
	// no maximum.
	MaxFlowsPerSource int

	// Amplification bounds the bytes sent to the source of a UDP flow, which may be forged, to a
	// multiple of the bytes that it sent, over the life of the flow. 0 means no bound.
	Amplification int

	AccessLog bool // one line for each connection and flow that ends
}

// Timeouts end TCP connections that make no progress. Zero means never, except for Connect.
type Timeouts struct {
	Connect   time.Duration // of one dial
	FirstByte time.Duration // from the client, since the downstream was connected
	Idle      time.Duration // without a byte in either direction, while the proxy delays none
	HalfClose time.Duration // the same, after one side has shut down
	Lifetime  time.Duration // since the downstream was connected

	// MinThroughput is bytes/s, both directions together, over each SlowWindow in which the proxy
	// delayed nothing.
	MinThroughput uint64
}

// SlowWindow is the period over which MinThroughput is measured.
const SlowWindow = 10 * time.Second

// Endpoint is one port to listen on. An IPv6 address accepts no IPv4 traffic.
type Endpoint struct {
	Protocol shaper.Protocol
	Addr     netip.AddrPort
	SamePort bool // forward to the same port of the downstream, whatever port the downstream has
}

// key identifies the socket of an Endpoint.
func (e Endpoint) key() Endpoint { return Endpoint{Protocol: e.Protocol, Addr: e.Addr} }

// Balance is the method that selects a connection's downstream.
type Balance uint8

// The methods, each by weight.
const (
	RoundRobin       Balance = iota
	LeastConnections         // of this proxy
	SourceHash               // the same downstream for all connections of a source, while it is available
)

// Check is the active health check of downstreams: whether they accept a connection. It is off when
// Interval is 0.
type Check struct {
	Interval, Timeout time.Duration
	Rise, Fall        int // consecutive checks that succeed, or fail
}

// Downstream is a host to forward to.
type Downstream struct {
	Host           string
	Port           uint16 // 0 means the port that the client connected to
	Weight         int    // 0 means 1
	MaxConnections int    // concurrent, including UDP flows; 0 means no maximum
	Drained        bool   // gets no connections when first configured; see DrainDownstream
}

// String returns d as in the configuration.
func (d Downstream) String() string {
	if d.Port == 0 {
		return d.Host
	}
	return d.address(0, false)
}

// port returns the downstream's port for traffic to port.
func (d Downstream) port(port uint16, same bool) uint16 {
	if d.Port != 0 && !same {
		return d.Port
	}
	return port
}

func (d Downstream) address(port uint16, same bool) string {
	return net.JoinHostPort(d.Host, strconv.Itoa(int(d.port(port, same))))
}
