// Owner: Plane.mu.

package bpf

import (
	"errors"
	"strconv"

	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/shaper"
)

// point is an attachment at one interface.
type point struct {
	shaper.Attachment
	ifindex int
	ifname  string
	limiter attach.Link
	replies attach.Link // of the reply program; nil without one
	loaded  bool        // its programs were loaded by this daemon, not by an earlier one
	limits  uint32      // number of limits that its programs are loaded for

	preceding []string    // programs and filters that run before it
	coverage  [2]coverage // by role
	uncovered [2]error    // by role: why packets miss the program
}

func (pt *point) key() attach.Point {
	return attach.Point{Ifindex: pt.ifindex, Ingress: pt.Direction == shaper.Ingress}
}

// replyPoint is where the reply program is attached.
func (pt *point) replyPoint() attach.Point {
	return attach.Point{Ifindex: pt.ifindex, Ingress: pt.Direction == shaper.Egress}
}

func (pt *point) saved() savedPoint {
	return savedPoint{pt.Name, pt.ifindex, pt.Direction == shaper.Ingress, pt.Hook, pt.EffectiveMode(), pt.replies != nil}
}

// Subjects of a point's faults.
func (pt *point) String() string          { return pointName(pt.Name, pt.ifname) }
func (pt *point) redirectSubject() string { return "redirect, " + pt.String() }
func (pt *point) coverageSubject(r attach.Role) string {
	return "enforcement, " + pt.String() + [...]string{attach.Limiter: "", attach.ReplyTracker: ", replies"}[r]
}

// pointName returns the name of an attachment's point at an interface.
func pointName(attachment, ifname string) string { return attachment + " at " + ifname }

// fits reports whether the programs of a point suit a under p.
func (pt *point) fits(a *shaper.Attachment, p *shaper.Policy) bool {
	return pt.loaded && pt.Name == a.Name && pt.EffectiveMode() == a.EffectiveMode() && pt.Hook == a.Hook && pt.OnStop == a.OnStop &&
		pt.Queue == a.Queue && pt.IdleTimeout == a.IdleTimeout &&
		(pt.replies != nil) == countsConnections(a, p) && pt.limits == programLimits(a, p)
}

// repliesPin is the suffix of the pin of a reply program.
const repliesPin = "-replies"

// attach attaches programs to an interface.
func (p *Plane) attach(key attach.Point, a *shaper.Attachment, progs *programs) (*point, error) {
	l, err := netlink.LinkByIndex(key.Ifindex)
	if err != nil {
		return nil, attachError(a, strconv.Itoa(key.Ifindex), err)
	}
	pt := &point{Attachment: *a, ifindex: key.Ifindex, ifname: l.Attrs().Name, loaded: true, limits: progs.limits}
	if err := p.attachTo(l, pt, progs); err != nil {
		return nil, attachError(a, pt.ifname, explainPermission(err))
	}
	return pt, nil
}

// attachTo attaches a point's programs and queue. On an error removeUnused removes the queue.
func (p *Plane) attachTo(l netlink.Link, pt *point, progs *programs) error {
	s := pt.saved()
	s.Counts = progs.replies != nil
	if err := p.kernel.recordPoint(l, s); err != nil {
		return err
	}
	if pt.Shapes() {
		if err := p.addQueue(pt.key(), &pt.Attachment); err != nil {
			return err
		}
	}
	at, ifb := pt.key(), l
	var err error
	if attach.UsesIFB(&pt.Attachment) {
		if ifb, err = pt.link(); err != nil {
			return err
		}
		at = attach.Point{Ifindex: ifb.Attrs().Index}
	}
	pin := s.pin(p.dir)
	if pt.limiter, err = attach.Attach(attach.Options{Hook: pt.Hook, At: at, Role: attach.Limiter, Program: progs.limit, Pin: pin}); err != nil {
		return err
	}
	if err = pt.attachReplies(progs, pin); err == nil && attach.UsesIFB(&pt.Attachment) {
		err = p.redirect(l, ifb, &pt.Attachment)
	}
	if err != nil {
		err = errors.Join(err, pt.detach())
	}
	return err
}

// redirect redirects packets that come in at l to ifb, unless a foreign program conflicts.
func (p *Plane) redirect(l, ifb netlink.Link, a *shaper.Attachment) error {
	all, err := attach.FindForeign(a, l, p.ownLinks())
	if err == nil {
		err = attach.RedirectConflict(all)
	}
	if err != nil {
		return err
	}
	return attach.AddRedirect(l, ifb)
}

// attachReplies attaches the reply program, if there is one, in the other direction.
func (pt *point) attachReplies(progs *programs, pin string) (err error) {
	if progs.replies != nil {
		o := pt.repliesOptions(pin)
		o.Program = progs.replies
		pt.replies, err = attach.Attach(o)
	}
	return err
}

// repliesOptions are the options of the reply program of a point whose limiter has a pin.
func (pt *point) repliesOptions(pin string) attach.Options {
	return attach.Options{Hook: replyHook(pt.Hook), At: pt.replyPoint(), Role: attach.ReplyTracker, Pin: pin + repliesPin}
}

// detach detaches the programs. removeUnused removes the queue.
func (pt *point) detach() error {
	err := pt.limiter.Detach()
	if pt.replies != nil {
		err = errors.Join(err, pt.replies.Detach())
	}
	return err
}

// addQueue creates the queue of a, or updates an existing one.
func (p *Plane) addQueue(key attach.Point, a *shaper.Attachment) error {
	l, err := netlink.LinkByIndex(key.Ifindex)
	if err != nil {
		return err
	}
	// Before a device is created for it. If the queue exists but is not recorded, the qdisc
	// before it is unknown.
	if p.kernel.queueAt(key) == nil {
		if err := p.kernel.recordQueue(key, nil); err != nil {
			return err
		}
	}
	if attach.UsesIFB(a) {
		if l, err = attach.SetUpIFB(l); err != nil {
			return err
		}
	}
	return queueFor(a).SetUp(l, func(was attach.SavedQdiscs) error { return p.kernel.recordQueue(key, was) })
}

// link returns the interface whose queue holds the packets of a point.
func (pt *point) link() (netlink.Link, error) {
	if attach.UsesIFB(&pt.Attachment) {
		return netlink.LinkByName(attach.IFBName(pt.ifindex))
	}
	return netlink.LinkByIndex(pt.ifindex)
}

// check returns an error when a point has changed: attach.ErrDetached when packets do not
// pass its programs, attach.ErrQueueChanged when its queue was replaced.
func (pt *point) check() error {
	err := pt.limiter.Check()
	if err == nil && pt.replies != nil {
		err = pt.replies.Check()
	}
	if err != nil || !pt.Shapes() {
		return err
	}
	if attach.UsesIFB(&pt.Attachment) {
		l, err := netlink.LinkByIndex(pt.ifindex)
		if err != nil {
			return err
		}
		if err := attach.CheckRedirect(l); err != nil {
			return err
		}
	}
	l, err := pt.link()
	if err != nil {
		return err
	}
	return queueFor(&pt.Attachment).Check(l)
}

// replace replaces the programs of a point.
func (p *Plane) replace(pt *point, progs *programs, a *shaper.Attachment) error {
	pin := pt.saved().pin(p.dir)
	if err := pt.limiter.Update(progs.limit); err != nil {
		return err
	}
	pt.loaded, pt.limits, pt.Attachment = true, progs.limits, *a
	if err := pt.replaceReplies(progs, pin); err != nil {
		return err
	}
	if a.Shapes() {
		return p.addQueue(pt.key(), a)
	}
	return nil
}

// replaceReplies attaches, replaces or detaches the reply program.
func (pt *point) replaceReplies(progs *programs, pin string) error {
	switch {
	case pt.replies == nil:
		return pt.attachReplies(progs, pin)
	case progs.replies != nil:
		return pt.replies.Update(progs.replies)
	}
	err := pt.replies.Detach()
	pt.replies = nil
	return err
}

// repin pins the links at another path.
func (pt *point) repin(pin string) error {
	err := pt.limiter.Repin(pin)
	if pt.replies != nil {
		err = errors.Join(err, pt.replies.Repin(pin+repliesPin))
	}
	return err
}

// release closes the links and leaves the programs attached.
func (pt *point) release() {
	pt.limiter.Release()
	if pt.replies != nil {
		pt.replies.Release()
	}
}
