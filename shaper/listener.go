package shaper

import (
	"math"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Listener is one listener: addresses to accept traffic on, and downstreams to forward it to.
type Listener struct {
	Name       string
	Addresses  []Address
	Downstream []Downstream // in order; the next one if a dial fails
	Balance    Balance
	SlowStart  time.Duration // until a recovered downstream has its full share, and at least the length of a ramp, 0 to 1h
	Check      HealthCheck

	// EjectAfter is the number of consecutive failed dials, 1 to 1000, after which a downstream gets no
	// connections for EjectFor, 10ms to 24h, unless there is no other; 0 is never.
	EjectAfter int
	EjectFor   time.Duration

	Breaker Breaker

	// OnDown is what happens to new TCP connections while no downstream can be reached.
	OnDown OnDown

	// RetryUnanswered makes another connection, up to three times, if a downstream fails or closes before it has said
	// anything, and sends it what the client has sent, if that is no more than 16 KiB.
	RetryUnanswered bool

	// While a listener is held, or while its connections are let in at a ramp, each waits for at most HoldTimeout,
	// 1s to 24h, since it was accepted. Ramp is the rate of new connections after a hold, at first.
	HoldTimeout time.Duration
	Ramp        Frequency

	// MaxQueue is how many connections may wait for a downstream, 1 to 1048576.
	MaxQueue int

	// HeldFor is for how long a listener is held when it is first configured: held by an operator before. 0 is not,
	// and Forever until an operator resumes it.
	HeldFor time.Duration

	// AcceptProxyFrom is the sources that begin each TCP connection with a PROXY protocol header.
	// Limits then apply to the source in the header.
	AcceptProxyFrom []netip.Prefix

	// SendProxy is the version of the PROXY protocol header that is sent to the downstream before the
	// first byte, and before each datagram.
	SendProxy ProxyVersion

	// SendStanding adds to a header of version 2 for a TCP connection how many more the limits leave its source.
	SendStanding bool

	// Transparent makes downstreams see the addresses of sources, and the listener accept what is
	// addressed to other hosts, if Addresses has theirs. The rules of package tproxy make the kernel
	// deliver that traffic here, and the downstreams' replies. It requires CAP_NET_RAW or CAP_NET_ADMIN.
	Transparent bool

	// Instances is how many daemons of this host listen at Addresses, 1 to 64; 0 is 1. The kernel chooses one by the source, an IPv4
	// address or an IPv6 prefix of 64 bits: at each address the same one, until an instance comes or goes.
	Instances int

	AccessLog bool // log each TCP connection and UDP flow that ends

	ConnectTimeout time.Duration // of one TCP connection attempt, 1ms to 1h

	// Of TCP connections, 10ms to 8760h; 0 is never.
	FirstByteTimeout time.Duration // for a byte from the client, since the downstream was connected
	TCPIdleTimeout   time.Duration // without a byte in either direction, while the proxy delays none
	HalfCloseTimeout time.Duration // the same, after one side has shut down
	MaxLifetime      time.Duration // since the downstream was connected

	// MinThroughput is bit/s, both directions together, over each 10 s in which the proxy delayed
	// nothing; 0 is none.
	MinThroughput uint64

	UDPIdleTimeout time.Duration // of UDP flows: udp_idle_timeout, 10ms to 24h
	MaxFlows       int           // UDP flows at once, 1 to 1048576

	MaxFlowsPerSource int // of one IPv4 address or IPv6 prefix of 64 bits, 1 to 1048576; 0 is no maximum

	// Amplification bounds the bytes sent to the source of a UDP flow, which may be forged, to a
	// multiple of the bytes that it sent, over the life of the flow: 1 to 1000; 0 is no bound.
	Amplification int
}

// Forever is a time that does not end.
const Forever time.Duration = math.MaxInt64

// Accepts reports whether l has an address of a protocol.
func (l *Listener) Accepts(p Protocol) bool {
	return slices.ContainsFunc(l.Addresses, func(a Address) bool { return a.Protocol == p })
}

// Endpoints returns the ports of l one by one.
func (l *Listener) Endpoints() (all []Endpoint) {
	for _, a := range l.Addresses {
		all = append(all, a.Endpoints()...)
	}
	return all
}

// Address is a range of ports to listen on. An IPv6 address takes IPv6 traffic
// alone, the wildcard [::] too: the socket needs IPV6_V6ONLY.
type Address struct {
	Protocol Protocol   // TCP or UDP
	Addr     netip.Addr // without a zone, never IPv4-mapped
	Ports    PortRange
}

func (a Address) String() string {
	return a.Protocol.String() + "://" + net.JoinHostPort(a.Addr.String(), a.Ports.String())
}

// Single reports whether a has one port. Traffic to a range of ports goes to the same port of
// the downstream.
func (a Address) Single() bool { return a.Ports.First == a.Ports.Last }

// Endpoints returns the ports of a one by one.
func (a Address) Endpoints() (all []Endpoint) {
	for port := int(a.Ports.First); port <= int(a.Ports.Last); port++ {
		all = append(all, Endpoint{a.Protocol, netip.AddrPortFrom(a.Addr, uint16(port))})
	}
	return all
}

// Endpoint is one port to listen on.
type Endpoint struct {
	Protocol Protocol
	Addr     netip.AddrPort
}

func (e Endpoint) String() string { return e.Protocol.String() + "://" + e.Addr.String() }

// Downstream is a host that receives traffic. Traffic to a range of ports goes to
// the same port regardless of Port; a listener with ranges alone has no Port.
type Downstream struct {
	Host           string // an IP address, without brackets, or a name to resolve
	Port           uint16 // 0 is the port that the source connected to
	Weight         int    // 1 to 256; 0 is 1
	MaxConnections int    // max_connections, including UDP flows, 1 to 1048576; 0 is no maximum
	Drained        bool   // gets no connections when first configured: drained by an operator before
}

// String returns d as in the configuration.
func (d Downstream) String() string {
	if d.Port == 0 && strings.Contains(d.Host, ":") {
		return "[" + d.Host + "]"
	}
	return d.Name()
}

// Name returns d as in the API and in logs. It has no brackets without a port.
func (d Downstream) Name() string {
	if d.Port == 0 {
		return d.Host
	}
	return net.JoinHostPort(d.Host, strconv.Itoa(int(d.Port)))
}

// PortFor returns the port of d for traffic to a port. ranged is set if that is of a range.
func (d Downstream) PortFor(port uint16, ranged bool) uint16 {
	if d.Port != 0 && !ranged {
		return d.Port
	}
	return port
}

// Balance is the load balancing policy of a listener.
type Balance uint8

// The load balancing policies, each by weight.
const (
	RoundRobin       Balance = iota
	LeastConnections         // of this proxy
	SourceHash               // the same downstream for all connections of a source, while it is available
)

func (b Balance) String() string {
	return enumName(b, "round-robin", "least-connections", "source-hash")
}

// OnDown is what happens to new TCP connections while no downstream can be reached.
type OnDown uint8

// The choices.
const (
	DownRefuse OnDown = iota // they are reset
	DownHold                 // they wait, up to HoldTimeout
)

func (d OnDown) String() string { return enumName(d, "refuse", "hold") }

// Breaker keeps connections away from a downstream that has failed several times in a row, even if there is no other.
// It is disabled when After is 0.
type Breaker struct {
	After   int           // failures in a row, 1 to 1000
	Of      []Failure     // that count
	For     time.Duration // for which it opens, 10ms to 24h
	Probe   int           // how many connections may try the downstream at once after that, 1 to 100
	Timeout time.Duration // until the first byte of an answer, 10ms to 1h, for FailedFirstByte
	Reply   string        // to clients that are refused meanwhile, as that of a limit; empty: they are reset
}

// Failure is a way in which a downstream fails a connection.
type Failure uint8

// The ways in which downstreams fail.
const (
	FailedDial      Failure = iota // it could not be connected
	FailedReset                    // it has reset a connection to which it owed an answer
	FailedFirstByte                // it has closed a connection before its first byte, or has not sent that in time
)

func (f Failure) String() string { return enumName(f, "dial", "reset", "first-byte") }

// ProxyVersion is a version of the PROXY protocol.
type ProxyVersion uint8

// Versions of the PROXY protocol. ProxyV1 is for TCP alone.
const (
	NoProxy ProxyVersion = iota
	ProxyV1
	ProxyV2
)

func (v ProxyVersion) String() string { return enumName(v, "off", "v1", "v2") }

// HealthCheck is an active health check of downstreams: whether they accept a TCP connection, and what they say then.
// It is disabled when Interval is 0.
type HealthCheck struct {
	Interval, Timeout time.Duration // 10ms to 1h
	Send, Expect      string        // bytes: what to send, and how the answer must begin; at most 1024 and 256
	Rise, Fall        int           // consecutive checks that succeed, or fail, 1 to 1000
}
