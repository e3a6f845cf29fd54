package bpf

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
)

// point is an attachment at an interface.
type point struct {
	Attachment
	ifindex int
	ifname  string
	hook    hook
	replies hook      // of the program for replies; nil without one
	former  *former   // what stood where the queue is; nil without a queue
	progs   *programs // nil for what another daemon attached
}

func (pt *point) key() side { return side{pt.ifindex, pt.Ingress} }

func (pt *point) saved() savedPoint {
	return savedPoint{pt.Name, pt.ifindex, pt.Ingress, pt.Hook, pt.Mode, pt.replies != nil, pt.former}
}

func (pt *point) String() string { return pt.Name + " at " + pt.ifname }

// same reports whether nothing has changed that a program knows.
func (pt *point) same(a *Attachment) bool {
	return pt.progs != nil && pt.Name == a.Name && pt.Mode == a.Mode && pt.Hook == a.Hook && pt.Keep == a.Keep &&
		pt.Queue == a.Queue && pt.IdleTimeout == a.IdleTimeout
}

// programs are the programs of one attachment.
type programs struct {
	limit   *ebpf.Program // holds packets to the limits
	replies *ebpf.Program // takes note of the other direction; nil when no connections are counted
}

func (p *programs) close() {
	_ = p.limit.Close()
	_ = p.replies.Close()
}

// repliesPin ends the name of the pin of a program for replies.
const repliesPin = "-replies"

// load loads the programs of a for an interface.
func (p *Plane) load(a *Attachment, ifindex int, n numbers, counts bool) (*programs, error) {
	// The verifier takes its time, and whoever looks after the heartbeat waits for it.
	if err := p.kernel.beat(); err != nil {
		return nil, fmt.Errorf("heartbeat: %w", err)
	}
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return nil, attachError(a, strconv.Itoa(ifindex), err)
	}
	at := kernelAttachment{
		Place: n.attachments[a.Name], Mode: uint32(a.Mode), Ethernet: number(hasEthernet(l)), Keep: number(a.Keep),
		Egress: number(!a.Ingress), Ifindex: uint32(ifindex), IdleTimeout: uint64(a.IdleTimeout), Since: p.since,
	}
	var tc struct {
		Limit *ebpf.Program `ebpf:"shaperd_tc"`
	}
	var xdp struct {
		Limit *ebpf.Program `ebpf:"shaperd_xdp"`
	}
	var other struct {
		Replies *ebpf.Program `ebpf:"shaperd_replies"`
	}
	if a.Hook == XDP {
		err = p.kernel.load(at, nil, &xdp)
	} else {
		err = p.kernel.load(at, nil, &tc)
	}
	progs := &programs{limit: cmp.Or(tc.Limit, xdp.Limit)}
	if err == nil && counts {
		err = p.kernel.load(at, nil, &other)
		progs.replies = other.Replies
	}
	if err != nil {
		progs.close()
		return nil, attachError(a, l.Attrs().Name, err)
	}
	return progs, nil
}

func number(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// hasEthernet reports whether packets at l begin with an Ethernet header.
func hasEthernet(l netlink.Link) bool {
	switch l.Attrs().EncapType {
	case "ether", "loopback":
		return true
	}
	return false
}

func (p *Plane) attach(key side, a *Attachment, progs *programs) (*point, error) {
	l, err := netlink.LinkByIndex(key.ifindex)
	if err != nil {
		return nil, attachError(a, strconv.Itoa(key.ifindex), err)
	}
	pt := &point{Attachment: *a, ifindex: key.ifindex, ifname: l.Attrs().Name, progs: progs}
	at := key
	if a.detours() {
		ifb, err := setUpIFB(l)
		if err != nil {
			return nil, attachError(a, pt.ifname, privileges(err))
		}
		at = side{ifindex: ifb.Attrs().Index}
	}
	pin := pt.saved().pin(p.dir)
	pt.hook, err = attach(a.Hook, at, limiting, progs.limit, pin)
	if err == nil {
		if err = pt.attachReplies(pin); err == nil && a.Mode == Shape {
			err = pt.addQueue(a)
		}
		if err != nil {
			err = errors.Join(err, pt.detachPrograms())
		}
	}
	if err != nil {
		if a.detours() {
			_ = removeIFB(key.ifindex)
		}
		return nil, attachError(a, pt.ifname, privileges(err))
	}
	return pt, nil
}

// attachReplies attaches the program for replies at the other side of the interface,
// if there is one.
func (pt *point) attachReplies(pin string) (err error) {
	if pt.progs.replies != nil {
		pt.replies, err = attach(pt.Hook.ofReplies(), side{pt.ifindex, !pt.Ingress}, noting, pt.progs.replies, pin+repliesPin)
	}
	return err
}

// detachPrograms takes the programs away.
func (pt *point) detachPrograms() error {
	err := pt.hook.detach()
	if pt.replies != nil {
		err = errors.Join(err, pt.replies.detach())
	}
	return err
}

// detours reports whether packets of a pass an intermediate device.
func (a *Attachment) detours() bool { return a.Ingress && a.Mode == Shape }

// addQueue gives a point the queue of a.
func (pt *point) addQueue(a *Attachment) error {
	l, err := netlink.LinkByIndex(pt.ifindex)
	if err != nil {
		return err
	}
	at := l
	if a.detours() {
		if at, err = netlink.LinkByName(ifbName(pt.ifindex)); err != nil {
			return err
		}
	}
	was, err := setUpQueue(at, a.queue())
	if was != nil {
		pt.former = was
	}
	if err == nil && a.detours() {
		err = divert(l, at)
	}
	if err != nil {
		return errors.Join(err, pt.removeQueue())
	}
	return nil
}

// removeQueue takes the queue of a point away, and puts back what stood there.
func (pt *point) removeQueue() error {
	if pt.Ingress {
		return removeIFB(pt.ifindex)
	}
	l, err := netlink.LinkByIndex(pt.ifindex)
	if err != nil {
		return nil // it is gone, with its queue
	}
	return restoreQueue(l, pt.former)
}

// checkQueue returns an error when the queue of a point is not as it was made.
func (pt *point) checkQueue() error {
	l, err := netlink.LinkByIndex(pt.ifindex)
	if err != nil {
		return err
	}
	if pt.Ingress {
		if err := checkDetour(l); err != nil {
			return err
		}
		if l, err = netlink.LinkByName(ifbName(pt.ifindex)); err != nil {
			return err
		}
	}
	return checkQueue(l, pt.queue())
}

// replace puts other programs in place.
func (pt *point) replace(progs *programs, a *Attachment, pin string) error {
	if err := pt.hook.update(progs.limit); err != nil {
		return err
	}
	pt.closePrograms()
	was := pt.Attachment
	pt.progs, pt.Attachment = progs, *a
	if err := pt.replaceReplies(pin); err != nil {
		return err
	}
	if a.Mode == Shape {
		return pt.addQueue(a)
	}
	if was.Mode == Shape {
		return pt.removeQueue()
	}
	return nil
}

// replaceReplies puts the program for replies in place, or takes the one there away.
func (pt *point) replaceReplies(pin string) error {
	switch {
	case pt.replies == nil:
		return pt.attachReplies(pin)
	case pt.progs.replies != nil:
		return pt.replies.update(pt.progs.replies)
	}
	err := pt.replies.detach()
	pt.replies = nil
	return err
}

func (pt *point) detach() error {
	defer pt.closePrograms()
	err := pt.detachPrograms()
	if pt.Mode == Shape {
		err = errors.Join(err, pt.removeQueue())
	}
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

func (pt *point) closePrograms() {
	if pt.progs != nil {
		pt.progs.close()
	}
}
