package bpf

import (
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
)

// A program that is attached may still meet no packets: what stands before it at the
// interface ends their way, or they take one around all hooks (PACKET_QDISC_BYPASS, AF_XDP,
// XDP_REDIRECT, an offload). So what the interface says that it moved is held against what
// the programs say that they saw.

// proof is what is known of that in one direction.
type proof struct {
	begun       bool
	moved, seen uint64 // at the last look
	ahead       uint64 // seen, and not yet moved
	looks       int    // since the last verdict
	missed, of  uint64 // since then, of so many that were moved
}

const (
	proofPackets = 64 // fewer prove nothing
	proofLooks   = 5  // that those may take
	proofShare   = 20 // one in so many may be missed, as the counts are not of one instant
)

// begin takes the counts that others are held against, when so many packets were seen that
// were not moved yet.
func (f *proof) begin(moved, seen, ahead uint64) {
	*f = proof{begun: true, moved: moved, seen: seen, ahead: ahead}
}

// look takes in counts since any time. Of what was seen, room may not have been moved yet:
// else no more than comes between two looks. It returns how many packets were missed, of
// how many, and whether that is proved.
func (f *proof) look(moved, seen, room uint64) (missed, of uint64, proved bool) {
	if !f.begun || moved < f.moved || seen < f.seen {
		f.begin(moved, seen, 0)
		return 0, 0, false
	}
	newlyMoved, newlySeen := moved-f.moved, seen-f.seen
	f.moved, f.seen = moved, seen
	known := f.ahead + newlySeen
	f.missed += newlyMoved - min(newlyMoved, known)
	f.of += newlyMoved
	f.ahead = min(known-min(newlyMoved, known), max(newlyMoved, newlySeen, room))
	f.looks++
	missed, of = f.missed, f.of
	if proved = of >= proofPackets; proved || f.looks >= proofLooks {
		f.looks, f.missed, f.of = 0, 0, 0
	}
	return missed, of, proved
}

// bypass returns what is to be said of so many packets missed, or nil.
func bypass(missed, of uint64, before []string) error {
	if missed*proofShare <= of {
		return nil
	}
	why := "something takes packets past the hooks (PACKET_QDISC_BYPASS, AF_XDP, XDP_REDIRECT, an offload)"
	if len(before) > 0 {
		why = "it stands behind " + strings.Join(before, ", ")
	}
	return fmt.Errorf("%d of %d packets passed it by: %s", missed, of, why)
}

// inQueues is how many packets there is room for between the programs and the interface's
// count: what queues hold by default, at the most.
const inQueues = 10240

// movedBy returns how many packets an interface says that it moved in a direction, and false
// where that says nothing about the programs at a hook: they are dropped before it, or
// counted twice, or differently.
func movedBy(l netlink.Link, ingress bool, h Hook) (n uint64, ok bool) {
	s := l.Attrs().Statistics
	if s == nil {
		return 0, false
	}
	if !ingress {
		return s.TxPackets, true
	}
	switch l.Type() {
	case "bond", "team": // the sum of what theirs have, with copies that they drop
		return 0, false
	}
	xdp := l.Attrs().Xdp
	attached := xdp != nil && xdp.Attached
	if h == XDP && (!attached || xdp.AttachMode == nl.XDP_ATTACHED_SKB) || h != XDP && attached {
		return 0, false
	}
	return s.RxPackets, true
}

// seenAt returns the place of a count in the map seen.
func seenAt(at side, r role) uint32 {
	i := uint32(at.ifindex)<<2 | uint32(r)
	if !at.ingress {
		i |= 2
	}
	return i & (seenCounts - 1)
}

// seenCounts is SEEN of seen.h.
const seenCounts = 16384

// seen returns how many packets a program has seen.
func (k *kernel) seen(at side, r role) (sum uint64, err error) {
	var cpus []uint64
	if err := k.Seen.Lookup(seenAt(at, r), &cpus); err != nil {
		return 0, fmt.Errorf("read %s: %w", kernelMapSeen, err)
	}
	for _, n := range cpus {
		sum += n
	}
	return sum, nil
}

// prove finds the points that packets pass by.
func (p *Plane) prove(wanted map[side]*target) {
	users := map[uint32]int{} // of counts
	for _, pt := range p.points {
		users[seenAt(pt.key(), limiting)]++
		users[seenAt(pt.otherSide(), noting)]++
	}
	own := p.ownLinks()
	for key, pt := range p.points {
		w := wanted[key]
		if w == nil || !pt.own || users[seenAt(key, limiting)] > 1 || users[seenAt(pt.otherSide(), noting)] > 1 {
			continue
		}
		all, err := pt.foreign(w.link, own)
		p.fault("what stands before "+pt.String(), err)
		if err == nil {
			pt.before = nil
			for _, f := range all {
				pt.before = append(pt.before, f.What)
			}
			if pt.detours() {
				p.fault(pt.detour(), hindrance(all))
			}
		}
		for r, h := range []hook{limiting: pt.hook, noting: pt.replies} {
			if h != nil {
				p.hold(pt, w.link, role(r))
			}
		}
	}
}

// hold takes in the counts of a program of a point.
func (p *Plane) hold(pt *point, l netlink.Link, r role) {
	at, h := pt.key(), pt.Hook
	if r == noting {
		at, h = pt.otherSide(), h.ofReplies()
	}
	moved, ok := movedBy(l, at.ingress, h)
	if !ok {
		pt.proof[r] = proof{}
		return
	}
	seen, err := p.kernel.seen(at, r)
	p.fault(kernelMapSeen, err)
	if err != nil {
		return
	}
	room := uint64(0)
	if !at.ingress {
		room = uint64(max(inQueues, pt.queue().packets))
	}
	if !pt.proof[r].begun && !at.ingress {
		// What was seen by now waits in the queue, or is counted as moved.
		queued, err := queueOf(l)
		if l, linkErr := netlink.LinkByIndex(at.ifindex); err == nil && linkErr == nil {
			moved, _ = movedBy(l, at.ingress, h)
			pt.proof[r].begin(moved, seen, queued.Packets)
		}
		return
	}
	if missed, of, proved := pt.proof[r].look(moved, seen, room); proved {
		pt.bypass[r] = bypass(missed, of, pt.before)
		p.fault(pt.enforcement(r), pt.bypass[r])
	}
}
