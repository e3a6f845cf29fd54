package shaper

import (
	"fmt"
	"math/bits"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper/asn"
	"shaperd.dev/shaperd/shaper/quota"
)

// MaxLimits is the maximum number of limits of a policy: limit i owns bit i of a [Set].
const MaxLimits = 64

// MaxAttachments is the maximum number of attachments.
const MaxAttachments = 64

// MaxConnectionLimits is the maximum number of limits with Connections that match one
// attachment: a connection is counted under up to this many.
const MaxConnectionLimits = 4

// Limit is one rule: it matches traffic, splits it by key into buckets, and configures
// the rates and caps of each bucket.
//
// Its buckets live in one plane. A limit that matches attachments belongs to the packet
// plane; any other belongs to the proxy plane.
type Limit struct {
	Name  string // unique; identifies the limit's buckets over reloads
	Match Match

	// Except are sources that the limit does not apply to.
	Except Sources

	// For and BySource have the values of the buckets of some sources, others than those of the limit. The longest prefix of
	// a source decides; of two equal ones that of BySource, and the later one in it. That a group has its AS decides if no prefix
	// does. Buckets by source, in the proxy plane, not shared.
	For      []Tier
	BySource []SourceValues

	ValuesFile string // that BySource is from, for messages

	// Key splits the matched traffic; each distinct key has a bucket and a
	// connection count of its own. The zero Fields is one bucket for all.
	Key        Fields
	TLV        uint8 // type of the value in the PROXY protocol header that is in the key, with KeyTLV
	IPv4Prefix int   // bits of an IPv4 source or destination in the key, 1 to 32
	IPv6Prefix int   // bits of an IPv6 source or destination in the key, 1 to 128

	// Shared is one bucket per key for all hosts of a group, in either plane: each host
	// may use parts of it, as its Lease says.
	Shared bool

	Direction Direction // ToDownstream at attachments, which see one direction

	Rate         uint64    // bit/s of L4 payload, 8 to 1e12; 0 means unlimited
	Packets      Frequency // datagrams or packets; zero means unlimited
	Burst        uint64    // bytes; 0 is strict smoothing
	BurstPackets uint64    // packets; 0 is strict smoothing
	Overhead     int       // bytes charged for each packet in addition to its payload, 0 to 1000
	MaxDelay     time.Duration
	Scheduling   Scheduling // scheduling of a bucket's queue; proxy plane only

	// Turns are the levels by which those that wait for a bucket take turns, from the widest to the narrowest, the last
	// one TurnSource; nil is that one alone. Proxy plane only.
	Turns []TurnBy

	// ECNMark is the percentage of MaxDelay beyond which an ECN-capable packet
	// that has to wait is marked CE, 1 to 100. Packet plane only. No packet is
	// marked with 100, as it would be dropped, nor with 0.
	ECNMark int

	// In the packet plane these limits count TCP connections. A SYN does not wait for
	// a slot there; it may be delayed by NewConnections.
	MaxConnections   int       // maximum in flight per key; 0 is unlimited
	NewConnections   Frequency // per key; zero is unlimited
	BurstConnections uint64    // new ones that may come at once after a pause; 0 and 1 space all. Not with Shared
	Algorithm        Algorithm // how NewConnections counts; else than LeakyBucket not with Shared

	// Quota is what may pass in a day, a week, a month or any period, for each key: units, or new connections. When it is used
	// up they pass at QuotaSlow, in bit/s, MinRate to MaxRate, or with 0 not at all. Proxy plane, not shared, no key of
	// connections.
	Quota     quota.Quota
	QuotaSlow uint64

	// Adapt makes the maximum in flight follow what the downstream bears, from MinConnections to MaxConnections.
	// Proxy plane, TCP, one bucket, connections wait. Hosts that share it find one maximum together; not with AdaptObserve.
	Adapt          Adaptation
	MinConnections int // with AdaptOn, 1 to MaxConnections

	// SlotFor is what takes a slot. Else than with PerConnection, MaxConnections is how many connections may be in a turn at once.
	// Proxy plane, TCP, no NewConnections.
	SlotFor SlotFor

	// TurnGap is for how long a connection keeps the slot of a turn after bytes have last moved: then it is over, if an
	// answer has begun. Not with PerConnection; 0 to MaxTurnGap.
	TurnGap time.Duration

	// YieldAfter is for how long a TCP connection must have been idle to end when another source waits for its slot,
	// and its own holds more. Proxy plane only; 0 is never.
	YieldAfter time.Duration

	// Reserve is the parts of MaxConnections, Rate and Packets that are reserved for classes, at most all of it. Others borrow them while
	// they are not needed. Proxy plane, not with Shared, Adapt, and rates in a FIFO; connections that need a slot can wait.
	Reserve []Reserve

	QueueTimeout time.Duration // maximum time that a connection waits for admission
	QueueTarget  time.Duration // the same while a source's queue stands, or 0; proxy plane only
	MaxQueue     int           // maximum number of waiting connections, over all keys; proxy plane only

	// Block refuses all matched traffic. A limit that blocks has no other settings and
	// no key, and is not shared.
	Block bool

	// Always enforces a limit that blocks in every mode: of the daemon, of an
	// attachment, and while limits are bypassed.
	Always bool

	// Shed makes l refuse a part of the new connections and UDP flows that it matches, which depends on how short of
	// something this host is. Like one that blocks, such a limit has no other settings. Proxy plane only.
	Shed Shed

	// Penalty blocks sources that l has refused often. Proxy plane, a limit by source on connections, not shared; nil is none.
	Penalty *Penalty

	RefuseWith RefuseWith
	Reply      string // to a refused connection: one of ReplyNames, or a text, which may contain placeholders
	Observe    bool   // compute and count verdicts without enforcing them
}

// InPacketPlane reports whether l belongs to attachments, not to listeners.
func (l *Limit) InPacketPlane() bool { return len(l.Match.Attach) > 0 }

// CountsConnections reports whether l caps or paces connections.
func (l *Limit) CountsConnections() bool {
	return l.MaxConnections > 0 || l.NewConnections.N > 0 || l.HasConnectionQuota()
}

// HasConnectionQuota reports whether l has a quota of new connections.
func (l *Limit) HasConnectionQuota() bool {
	return l.Quota.Amount > 0 && l.Quota.Unit == quota.Connections
}

// HasUnitQuota reports whether l has a quota of bytes or packets.
func (l *Limit) HasUnitQuota() bool { return l.Quota.Amount > 0 && l.Quota.Unit != quota.Connections }

// Paces reports whether units under l pass a bucket: it has a rate, or a quota, of bytes or packets.
func (l *Limit) Paces() bool { return l.HasRate() || l.HasUnitQuota() }

// HasRate reports whether l has a rate, in bytes or packets.
func (l *Limit) HasRate() bool { return l.Rate > 0 || l.Packets.N > 0 }

// CapsConnections reports whether l caps connections in flight, those of an observing limit included.
func (l *Limit) CapsConnections() bool { return l.MaxConnections > 0 && !l.SlotFor.InTurns() }

// HasPool reports whether hosts share l's maximum of connections in flight and lend each other slots of it. At
// attachments each has a fixed part.
func (l *Limit) HasPool() bool { return l.Shared && l.MaxConnections > 0 && !l.InPacketPlane() }

// Pool returns the slots of a limit that hosts share. If it is adaptive, state says how many there are now, and before
// anything is known of what the downstream bears they are few.
func (l *Limit) Pool(state *LimitState, hosts int) SlotPool {
	if l.Adapt != AdaptOn || l.Observe {
		return SlotPool{Most: l.MaxConnections, Hosts: hosts}
	}
	most := hosts
	if found := state.Adaptive.Load(); found != nil && found.Current > 0 {
		most = found.Current
	}
	return SlotPool{Most: min(max(most, l.MinConnections), l.MaxConnections), Hosts: hosts, Lent: true}
}

// NeedsTickets reports whether new connections of a limit that hosts share pass by tickets of the ledger: a host's part
// would be less than one in the time of a lease, and they can wait for a ticket. It depends on what hosts agree about
// alone, or one would use the bucket of tickets and another that of parts: so max_queue has no say.
func (l *Limit) NeedsTickets(hosts int, lease time.Duration) bool {
	return l.NewConnections.N > 0 && l.QueueTimeout > 0 && !l.InPacketPlane() && !l.Observe &&
		leaky.NewRate(l.NewConnections.N, l.NewConnections.Per).Cost(1).Duration() > lease/time.Duration(hosts)
}

// shape returns the shape of the buckets of l.
func (l *Limit) shape() leaky.Shape {
	rate := l.Rate
	if rate == 0 && l.Packets.N == 0 && l.HasUnitQuota() {
		rate = MaxRate // sources take turns at what is left of a quota
	}
	s := leaky.Shape{
		Bytes:    leaky.NewRate(rate, 8*time.Second),
		Packets:  leaky.NewRate(l.Packets.N, l.Packets.Per),
		Overhead: uint64(l.Overhead),
		MaxDelay: leaky.FromDuration(l.MaxDelay),
	}
	s.BytesBurst = s.Bytes.Cost(l.Burst)
	s.PacketsBurst = s.Packets.Cost(l.BurstPackets)
	return s
}

// SlowShape returns shape, one of l, at QuotaSlow if that is slower.
func (l *Limit) SlowShape(shape *leaky.Shape) leaky.Shape {
	slow := *shape
	if rate := leaky.NewRate(l.QuotaSlow, 8*time.Second); slow.Bytes.Unlimited() || rate.Cost(1) > slow.Bytes.Cost(1) {
		slow.Bytes, slow.BytesBurst = rate, rate.Cost(l.Burst)
	}
	return slow
}

// Frequency is N events every Per. The zero Frequency is unlimited.
type Frequency struct {
	N   uint64
	Per time.Duration
}

// PerSecond returns the number of events per second, or 0 if f is unlimited.
func (f Frequency) PerSecond() float64 {
	if f.N == 0 {
		return 0
	}
	return float64(f.N) / f.Per.Seconds()
}

// Match selects traffic. An empty field matches all; all fields must match, each by at
// least one of its values.
type Match struct {
	Listen      []string // names of listeners
	Attach      []string // names of attachments; if empty the limit belongs to listeners
	Protocol    Protocol
	Source      []netip.Prefix
	Destination []netip.Prefix // packet plane only
	ASN         []uint32
	Country     []asn.Country // of sources; 0 is unknown
	Group       []string      // names of groups of sources
	Port        []PortRange   // destination ports, as the source sees them
	DSCP        []DSCP        // packet plane only, for limits that do not count connections
	Mark        []Mark        // as DSCP, and not at XDP
	Cgroup      []string      // control groups of local processes, see ParseCgroup; as Mark, and at egress
}

// PortRange is the ports First to Last, both included.
type PortRange struct{ First, Last uint16 }

func (r PortRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// Protocol is a transport protocol.
type Protocol uint8

// The protocols, with their names in configuration. In a match AnyProtocol is all
// of IP; in a flow it is any other protocol.
const (
	AnyProtocol Protocol = iota // ""
	TCP                         // "tcp"
	UDP                         // "udp"
	ICMP                        // "icmp": ICMP and ICMPv6; packet plane only
	numProtocols
)

func (p Protocol) String() string { return enumName(p, "any", "tcp", "udp", "icmp") }

// Direction is a direction of traffic.
type Direction uint8

// The directions. A limit of Both has one bucket for the sum.
const (
	ToDownstream Direction = iota
	FromDownstream
	Both
)

func (d Direction) String() string {
	return enumName(d, "to-downstream", "from-downstream", "both")
}

// Fields is the set of fields of a key.
type Fields uint16

// The fields of a key.
const (
	KeySource      Fields = 1 << iota // source address, masked to a prefix
	KeyASN                            // AS of the source, 0 if unknown
	KeyPort                           // destination port
	KeyListen                         // listener
	KeyConnection                     // connection or UDP flow; 5-tuple in the packet plane
	KeyAttach                         // attachment
	KeyDestination                    // address that the source connects or sends to, masked to a prefix; not with KeySource
	KeyDownstream                     // downstream, 0 if there is none; proxy plane only
	KeyCountry                        // country of the source, 0 if unknown
	KeyTLV                            // Limit.TLV in the PROXY header, 0 if there is none; proxy plane only
)

const keyAddress = KeySource | KeyDestination // a key has one

var fieldNames = [...]string{"source", "asn", "port", "listen", "connection", "attach", "destination", "downstream", "country", "tlv"}

// FieldNames returns the names of the fields in configuration, in the order of
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

// KeyText returns the fields of the key of l as in configuration: "source,tlv:0xe0".
func (l *Limit) KeyText() string {
	text := l.Key.String()
	if l.Key&KeyTLV != 0 {
		text = strings.Replace(text, fieldNames[bits.TrailingZeros16(uint16(KeyTLV))], TLVName(l.TLV), 1)
	}
	return text
}

// TLVName returns a type of values in PROXY headers as in keys: "tlv:0xe0".
func TLVName(tlvType uint8) string { return fmt.Sprintf("tlv:%#02x", tlvType) }

// Scheduling is the scheduling of a bucket's queue.
type Scheduling uint8

// The kinds of scheduling.
const (
	ScheduleFair Scheduling = iota // fair queueing over sources, then over the connections or flows of a source
	ScheduleFIFO                   // first in, first out
)

func (s Scheduling) String() string { return enumName(s, "fair", "fifo") }

// RefuseWith is the response to a refused connection. A refused datagram is dropped without a
// response, except with RefuseReject at a listener.
type RefuseWith uint8

// The responses to a refused connection.
const (
	RefuseReset  RefuseWith = iota // RST: the client fails at once
	RefuseClose                    // FIN, as if the downstream had closed; proxy plane only
	RefuseDrop                     // none: the client retries; packet plane, and UDP listeners
	RefuseReply                    // Limit.Reply, then FIN; proxy plane only
	RefuseReject                   // "port unreachable" for a UDP datagram, RST for TCP; proxy plane only
)

func (e RefuseWith) String() string {
	return enumName(e, "reset", "close", "drop", "reply", "reject")
}
