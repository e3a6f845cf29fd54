// Owner: Plane.mu.

package bpf

import (
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/shaper"
)

// An attached program may still miss packets: something before it at the interface consumes
// them, or they bypass all hooks (PACKET_QDISC_BYPASS, AF_XDP, XDP_REDIRECT, an offload). So
// the packet counters of the interface are compared with those of the programs.

// coverage compares the two counters in one direction.
type coverage struct {
	started     bool
	moved, seen uint64 // counters at the last reading
	ahead       uint64 // packets seen and not yet moved
	readings    int    // readings since the last verdict
	missed, of  uint64 // packets missed since the last verdict, of packets moved
}

const (
	coveragePackets  = 64 // minimum of packets for a verdict
	coverageReadings = 5  // maximum of readings to collect them
	coverageShare    = 20 // one in 20 may be missed, as the counters are not read at the same instant
)

// reset sets the counters to compare later ones with. ahead is the number of packets that were
// seen and not moved yet.
func (c *coverage) reset(moved, seen, ahead uint64) {
	*c = coverage{started: true, moved: moved, seen: seen, ahead: ahead}
}

// update takes in the counters. Up to room of the packets seen may not have been moved yet, but
// at least as many as come between two readings. It returns how many packets were missed, of
// how many, and whether that is conclusive.
func (c *coverage) update(moved, seen, room uint64) (missed, of uint64, conclusive bool) {
	if !c.started || moved < c.moved || seen < c.seen {
		c.reset(moved, seen, 0)
		return 0, 0, false
	}
	newlyMoved, newlySeen := moved-c.moved, seen-c.seen
	c.moved, c.seen = moved, seen
	known := c.ahead + newlySeen
	c.missed += newlyMoved - min(newlyMoved, known)
	c.of += newlyMoved
	c.ahead = min(known-min(newlyMoved, known), max(newlyMoved, newlySeen, room))
	c.readings++
	missed, of = c.missed, c.of
	if conclusive = of >= coveragePackets; conclusive || c.readings >= coverageReadings {
		c.readings, c.missed, c.of = 0, 0, 0
	}
	return missed, of, conclusive
}

// coverageError returns an error when too many packets were missed, or nil.
func coverageError(missed, of uint64, before []string) error {
	if missed*coverageShare <= of {
		return nil
	}
	why := "packets bypass the hooks (PACKET_QDISC_BYPASS, AF_XDP, XDP_REDIRECT, an offload)"
	if len(before) > 0 {
		why = "other programs run before it: " + strings.Join(before, ", ")
	}
	return fmt.Errorf("%d of %d packets were not seen: %s", missed, of, why)
}

// maxQueued bounds the packets between the programs and the interface's counter: the largest
// default capacity of a queue.
const maxQueued = 10240

// movedBy returns the packet counter of an interface in a direction, and false where it cannot
// be compared with the programs at a hook: packets are dropped before it, or counted twice, or
// differently.
func movedBy(l netlink.Link, ingress bool, h shaper.Hook) (n uint64, ok bool) {
	s := l.Attrs().Statistics
	if s == nil {
		return 0, false
	}
	if !ingress {
		return s.TxPackets, true
	}
	switch l.Type() {
	case "bond", "team": // the sum over their ports, with copies that they drop
		return 0, false
	}
	xdp := l.Attrs().Xdp
	attached := xdp != nil && xdp.Attached
	if h == shaper.HookXDP && (!attached || xdp.AttachMode == nl.XDP_ATTACHED_SKB) || h != shaper.HookXDP && attached {
		return 0, false
	}
	return s.RxPackets, true
}

// progRoles are the roles of programs as the programs number them.
var progRoles = [...]kernelProgRole{attach.Limiter: kernelProgRoleLIMIT_PROG, attach.ReplyTracker: kernelProgRoleREPLY_PROG}

// packetCountIndex returns the index of a counter in the map packet_counts.
func (k *kernel) packetCountIndex(at attach.Point, r attach.Role) uint32 {
	i := uint32(at.Ifindex)<<2 | uint32(progRoles[r])
	if !at.Ingress {
		i |= 2
	}
	return i & (k.PacketCounts.MaxEntries() - 1)
}

// packetCount returns the number of packets that a program has seen.
func (k *kernel) packetCount(at attach.Point, r attach.Role) (sum uint64, err error) {
	var cpus []uint64
	if err := k.PacketCounts.Lookup(k.packetCountIndex(at, r), &cpus); err != nil {
		return 0, fmt.Errorf("read %s: %w", kernelMapPacketCounts, err)
	}
	for _, n := range cpus {
		sum += n
	}
	return sum, nil
}

// checkCoverage finds the points that packets bypass.
func (p *Plane) checkCoverage(wanted map[attach.Point]*target) {
	users := map[uint32]int{} // of counters: an index may be shared
	for _, pt := range p.points {
		users[p.kernel.packetCountIndex(pt.key(), attach.Limiter)]++
		users[p.kernel.packetCountIndex(pt.replyPoint(), attach.ReplyTracker)]++
	}
	own := p.ownLinks()
	for key, pt := range p.points {
		w := wanted[key]
		if w == nil || !pt.loaded || users[p.kernel.packetCountIndex(key, attach.Limiter)] > 1 || users[p.kernel.packetCountIndex(pt.replyPoint(), attach.ReplyTracker)] > 1 {
			continue
		}
		all, err := attach.FindForeign(&pt.Attachment, w.link, own)
		p.report("programs before "+pt.String(), err)
		if err == nil {
			pt.preceding = nil
			for _, f := range all {
				pt.preceding = append(pt.preceding, f.What)
			}
			if attach.UsesIFB(&pt.Attachment) {
				p.report(pt.redirectSubject(), attach.RedirectConflict(all))
			}
		}
		for r, h := range []attach.Link{attach.Limiter: pt.limiter, attach.ReplyTracker: pt.replies} {
			if h != nil {
				p.readCoverage(pt, w.link, attach.Role(r))
			}
		}
	}
}

// readCoverage compares the counters of one program of a point.
func (p *Plane) readCoverage(pt *point, l netlink.Link, r attach.Role) {
	at, h := pt.key(), pt.Hook
	if r == attach.ReplyTracker {
		at, h = pt.replyPoint(), replyHook(h)
	}
	moved, ok := movedBy(l, at.Ingress, h)
	if !ok {
		pt.coverage[r] = coverage{}
		return
	}
	seen, err := p.kernel.packetCount(at, r)
	p.report(kernelMapPacketCounts, err)
	if err != nil {
		return
	}
	room := uint64(0)
	if !at.Ingress {
		room = uint64(max(maxQueued, queueFor(&pt.Attachment).Packets))
	}
	if !pt.coverage[r].started && !at.Ingress {
		// All packets seen so far are queued, or counted as moved.
		queued, err := attach.QueueOf(l)
		if l, linkErr := netlink.LinkByIndex(at.Ifindex); err == nil && linkErr == nil {
			moved, _ = movedBy(l, at.Ingress, h)
			pt.coverage[r].reset(moved, seen, queued.Packets)
		}
		return
	}
	if missed, of, conclusive := pt.coverage[r].update(moved, seen, room); conclusive {
		pt.uncovered[r] = coverageError(missed, of, pt.preceding)
		p.report(pt.coverageSubject(r), pt.uncovered[r])
	}
}
