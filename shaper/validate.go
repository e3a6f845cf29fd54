package shaper

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"shaperd.dev/shaperd/shaper/quota"
)

// LimitError is an error in a limit.
type LimitError struct {
	Limit int    // index into the limits given to Compile
	Name  string // name of the limit
	Key   string // configuration key of the invalid value
	Msg   string
}

func (e *LimitError) Error() string {
	return fmt.Sprintf("limit %q: %s: %s", e.Name, e.Key, e.Msg)
}

// Bounds of the values of a limit.
const (
	MinRate      = 8         // bit/s
	MaxRate      = 1e12      // bit/s
	MaxMaxDelay  = time.Hour // of max_delay and queue_timeout
	MaxPer       = 366 * 24 * time.Hour
	MaxBurstTime = 30 * 24 * time.Hour
	MaxOverhead  = 1000 // bytes
)

// validate returns the errors in limits. The configuration has friendlier checks; these
// protect a Policy from any caller.
func validate(r *Rules) error {
	limits, listeners, attachments, groups := r.Limits, r.Listeners, r.Attachments, r.Groups
	if len(limits) > MaxLimits {
		return fmt.Errorf("too many limits: %d (maximum %d)", len(limits), MaxLimits)
	}
	if len(attachments) > MaxAttachments {
		return fmt.Errorf("too many attachments: %d (maximum %d)", len(attachments), MaxAttachments)
	}
	if len(groups) > MaxGroups {
		return fmt.Errorf("too many groups: %d (maximum %d)", len(groups), MaxGroups)
	}
	var errs []error
	for i, g := range groups {
		if slices.ContainsFunc(groups[:i], func(o Group) bool { return o.Name == g.Name }) {
			errs = append(errs, fmt.Errorf("group %q: duplicate name", g.Name))
		}
		for _, p := range g.Source {
			if !validSource(p) {
				errs = append(errs, fmt.Errorf("group %q: %v: invalid, or IPv4 in the form of IPv6", g.Name, p))
			}
		}
	}
	if n := len(markMasks(limits)); n > MaxMarkMasks {
		errs = append(errs, fmt.Errorf("too many different masks of marks: %d (maximum %d)", n, MaxMarkMasks))
	}
	if n := len(cgroupsOf(limits)); n > MaxCgroups {
		errs = append(errs, fmt.Errorf("too many different control groups: %d (maximum %d)", n, MaxCgroups))
	}
	counting := map[string]int{} // number of limits with connections, by attachment
	names := map[string]bool{}
	for i := range limits {
		l := &limits[i]
		bad := func(key, format string, args ...any) {
			errs = append(errs, &LimitError{Limit: i, Name: l.Name, Key: key, Msg: fmt.Sprintf(format, args...)})
		}
		if names[l.Name] {
			bad("name", "duplicate name")
		}
		names[l.Name] = true
		limited := l.Paces() || l.MaxConnections != 0 || l.NewConnections.N != 0 || l.Quota.Amount != 0
		if l.Block && (limited || l.Key != 0) {
			bad("block", "cannot be combined with other limits or a key")
		}
		if l.Shed.Any() && (limited || l.Block || l.Shared || l.Key != 0) {
			bad("shed", "cannot be combined with other limits, block or a key")
		}
		if l.Shed != (Shed{}) {
			l.validateShed(limits, bad)
		}
		if l.Shared && (l.Block || l.Key&KeyConnection != 0) {
			bad("shared", "cannot be combined with block, or a key of connections")
		}
		if l.Always && !l.Block {
			bad("block", "must be set for a limit that is enforced in every mode")
		}
		if !limited && !l.Block && !l.Shed.Any() {
			bad("rate", "missing: one of rate, packets, connections, new_connections, quota is required")
		}
		if l.Overhead < 0 || l.Overhead > MaxOverhead {
			bad("overhead", "%d bytes: must be from 0 to %d", l.Overhead, MaxOverhead)
		}
		if l.InPacketPlane() {
			l.validateInPacketPlane(attachments, counting, bad)
		} else {
			l.validateInProxyPlane(listeners, bad)
		}
		l.validateValues(bad)
		l.validateSources(groups, bad)
		l.validateQuota(bad)
		l.validateTurns(bad)
		l.validateReserve(r.Classes, bad)
		if l.Adapt != AdaptOff {
			l.validateAdapt(listeners, bad)
		}
		if l.Penalty != nil {
			l.validatePenalty(listeners, bad)
		}
		if l.Adapt == AdaptOn && (l.MinConnections < 1 || l.MinConnections > l.MaxConnections) {
			bad("min_connections", "%d: must be from 1 to max_connections, %d", l.MinConnections, l.MaxConnections)
		}
		if l.SlotFor.InTurns() {
			l.validateSlotFor(listeners, bad)
		} else if l.TurnGap != 0 {
			bad("turn_gap", "needs slot_for = \"turn\"")
		}
		if l.QueueTarget < 0 || l.QueueTarget > l.QueueTimeout {
			bad("queue_target", "%v: must be from 0 to queue_timeout, %v", l.QueueTarget, l.QueueTimeout)
		}
		if l.QueueTarget != 0 && l.InPacketPlane() {
			bad("queue_target", "unsupported at attachments")
		}
		if l.YieldAfter < 0 {
			bad("yield_after", "%v: must not be negative", l.YieldAfter)
		}
		if l.YieldAfter != 0 && l.Key&KeySource != 0 {
			bad("yield_after", "has no effect with source in key: each source has its own slots")
		}
		if l.YieldAfter != 0 && (l.InPacketPlane() || l.MaxConnections == 0 || l.Match.Protocol == UDP) {
			bad("yield_after", "needs max_connections of TCP at listeners")
		}
		if l.MaxQueue < 0 {
			bad("max_queue", "%d: must not be negative", l.MaxQueue)
		}
		if l.QueueTimeout < 0 || l.QueueTimeout > MaxMaxDelay {
			bad("queue_timeout", "%v: must be from 0 to %v", l.QueueTimeout, MaxMaxDelay)
		}
		for _, e := range []struct {
			key     string
			value   uint16
			invalid bool
		}{
			{"match.protocol", uint16(l.Match.Protocol), l.Match.Protocol >= numProtocols},
			{"direction", uint16(l.Direction), l.Direction > Both},
			{"refuse_with", uint16(l.RefuseWith), l.RefuseWith > RefuseReject},
			{"scheduling", uint16(l.Scheduling), l.Scheduling > ScheduleFIFO},
			{"adapt", uint16(l.Adapt), l.Adapt > AdaptOn},
			{"algorithm", uint16(l.Algorithm), l.Algorithm > SlidingLog},
			{"slot_for", uint16(l.SlotFor), l.SlotFor > PerTransaction},
			{"key", uint16(l.Key), l.Key>>len(fieldNames) != 0},
		} {
			if e.invalid {
				bad(e.key, "invalid value %d", e.value)
			}
		}
		for _, p := range l.Match.Source {
			if !p.IsValid() {
				bad("match.source", "%v", p)
			}
		}
		for _, p := range l.Match.Destination {
			if !p.IsValid() {
				bad("match.destination", "%v", p)
			}
		}
		for _, d := range l.Match.DSCP {
			if d >= NumDSCP {
				bad("match.dscp", "%d: must be from 0 to %d", d, NumDSCP-1)
			}
		}
		for _, group := range l.Match.Cgroup {
			if !validCgroup(group) {
				bad("match.cgroup", "%q: must be an absolute path without \"..\"", group)
			}
		}
		for _, m := range l.Match.Mark {
			if !m.valid() {
				bad("match.mark", "%v: the mask must not be 0, and must have all bits of the value", m)
			}
		}
		for _, r := range l.Match.Port {
			if r.First > r.Last {
				bad("match.port", "invalid range %d-%d", r.First, r.Last)
			}
		}
		if l.TLV != 0 && l.Key&KeyTLV == 0 {
			bad("key", "the type of a TLV has no effect without tlv")
		}
		if l.Key&keyAddress == keyAddress {
			bad("key", "\"source\" and \"destination\" cannot be combined: a key has one address")
		}
		if l.Key&keyAddress != 0 && (l.IPv4Prefix < 1 || l.IPv4Prefix > 32) {
			bad("ipv4_prefix", "/%d: must be from 1 to 32", l.IPv4Prefix)
		}
		if l.Key&keyAddress != 0 && (l.IPv6Prefix < 1 || l.IPv6Prefix > 128) {
			bad("ipv6_prefix", "/%d: must be from 1 to 128", l.IPv6Prefix)
		}
		if l.MaxDelay < 0 || l.MaxDelay > MaxMaxDelay {
			bad("max_delay", "%v: must be from 0 to %v", l.MaxDelay, MaxMaxDelay)
		}
	}
	return errors.Join(errs...)
}

// validateInProxyPlane reports values that are invalid for listeners.
func (l *Limit) validateInProxyPlane(listeners []Listener, bad func(key, format string, args ...any)) {
	for _, name := range l.Match.Listen {
		if !slices.ContainsFunc(listeners, func(n Listener) bool { return n.Name == name }) {
			bad("match.listen", "unknown listener %q", name)
		}
	}
	tcp := slices.IndexFunc(listeners, func(n Listener) bool { return n.Accepts(TCP) && l.Match.matchesListener(n.Name) })
	for _, udpOnly := range []struct {
		key string
		set bool
	}{{"packets", l.Packets.N != 0}, {"overhead", l.Overhead != 0}, {"quota", l.Quota.Unit == quota.Packets}} {
		if udpOnly.set && l.Match.Protocol != UDP && tcp >= 0 {
			bad(udpOnly.key, "unsupported for TCP, which listener %q proxies: match protocol \"udp\"", listeners[tcp].Name)
		}
	}
	if l.Key&KeyDownstream != 0 && l.CountsConnections() {
		bad("key", "downstream: unsupported with max_connections, new_connections and a quota of connections, which are decided before a downstream is chosen")
	}
	for _, packetPlane := range []struct {
		key string
		set bool
	}{
		{"match.destination", len(l.Match.Destination) > 0},
		{"match.dscp", len(l.Match.DSCP) > 0},
		{"match.mark", len(l.Match.Mark) > 0},
		{"match.cgroup", len(l.Match.Cgroup) > 0},
		{"match.protocol", l.Match.Protocol == ICMP},
		{"key", l.Key&KeyAttach != 0},
		{"ecn_mark", l.ECNMark != 0},
		{"refuse_with", l.RefuseWith == RefuseDrop && l.Match.Protocol != UDP},
	} {
		if packetPlane.set {
			bad(packetPlane.key, "unsupported for listeners")
		}
	}
}

// validateAdapt reports what keeps the maximum in flight of l from being adaptive.
func (l *Limit) validateAdapt(listeners []Listener, bad func(key, format string, args ...any)) {
	switch {
	case l.MaxConnections == 0:
		bad("adapt", "needs max_connections, the upper bound of the maximum in flight")
	case l.InPacketPlane():
		bad("adapt", "unsupported at attachments, which do not see the answers of the downstream")
	case l.Match.Protocol == UDP:
		bad("adapt", "unsupported for UDP, whose flows have no end")
	case l.udpListener(listeners) != nil:
		bad("adapt", "unsupported for UDP, which listener %q proxies: match protocol \"tcp\"", l.udpListener(listeners).Name)
	case l.Key != 0:
		bad("adapt", "unsupported with a key: a downstream has one capacity; use a second limit for the key")
	case l.Shared && l.Adapt == AdaptObserve:
		bad("adapt", "\"observe\" is unsupported for a limit that hosts share")
	case l.MaxQueue == 0 || l.QueueTimeout == 0:
		bad("adapt", "needs max_queue and queue_timeout: the capacity of a downstream is measured while connections wait")
	}
}

// udpListener returns a listener whose UDP flows l matches, or nil.
func (l *Limit) udpListener(listeners []Listener) *Listener {
	if l.Match.Protocol != AnyProtocol {
		return nil // UDP alone is refused elsewhere
	}
	if i := slices.IndexFunc(listeners, func(n Listener) bool { return n.Accepts(UDP) && l.Match.matchesListener(n.Name) }); i >= 0 {
		return &listeners[i]
	}
	return nil
}

// validateInPacketPlane reports values that are invalid for attachments. It
// counts the limits with connections of each attachment in counting.
func (l *Limit) validateInPacketPlane(attachments []Attachment, counting map[string]int, bad func(key, format string, args ...any)) {
	if len(l.Match.Listen) > 0 {
		bad("match.attach", "cannot be combined with match.listen: a limit's buckets live in one plane")
	}
	for _, name := range l.Match.Attach {
		if !slices.ContainsFunc(attachments, func(a Attachment) bool { return a.Name == name }) {
			bad("match.attach", "unknown attachment %q", name)
		}
	}
	for _, byPacket := range []struct {
		key string
		set bool
	}{{"match.dscp", len(l.Match.DSCP) > 0}, {"match.mark", len(l.Match.Mark) > 0}, {"match.cgroup", len(l.Match.Cgroup) > 0}} {
		if byPacket.set && l.CountsConnections() {
			bad(byPacket.key, "unsupported with max_connections and new_connections: not every packet of a connection has it")
		}
	}
	for i := range attachments {
		a := &attachments[i]
		if !slices.Contains(l.Match.Attach, a.Name) {
			continue
		}
		if a.Direction == Ingress && len(l.Match.Cgroup) > 0 {
			bad("match.cgroup", "unsupported at attachment %q: only packets at egress have the socket of a local process", a.Name)
		}
		if a.Hook == HookXDP && len(l.Match.Mark) > 0 {
			bad("match.mark", "unsupported at attachment %q: packets have no mark at XDP", a.Name)
		}
	}
	noTCP := l.Match.Protocol == UDP || l.Match.Protocol == ICMP
	if l.MaxConnections != 0 && noTCP {
		bad("max_connections", "unsupported for %v: only TCP connections are counted", l.Match.Protocol)
	}
	if l.NewConnections.N != 0 && noTCP {
		bad("new_connections", "unsupported for %v: only TCP connections are counted", l.Match.Protocol)
	}
	if l.MaxConnections != 0 {
		for i, name := range l.Match.Attach {
			if slices.Contains(l.Match.Attach[:i], name) {
				continue
			}
			if counting[name]++; counting[name] > MaxConnectionLimits {
				bad("max_connections", "too many limits with max_connections match attachment %q (maximum %d)", name, MaxConnectionLimits)
			}
		}
	}
	if l.Match.Protocol == ICMP && len(l.Match.Port) > 0 {
		bad("match.port", "unsupported for icmp")
	}
	if l.Direction != ToDownstream {
		bad("direction", "%v: unsupported for attachments, which have one direction", l.Direction)
	}
	if l.Key&KeyListen != 0 {
		bad("key", "listen: unsupported for attachments")
	}
	if l.Key&KeyDownstream != 0 {
		bad("key", "downstream: unsupported for attachments")
	}
	if l.Key&KeyTLV != 0 {
		bad("key", "tlv: unsupported for attachments")
	}
	if l.RefuseWith != RefuseReset && l.RefuseWith != RefuseDrop {
		bad("refuse_with", "%v: unsupported for attachments", l.RefuseWith)
	}
	if l.Scheduling != ScheduleFair {
		bad("scheduling", "%v: unsupported for attachments", l.Scheduling)
	}
	if l.ECNMark < 0 || l.ECNMark > 100 {
		bad("ecn_mark", "%d %%: must be from 0 to 100", l.ECNMark)
	}
}
