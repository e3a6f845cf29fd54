package shaper

import (
	"net/netip"
	"strings"
	"time"
)

// MaxLimits is how many limits one policy holds: limit i owns bit i of a [Set].
const MaxLimits = 64

// MaxAttachments is how many attachments there may be.
const MaxAttachments = 64

// MaxConnectionLimits is how many limits with Connections may match one
// attachment: so many counts a connection is entered in.
const MaxConnectionLimits = 4

// Limit is one rule: it selects traffic, splits it by key into buckets, and says
// what each bucket is held to.
//
// Its buckets live in one plane. A limit that names attachments is for the
// packets at those; any other is for what the listeners proxy.
type Limit struct {
	Name  string // unique; buckets survive a reload under it
	Match Match

	// Key splits the selected traffic; each distinct key has a bucket and a
	// connection count of its own. The zero Fields is one for all.
	Key        Fields
	IPv4Prefix int // bits of an IPv4 source that make the key, 1 to 32
	IPv6Prefix int // bits of an IPv6 source that make the key, 1 to 128

	Direction Direction // ToDownstream at attachments, which see one direction

	Rate         uint64    // bit/s of L4 payload, 8 to 1e12; 0 means unlimited
	Packets      Frequency // datagrams or packets; zero means unlimited
	Burst        uint64    // bytes; 0 is strict smoothing
	BurstPackets uint64    // packets; 0 is strict smoothing
	Overhead     int       // bytes that each packet counts for beside its payload, 0 to 1000
	MaxDelay     time.Duration
	Share        Share // how a bucket's queue is shared; at listeners alone

	// ECNMark is the percentage of MaxDelay beyond which an ECN-capable packet
	// that has to wait is marked CE, 1 to 100. At attachments alone. No packet is
	// marked with 100, as it would be dropped, nor with 0.
	ECNMark int

	// At attachments connections are those of TCP. None waits for a slot there,
	// and a SYN waits for its turn in NewConnections.
	Connections    int           // in flight for each key; 0 is no cap
	NewConnections Frequency     // for each key; zero means unlimited
	MaxWait        time.Duration // a connection may wait this long
	MaxWaiting     int           // connections that may wait at once, over all keys; at listeners alone

	// Block refuses all that the limit matches. It asks for nothing else then, and
	// has one key.
	Block bool

	// Always enforces a limit that blocks in every mode: of the daemon, of an
	// attachment, and while limits are bypassed.
	Always bool

	Excess  Excess
	Reply   string // what a refused connection is told, with RetryAfter in it where that is to stand
	Observe bool   // count what the limit would do, and do nothing
}

// OfAttachments reports whether l is for attachments, and not for listeners.
func (l *Limit) OfAttachments() bool { return len(l.Match.Attach) > 0 }

// CountsConnections reports whether connections take slots or turns under l.
func (l *Limit) CountsConnections() bool { return l.Connections > 0 || l.NewConnections.N > 0 }

// Frequency is N events every Per. The zero Frequency is no limit.
type Frequency struct {
	N   uint64
	Per time.Duration
}

// PerSecond returns how many events a second f is, 0 for no limit.
func (f Frequency) PerSecond() float64 {
	if f.N == 0 {
		return 0
	}
	return float64(f.N) / f.Per.Seconds()
}

// Match selects traffic. An empty field selects all; the fields are joined by
// and, the values of one field by or.
type Match struct {
	Listen      []string // names of listeners
	Attach      []string // names of attachments; none are listeners
	Protocol    Protocol
	Source      []netip.Prefix
	Destination []netip.Prefix // at attachments alone
	ASN         []uint32
	Port        []PortRange // destination ports, as the source sees them
}

// PortRange is the ports First to Last, both included.
type PortRange struct{ First, Last uint16 }

// Protocol is a transport protocol.
type Protocol uint8

// The protocols, with their names in configuration. In a match AnyProtocol is all
// of IP; in a flow it is any other protocol.
const (
	AnyProtocol Protocol = iota // ""
	TCP                         // "tcp"
	UDP                         // "udp"
	ICMP                        // "icmp": ICMP and ICMPv6; at attachments alone
	numProtocols
)

func (p Protocol) String() string { return [...]string{"any", "tcp", "udp", "icmp"}[p] }

// Direction is which way traffic flows.
type Direction uint8

// The directions. Both has one bucket for the sum.
const (
	ToDownstream Direction = iota
	FromDownstream
	Both
)

func (d Direction) String() string {
	return [...]string{"to-downstream", "from-downstream", "both"}[d]
}

// Fields is the set of properties that make up a key.
type Fields uint8

// The properties a key may be made of.
const (
	KeySource     Fields = 1 << iota // source address, cut to a prefix
	KeyASN                           // autonomous system of the source, 0 when unknown
	KeyPort                          // destination port
	KeyListen                        // listener
	KeyConnection                    // each connection or UDP flow apart; each 5-tuple at attachments
	KeyAttach                        // attachment
)

var fieldNames = [...]string{"source", "asn", "port", "listen", "connection", "attach"}

// FieldNames lists the names of the properties in configuration, in the order of
// their bits.
func FieldNames() []string { return fieldNames[:] }

func (f Fields) String() string {
	if f == 0 {
		return "all"
	}
	var names []string
	for i, name := range fieldNames {
		if f&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return strings.Join(names, ",")
}

// Share is how those share a bucket's queue who wait in it.
type Share uint8

// The ways to share.
const (
	ShareFair Share = iota // sources take turns, and the connections or flows of a source
	ShareFIFO              // first come, first served
)

func (s Share) String() string { return [...]string{"fair", "fifo"}[s] }

// Excess is what a refused connection gets, and a refused datagram at listeners: unless it
// is ExcessReject, nothing.
type Excess uint8

// The answers to a refused connection.
const (
	ExcessReset  Excess = iota // RST: the client knows at once
	ExcessClose                // FIN, as if the downstream had closed; at listeners alone
	ExcessDrop                 // nothing: the client tries again; at attachments, and for UDP at listeners
	ExcessReply                // Limit.Reply, and then FIN; at listeners alone
	ExcessReject               // "port unreachable" for a UDP datagram, RST for TCP; at listeners alone
)

func (e Excess) String() string { return [...]string{"reset", "close", "drop", "reply", "reject"}[e] }

// RetryAfter stands in a Reply for the seconds after which the client may try again.
const RetryAfter = "{retry_after}"

// Listener is what a policy has to know of a place where traffic is proxied.
type Listener struct {
	Name     string
	TCP, UDP bool
}

// Attachment is what a policy has to know of a place where packets pass, in one
// direction, through interfaces.
type Attachment struct{ Name string }
