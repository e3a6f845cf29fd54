// Package config turns TOML files into the values the daemon runs on.
//
// A mistake is an [Error] with file, line and column; all mistakes of all files
// are reported together. What loads is sound: it compiles, and no key of it is
// silently without effect.
package config

import (
	"cmp"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"shaperd/shaper"
)

// MaxLimits is how many limits a configuration may have: all but those that operators
// block with.
const MaxLimits = shaper.MaxLimits - 2

// The limits that operators block with, at listeners and at attachments. No configuration
// may have one of these names.
const (
	BlockedName        = "blocked-by-operator"
	BlockedPacketsName = BlockedName + "-packets"
)

// Config is a checked configuration.
type Config struct {
	Daemon      Daemon
	Transparent Transparent
	ASN         ASN
	Listen      []Listen
	Attach      []Attach
	Limits      []shaper.Limit

	limitAt []*node // where each of Limits stands
	asnAt   []*node // where each of ASN.Files stands

	overridden map[string]map[string]string // by limit and key, where a file overrides it
}

// Daemon is what concerns the whole daemon.
type Daemon struct {
	Observe bool   // count what the limits would do, and enforce none
	Metrics string // host:port of the Prometheus endpoint; "" is off
	Page    string // host:port of the web page; "" is off
	Buckets int    // capacity of the bucket table, 1024 to 67108864
	Pins    string // folder, on a bpffs, of what attachments leave in the kernel; an absolute path
}

// Transparent is how packets come to the sockets of transparent listeners.
type Transparent struct {
	Rules Rules
	Mark  int // the firewall mark of such packets, and their routing table: 1 to 2147483647, but for 253 to 255
}

// Rules is who sees to the rules that bring packets to transparent listeners.
type Rules uint8

// Who may see to them.
const (
	RulesInstall Rules = iota // the daemon
	RulesManual
)

func (r Rules) String() string { return [...]string{"install", "manual"}[r] }

// ASN says where the data that maps addresses to AS numbers comes from.
type ASN struct {
	Files []string // not opened here: they need not exist yet
}

// Listen is one listener: where traffic enters, and where it goes.
type Listen struct {
	Name       string
	Addresses  []Address
	Downstream []Downstream
	Balance    Balance
	SlowStart  time.Duration // 0 to 1h
	Check      Check
	EjectAfter int           // dials that fail one after the other, 1 to 1000; 0 is never
	EjectFor   time.Duration // 10ms to 24h

	AcceptProxyFrom []netip.Prefix // sources that announce others, by the PROXY protocol
	SendProxy       ProxyVersion
	Transparent     bool // downstreams see the addresses of sources
	AccessLog       bool // a line for each TCP connection and UDP flow that ends

	ConnectTimeout time.Duration // of one TCP connection attempt, 1ms to 1h

	// Of TCP connections, 10ms to 8760h; 0 is never.
	FirstByteTimeout time.Duration // of the client
	TCPIdleTimeout   time.Duration
	HalfCloseTimeout time.Duration
	MaxLifetime      time.Duration
	MinThroughput    uint64 // bit/s over 10 s; 0 means none

	IdleTimeout time.Duration // of UDP flows, 10ms to 24h
	MaxFlows    int           // UDP flows at once, 1 to 1048576

	MaxFlowsPerSource int // of one IPv4 address or IPv6 prefix of 64 bits, 1 to 1048576
	Amplification     int // of answers to UDP sources that may be forged, 1 to 1000; 0 is no bound
}

// Address is a range of ports to listen on. An IPv6 address takes IPv6 traffic
// alone, the wildcard [::] too: it is meant to be opened with IPV6_V6ONLY.
type Address struct {
	Protocol shaper.Protocol // TCP or UDP
	Addr     netip.Addr      // without a zone, never IPv4-mapped
	Ports    shaper.PortRange
}

func (a Address) String() string {
	return a.Protocol.String() + "://" + net.JoinHostPort(a.Addr.String(), formatPorts(a.Ports))
}

func (a Address) single() bool { return a.Ports.First == a.Ports.Last }

// Downstream is a host that receives traffic. What comes to a range of ports goes
// to the same port whatever Port says; a listener with ranges alone has no Port.
type Downstream struct {
	Host        string // an IP address, without brackets, or a name to resolve
	Port        uint16 // 0 is the port the source asked for
	Weight      int    // 1 to 256
	Connections int    // at once, 1 to 1048576; 0 is no bound
}

// Balance is how a connection's downstream is chosen.
type Balance uint8

// The ways to choose.
const (
	RoundRobin Balance = iota
	LeastConnections
	SourceHash
)

func (b Balance) String() string {
	return [...]string{"round-robin", "least-connections", "source-hash"}[b]
}

// ProxyVersion is a version of the PROXY protocol.
type ProxyVersion uint8

// The versions. The first one is for TCP alone.
const (
	NoProxy ProxyVersion = iota
	ProxyV1
	ProxyV2
)

func (v ProxyVersion) String() string { return [...]string{"off", "v1", "v2"}[v] }

// Check is an active check of downstreams, off when Interval is 0.
type Check struct {
	Interval, Timeout time.Duration // 10ms to 1h
	Rise, Fall        int           // 1 to 1000
}

func (d Downstream) String() string {
	if d.Port != 0 {
		return net.JoinHostPort(d.Host, strconv.Itoa(int(d.Port)))
	}
	if strings.Contains(d.Host, ":") {
		return "[" + d.Host + "]"
	}
	return d.Host
}

// Listeners returns what a policy has to know of the listeners, in their order.
func (c *Config) Listeners() []shaper.Listener {
	listeners := make([]shaper.Listener, len(c.Listen))
	for i, l := range c.Listen {
		listeners[i].Name = l.Name
		for _, a := range l.Addresses {
			listeners[i].TCP = listeners[i].TCP || a.Protocol == shaper.TCP
			listeners[i].UDP = listeners[i].UDP || a.Protocol == shaper.UDP
		}
	}
	return listeners
}

// Attachments returns what a policy has to know of the attachments, in their order.
func (c *Config) Attachments() []shaper.Attachment {
	attachments := make([]shaper.Attachment, len(c.Attach))
	for i, a := range c.Attach {
		attachments[i].Name = a.Name
	}
	return attachments
}

// Error returns an error about c.Limits[limit] that stands at a key of it, such
// as "rate" or "match.listen", or at the limit's header when it has no such key. A
// key that an override has set stands there.
func (c *Config) Error(limit int, key, msg string) *Error {
	n := c.limitAt[limit]
	for _, part := range strings.Split(key, ".") {
		n = n.child(part)
	}
	return n.error(msg)
}

// Overridden returns where a file overrides a limit, by key: "shaperd.toml:3". It must not be
// changed.
func (c *Config) Overridden(limit string) map[string]string { return c.overridden[limit] }

// ASNError returns err, of loading c.ASN.Files, as an error at the file that its
// message begins with.
func (c *Config) ASNError(err error) *Error {
	at := c.asnAt[0]
	for i, path := range c.ASN.Files {
		if strings.HasPrefix(err.Error(), path+":") {
			at = c.asnAt[i]
		}
	}
	return at.error("files: " + err.Error())
}

// Error is a mistake at a place in a configuration file.
type Error struct {
	File         string
	Line, Column int // from 1; columns count bytes
	Msg          string
}

func (e *Error) Error() string {
	return e.File + ":" + strconv.Itoa(e.Line) + ":" + strconv.Itoa(e.Column) + ": " + e.Msg
}

// Errors is the mistakes of a configuration, in the order of its files, lines
// and columns. It is never empty.
type Errors []*Error

// Error returns the mistakes one a line.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, err := range e {
		lines[i] = err.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap lets errors.As find the first *Error.
func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, err := range e {
		errs[i] = err
	}
	return errs
}

// report collects mistakes in any order.
type report struct{ mistakes []mistake }

// maxMistakes bounds the time and the lines that a hopeless file takes.
const maxMistakes = 50

type mistake struct {
	at  *node
	msg string
}

func (r *report) add(at *node, msg string) {
	if !r.full() && !at.migrated {
		r.mistakes = append(r.mistakes, mistake{at, msg})
	}
}

// full reports whether to look no further.
func (r *report) full() bool { return len(r.mistakes) >= maxMistakes }

// errors returns the mistakes in order, or nil.
func (r *report) errors() error {
	if len(r.mistakes) == 0 {
		return nil
	}
	slices.SortStableFunc(r.mistakes, func(a, b mistake) int {
		return cmp.Or(cmp.Compare(a.at.file.order, b.at.file.order), cmp.Compare(a.at.offset, b.at.offset))
	})
	errs := make(Errors, len(r.mistakes))
	for i, m := range r.mistakes {
		errs[i] = m.at.error(m.msg)
	}
	if r.full() {
		last := *errs[len(errs)-1]
		last.Msg = "too many errors: there may be more"
		errs = append(errs, &last)
	}
	return errs
}
