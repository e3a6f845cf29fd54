package bpf

import (
	"errors"
	"strconv"

	"github.com/vishvananda/netlink"

	"shaperd/shaper"
)

// point is an attachment at an interface.
type point struct {
	Attachment
	ifindex int
	ifname  string
	hook    hook
	replies hook   // of the program for replies; nil without one
	own     bool   // this daemon has attached it
	limits  uint32 // that its programs are loaded for

	before []string // what packets meet before it
	proof  [2]proof // by role
	bypass [2]error // by role: why packets do not meet the program
}

func (pt *point) key() side { return side{pt.ifindex, pt.Ingress} }

// otherSide is where the program for replies is.
func (pt *point) otherSide() side { return side{pt.ifindex, !pt.Ingress} }

func (pt *point) saved() savedPoint {
	return savedPoint{pt.Name, pt.ifindex, pt.Ingress, pt.Hook, pt.Mode, pt.replies != nil}
}

// What faults of a point are of.
func (pt *point) String() string { return pt.Name + " at " + pt.ifname }
func (pt *point) detour() string { return "detour, " + pt.String() }
func (pt *point) enforcement(r role) string {
	return "enforcement, " + pt.String() + [...]string{limiting: "", noting: ", of replies"}[r]
}

// fits reports whether the programs of a point do for a under p.
func (pt *point) fits(a *Attachment, p *shaper.Policy) bool {
	return pt.own && pt.Name == a.Name && pt.Mode == a.Mode && pt.Hook == a.Hook && pt.Keep == a.Keep &&
		pt.Queue == a.Queue && pt.IdleTimeout == a.IdleTimeout &&
		(pt.replies != nil) == a.counts(p) && pt.limits == a.limits(p)
}

// repliesPin ends the name of the pin of a program for replies.
const repliesPin = "-replies"

// attach puts programs at an interface.
func (p *Plane) attach(key side, a *Attachment, progs *programs) (*point, error) {
	l, err := netlink.LinkByIndex(key.ifindex)
	if err != nil {
		return nil, attachError(a, strconv.Itoa(key.ifindex), err)
	}
	pt := &point{Attachment: *a, ifindex: key.ifindex, ifname: l.Attrs().Name, own: true, limits: progs.limits}
	if err := p.attachTo(l, pt, progs); err != nil {
		return nil, attachError(a, pt.ifname, privileges(err))
	}
	return pt, nil
}

// attachTo puts a point at an interface. On an error tidy removes its queue.
func (p *Plane) attachTo(l netlink.Link, pt *point, progs *programs) error {
	s := pt.saved()
	s.Counts = progs.replies != nil
	if err := p.kernel.keepPoint(l, s); err != nil {
		return err
	}
	if pt.Mode == Shape {
		if err := p.addQueue(pt.key(), &pt.Attachment); err != nil {
			return err
		}
	}
	at, ifb := pt.key(), l
	var err error
	if pt.detours() {
		if ifb, err = pt.link(); err != nil {
			return err
		}
		at = side{ifindex: ifb.Attrs().Index}
	}
	pin := s.pin(p.dir)
	if pt.hook, err = attach(pt.Hook, at, limiting, progs.limit, pin); err != nil {
		return err
	}
	if err = pt.attachReplies(progs, pin); err == nil && pt.detours() {
		err = p.divert(l, ifb, &pt.Attachment)
	}
	if err != nil {
		err = errors.Join(err, pt.detach())
	}
	return err
}

// divert has packets that come in at l make their detour, if nothing is in its way.
func (p *Plane) divert(l, ifb netlink.Link, a *Attachment) error {
	all, err := a.foreign(l, p.ownLinks())
	if err == nil {
		err = hindrance(all)
	}
	if err != nil {
		return err
	}
	return divert(l, ifb)
}

// attachReplies attaches the program for replies at the other side of the interface,
// if there is one.
func (pt *point) attachReplies(progs *programs, pin string) (err error) {
	if progs.replies != nil {
		pt.replies, err = attach(pt.Hook.ofReplies(), pt.otherSide(), noting, progs.replies, pin+repliesPin)
	}
	return err
}

// detach takes the programs away. The queue is left to tidy.
func (pt *point) detach() error {
	err := pt.hook.detach()
	if pt.replies != nil {
		err = errors.Join(err, pt.replies.detach())
	}
	return err
}

// detours reports whether packets of a pass an intermediate device.
func (a *Attachment) detours() bool { return a.Ingress && a.Mode == Shape }

// addQueue makes the queue of a, or changes the one that is there to it.
func (p *Plane) addQueue(key side, a *Attachment) error {
	l, err := netlink.LinkByIndex(key.ifindex)
	if err != nil {
		return err
	}
	// Before a device is made for it. What stood before one that is there already,
	// which nobody remembers, nobody knows.
	if p.kernel.queueAt(key) == nil {
		if err := p.kernel.keepQueue(key, nil); err != nil {
			return err
		}
	}
	if a.detours() {
		if l, err = setUpIFB(l); err != nil {
			return err
		}
	}
	return setUpQueue(l, a.queue(), func(was former) error { return p.kernel.keepQueue(key, was) })
}

// link returns the interface whose queue holds the packets of a point.
func (pt *point) link() (netlink.Link, error) {
	if pt.detours() {
		return netlink.LinkByName(ifbName(pt.ifindex))
	}
	return netlink.LinkByIndex(pt.ifindex)
}

// check returns an error when a point is not as it was made: errDetached when packets
// do not pass its programs, errQueue when its queue is another.
func (pt *point) check() error {
	err := pt.hook.check()
	if err == nil && pt.replies != nil {
		err = pt.replies.check()
	}
	if err != nil || pt.Mode != Shape {
		return err
	}
	if pt.detours() {
		l, err := netlink.LinkByIndex(pt.ifindex)
		if err != nil {
			return err
		}
		if err := checkDetour(l); err != nil {
			return err
		}
	}
	l, err := pt.link()
	if err != nil {
		return err
	}
	return checkQueue(l, pt.queue())
}

// replace puts other programs in the place of a point's.
func (p *Plane) replace(pt *point, progs *programs, a *Attachment) error {
	pin := pt.saved().pin(p.dir)
	if err := pt.hook.update(progs.limit); err != nil {
		return err
	}
	pt.own, pt.limits, pt.Attachment = true, progs.limits, *a
	if err := pt.replaceReplies(progs, pin); err != nil {
		return err
	}
	if a.Mode == Shape {
		return p.addQueue(pt.key(), a)
	}
	return nil
}

// replaceReplies puts the program for replies in place, or takes the one there away.
func (pt *point) replaceReplies(progs *programs, pin string) error {
	switch {
	case pt.replies == nil:
		return pt.attachReplies(progs, pin)
	case progs.replies != nil:
		return pt.replies.update(progs.replies)
	}
	err := pt.replies.detach()
	pt.replies = nil
	return err
}

// repin pins what holds the programs elsewhere.
func (pt *point) repin(pin string) error {
	err := pt.hook.repin(pin)
	if pt.replies != nil {
		err = errors.Join(err, pt.replies.repin(pin+repliesPin))
	}
	return err
}

// letGo leaves the programs attached.
func (pt *point) letGo() {
	pt.hook.release()
	if pt.replies != nil {
		pt.replies.release()
	}
}
