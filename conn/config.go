package conn

import (
	"net"
	"net/netip"
	"strconv"
	"time"

	"shaperd/shaper"
)

// Listen is a named set of places where traffic enters, and where it goes.
type Listen struct {
	Name       string
	Endpoints  []Endpoint
	Downstream []Downstream // the next one when a dial fails
	Balance    Balance
	SlowStart  time.Duration // until one that has come back has its share
	Check      Check

	// EjectAfter is after how many failed dials, one after the other, a downstream gets
	// no connections for EjectFor, unless there is no other; 0 is never.
	EjectAfter int
	EjectFor   time.Duration

	// AcceptProxyFrom is who begins each TCP connection with a header of the PROXY
	// protocol. Limits then see the source that it announces.
	AcceptProxyFrom []netip.Prefix

	// SendProxy is the version, 1 or 2, of the PROXY protocol in which a downstream is
	// told of the source, before the first byte, and before each datagram; 0 means none.
	// Version 1 is for TCP alone.
	SendProxy byte

	// Transparent has downstreams see the addresses of sources, and the listener take what
	// is on its way to other hosts, if these have its addresses. The rules of package
	// divert have the kernel deliver that here, and the downstreams' answers. It takes
	// CAP_NET_RAW or CAP_NET_ADMIN.
	Transparent bool

	Timeouts
	IdleTimeout time.Duration // after which a UDP flow is forgotten
	MaxFlows    int           // UDP flows at once

	// MaxFlowsPerSource is UDP flows at once of one IPv4 address or IPv6 prefix of 64
	// bits; 0 is no bound.
	MaxFlowsPerSource int

	// Amplification bounds what a UDP flow's source, which may be forged, is sent: in
	// bytes, to so many times what it sent, as long as the flow lasts. 0 is no bound.
	Amplification int

	AccessLog bool // a line for each connection and flow that has ended
}

// Timeouts are when a TCP connection ends that gets nowhere. Zero is never, but for
// Connect.
type Timeouts struct {
	Connect   time.Duration // for one dial
	FirstByte time.Duration // of the client, from when there is a downstream for it
	Idle      time.Duration // without a byte either way, while the proxy holds none back
	HalfClose time.Duration // likewise, when one side has ended
	Lifetime  time.Duration // from when there is a downstream

	// MinThroughput is bytes/s, both ways together, over each SlowWindow in which
	// the proxy held nothing back.
	MinThroughput uint64
}

// SlowWindow is the time over which MinThroughput is taken.
const SlowWindow = 10 * time.Second

// Endpoint is one port to listen on. Listening on an IPv6 address takes no IPv4
// traffic.
type Endpoint struct {
	Protocol shaper.Protocol
	Addr     netip.AddrPort
	SamePort bool // go to the same port of the downstream, whatever port it names
}

// place is where an Endpoint listens.
func (e Endpoint) place() Endpoint { return Endpoint{Protocol: e.Protocol, Addr: e.Addr} }

// Balance is how a connection's downstream is chosen.
type Balance uint8

// The ways to choose, each by weight.
const (
	RoundRobin       Balance = iota
	LeastConnections         // of the proxy's own
	SourceHash               // the same for all connections of a source, as long as it is there
)

// Check is an active check of downstreams: that they accept a connection. It is off
// when Interval is 0.
type Check struct {
	Interval, Timeout time.Duration
	Rise, Fall        int // checks that succeed, or fail, one after the other
}

// Downstream is a host to forward to.
type Downstream struct {
	Host        string
	Port        uint16 // 0 is the port the source asked for
	Weight      int    // 0 is 1
	Connections int    // at once, UDP flows too; 0 is no bound
	Drained     bool   // gets no connections when it is new; see DrainDownstream
}

// String returns d as the configuration names it.
func (d Downstream) String() string {
	if d.Port == 0 {
		return d.Host
	}
	return d.address(0, false)
}

// port returns the port that traffic for port goes to.
func (d Downstream) port(port uint16, same bool) uint16 {
	if d.Port != 0 && !same {
		return d.Port
	}
	return port
}

func (d Downstream) address(port uint16, same bool) string {
	return net.JoinHostPort(d.Host, strconv.Itoa(int(d.port(port, same))))
}
