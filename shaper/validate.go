package shaper

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"shaperd/leaky"
)

// LimitError is a limit that cannot be compiled.
type LimitError struct {
	Limit int    // index into the limits given to Compile
	Name  string // of the limit
	Key   string // of the value at fault, as configuration spells it
	Msg   string
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("limit %q: %s: %s", e.Name, e.Key, e.Msg)
}

// Bounds of what a limit may ask for.
const (
	MinRate      = 8 // bit/s
	MaxRate      = 1e12
	MaxMaxDelay  = time.Hour // queue_timeout as well
	MaxPer       = 366 * 24 * time.Hour
	MaxBurstTime = 30 * 24 * time.Hour
	MaxOverhead  = 1000 // bytes
)

// validate finds what cannot be compiled. Configuration has more to say to its
// author; this keeps a Policy sound whoever makes it.
func validate(limits []Limit, listeners []Listener, attachments []Attachment) error {
	if len(limits) > MaxLimits {
		return fmt.Errorf("%d limits: at most %d", len(limits), MaxLimits)
	}
	if len(attachments) > MaxAttachments {
		return fmt.Errorf("%d attachments: at most %d", len(attachments), MaxAttachments)
	}
	var errs []error
	counting := map[string]int{} // limits with connections by attachment
	names := map[string]bool{}
	for i := range limits {
		l := &limits[i]
		bad := func(key, format string, args ...any) {
			errs = append(errs, &LimitError{Limit: i, Name: l.Name, Key: key, Msg: fmt.Sprintf(format, args...)})
		}
		if names[l.Name] {
			bad("name", "used twice")
		}
		names[l.Name] = true
		asks := l.Rate != 0 || l.Packets.N != 0 || l.Connections != 0 || l.NewConnections.N != 0
		if l.Block && (asks || l.Key != 0) {
			bad("block", "refuses all: nothing else can be asked for, and there is no key")
		}
		if l.Always && !l.Block {
			bad("block", "only a limit that blocks is enforced in every mode")
		}
		if !asks && !l.Block {
			bad("rate", "one of rate, packets, connections, new_connections is needed")
		}
		if l.Rate != 0 && (l.Rate < MinRate || l.Rate > MaxRate) {
			bad("rate", "%d bit/s: from %d to 1e12", l.Rate, MinRate)
		}
		if l.Overhead < 0 || l.Overhead > MaxOverhead {
			bad("overhead", "%d bytes: from 0 to %d", l.Overhead, MaxOverhead)
		}
		if l.OfAttachments() {
			l.validateOfAttachments(attachments, counting, bad)
		} else {
			l.validateOfListeners(listeners, bad)
		}
		for _, f := range []struct {
			key  string
			freq Frequency
		}{{"packets", l.Packets}, {"new_connections", l.NewConnections}} {
			if f.freq.N != 0 && (f.freq.Per <= 0 || f.freq.Per > MaxPer) {
				bad(f.key, "%d every %v: every 1ns to %v", f.freq.N, f.freq.Per, MaxPer)
			}
			if f.freq.N > MaxRate {
				bad(f.key, "%d every %v: at most 1e12", f.freq.N, f.freq.Per)
			}
		}
		if l.Connections < 0 || l.MaxWaiting < 0 {
			bad("max_connections", "%d, and max_queue %d: from 0", l.Connections, l.MaxWaiting)
		}
		if l.MaxWait < 0 || l.MaxWait > MaxMaxDelay {
			bad("queue_timeout", "%v: from 0 to %v", l.MaxWait, MaxMaxDelay)
		}
		if l.Match.Protocol >= numProtocols || l.Direction > Both || l.Excess > ExcessReject || l.Share > ShareFIFO || l.Key>>len(fieldNames) != 0 {
			bad("match", "protocol %d, direction %d, excess %d, share %d or key %#x is unknown",
				l.Match.Protocol, l.Direction, l.Excess, l.Share, uint8(l.Key))
		}
		for _, p := range l.Match.Source {
			if !p.IsValid() {
				bad("match.source", "%v is no prefix", p)
			}
		}
		for _, p := range l.Match.Destination {
			if !p.IsValid() {
				bad("match.destination", "%v is no prefix", p)
			}
		}
		for _, r := range l.Match.Port {
			if r.First > r.Last {
				bad("match.port", "%d-%d ends before it begins", r.First, r.Last)
			}
		}
		if l.Key&KeySource != 0 && (l.IPv4Prefix < 1 || l.IPv4Prefix > 32 || l.IPv6Prefix < 1 || l.IPv6Prefix > 128) {
			bad("ipv4_prefix", "/%d and ipv6_prefix /%d: from 1 to 32 and from 1 to 128", l.IPv4Prefix, l.IPv6Prefix)
		}
		if l.MaxDelay < 0 || l.MaxDelay > MaxMaxDelay {
			bad("max_delay", "%v: from 0 to %v", l.MaxDelay, MaxMaxDelay)
		}
		shape := l.shape()
		if longest := leaky.FromDuration(MaxBurstTime); shape.BytesBurst > longest || shape.PacketsBurst > longest {
			bad("burst", "takes more than %v at the rate", MaxBurstTime)
		}
	}
	return errors.Join(errs...)
}

// validateOfListeners finds what a limit of listeners cannot ask for.
func (l *Limit) validateOfListeners(listeners []Listener, bad func(key, format string, args ...any)) {
	for _, name := range l.Match.Listen {
		if !slices.ContainsFunc(listeners, func(n Listener) bool { return n.Name == name }) {
			bad("match.listen", "there is no listener %q", name)
		}
	}
	tcp := slices.IndexFunc(listeners, func(n Listener) bool { return n.TCP && l.Match.listener(n.Name) })
	for _, counts := range []struct {
		key   string
		there bool
	}{{"packets", l.Packets.N != 0}, {"overhead", l.Overhead != 0}} {
		if counts.there && l.Match.Protocol != UDP && tcp >= 0 {
			bad(counts.key, "listener %q proxies TCP, which has no packets here: match protocol \"udp\"", listeners[tcp].Name)
		}
	}
	for _, packet := range []struct {
		key   string
		there bool
	}{
		{"match.destination", len(l.Match.Destination) > 0},
		{"match.protocol", l.Match.Protocol == ICMP},
		{"key", l.Key&KeyAttach != 0},
		{"ecn_mark", l.ECNMark != 0},
		{"refuse_with", l.Excess == ExcessDrop && l.Match.Protocol != UDP},
	} {
		if packet.there {
			bad(packet.key, "only for limits that match attachments")
		}
	}
}

// validateOfAttachments finds what a limit of attachments cannot ask for. It
// counts the limits with connections of each attachment in counting.
func (l *Limit) validateOfAttachments(attachments []Attachment, counting map[string]int, bad func(key, format string, args ...any)) {
	if len(l.Match.Listen) > 0 {
		bad("match.attach", "with match.listen: a limit's buckets live in one plane")
	}
	for _, name := range l.Match.Attach {
		if !slices.Contains(attachments, Attachment{name}) {
			bad("match.attach", "there is no attachment %q", name)
		}
	}
	noTCP := l.Match.Protocol == UDP || l.Match.Protocol == ICMP
	if l.Connections != 0 && noTCP {
		bad("max_connections", "counts TCP connections, and %v has none", l.Match.Protocol)
	}
	if l.NewConnections.N != 0 && noTCP {
		bad("new_connections", "counts TCP connections, and %v has none", l.Match.Protocol)
	}
	if l.Connections != 0 {
		for i, name := range l.Match.Attach {
			if slices.Contains(l.Match.Attach[:i], name) {
				continue
			}
			if counting[name]++; counting[name] > MaxConnectionLimits {
				bad("max_connections", "more than %d limits with max_connections match attachment %q", MaxConnectionLimits, name)
			}
		}
	}
	if l.Match.Protocol == ICMP && len(l.Match.Port) > 0 {
		bad("match.port", "icmp has no ports")
	}
	if l.Direction != ToDownstream {
		bad("direction", "%v: an attachment sees one direction", l.Direction)
	}
	if l.Key&KeyListen != 0 {
		bad("key", "attachments have no listener")
	}
	if l.Excess != ExcessReset && l.Excess != ExcessDrop {
		bad("refuse_with", "%v: only for limits of listeners", l.Excess)
	}
	if l.Share != ShareFair {
		bad("scheduling", "%v: only for limits of listeners", l.Share)
	}
	if l.ECNMark < 0 || l.ECNMark > 100 {
		bad("ecn_mark", "%d %%: from 0 to 100", l.ECNMark)
	}
}

// shape is what a bucket of l is held to.
func (l *Limit) shape() leaky.Shape {
	s := leaky.Shape{
		Bytes:    leaky.NewRate(l.Rate, 8*time.Second),
		Packets:  leaky.NewRate(l.Packets.N, l.Packets.Per),
		Overhead: uint64(l.Overhead),
		MaxDelay: leaky.FromDuration(l.MaxDelay),
	}
	s.BytesBurst = s.Bytes.Cost(l.Burst)
	s.PacketsBurst = s.Packets.Cost(l.BurstPackets)
	return s
}
