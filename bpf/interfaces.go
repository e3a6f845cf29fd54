package bpf

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// target is where an attachment is to be.
type target struct {
	*Attachment
	link netlink.Link
}

func (w *target) name() string { return w.link.Attrs().Name }

func (w *target) ethernet() bool { return hasEthernet(w.link) }

// wantedPoints finds where attachments are to be. Where two of them meet, the first has
// the interface, and there is an error beside the points; without them it is another.
func wantedPoints(attachments []Attachment) (map[side]*target, error) {
	var errs []error
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	wanted := map[side]*target{}
	for i := range attachments {
		a := &attachments[i]
		for _, l := range links {
			attrs := l.Attrs()
			if !a.matches(attrs.Name) || isOwnIFB(l) {
				continue
			}
			at := side{attrs.Index, a.Ingress}
			if other := wanted[at]; other != nil {
				errs = append(errs, fmt.Errorf("attachments %q and %q are both at %s, %s, where their limits would count packets twice: "+
					`change the "interface" of one`, other.Name, a.Name, attrs.Name, way(a.Ingress)))
				continue
			}
			wanted[at] = &target{a, l}
		}
	}
	return wanted, errors.Join(errs...)
}

// watch looks after the interfaces: at intervals, and as soon as one of those that
// attachments are for appears, goes or gets another name.
func (p *Plane) watch() {
	appeared := make(chan struct{}, 1)
	p.done.Go(func() { p.subscribe(appeared) })
	p.everyOr(checkInterval, func() { p.check(true) }, appeared, func() {
		p.check(false)
		p.pause(appearInterval) // those that come together are attached to together
	})
}

// appearInterval is the least time between two looks at interfaces that have appeared.
const appearInterval = 20 * time.Millisecond

// subscribe has the kernel say what happens to interfaces. What it has no room to say is
// found at intervals.
func (p *Plane) subscribe(appeared chan<- struct{}) {
	for {
		updates, done := make(chan netlink.LinkUpdate), make(chan struct{})
		err := netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{
			ErrorCallback: func(error) {}, ReceiveBufferSize: 1 << 20,
		})
		p.mu.Lock()
		p.fault("news of interfaces", err)
		p.mu.Unlock()
		if err == nil {
			p.listen(updates, appeared)
			close(done)
			for range updates { // until the subscription has ended
			}
		}
		if !p.pause(checkInterval) {
			return
		}
	}
}

// listen passes on what concerns an attachment, until the plane or the subscription ends.
func (p *Plane) listen(updates <-chan netlink.LinkUpdate, appeared chan<- struct{}) {
	for {
		select {
		case <-p.quit:
			return
		case u, ok := <-updates:
			if !ok {
				return
			}
			if p.concerns(u.Link.Attrs(), u.Header.Type == unix.RTM_DELLINK) {
				select {
				case appeared <- struct{}{}:
				default: // there will be a look, which sees this too
				}
			}
		}
	}
}

// concerns reports whether an interface is one to attach to, and not attached to under
// its name, or the other way round.
func (p *Plane) concerns(l *netlink.LinkAttrs, gone bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.attachments {
		a := &p.attachments[i]
		pt := p.points[side{l.Index, a.Ingress}]
		has := pt != nil && pt.Name == a.Name && pt.ifname == l.Name
		if (a.matches(l.Name) && !gone) != has {
			return true
		}
	}
	return false
}

// check finds interfaces that have appeared or gone, and with all of them what has changed
// at the others, and mends it.
func (p *Plane) check(all bool) {
	p.changing.Lock()
	defer p.changing.Unlock()
	wanted, err := wantedPoints(p.attachments)
	missing := map[side]*programs{}
	faults := map[string]error{"interfaces": err}
	for key, w := range wanted {
		if p.points[key] != nil && !all {
			continue
		}
		progs, err := p.programs.get(p.kernel, purposeOf(w.Attachment, p.numbers, p.policy, w.ethernet()), 0)
		missing[key] = progs
		if p.points[key] == nil {
			faults[w.Name+" at "+w.name()] = err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for what, err := range faults {
		p.fault(what, err)
	}
	if wanted == nil {
		return
	}
	for key, pt := range p.points {
		w := wanted[key]
		if w == nil {
			p.forget(pt)
		} else if all {
			p.mend(pt, w)
		}
	}
	for key, w := range wanted {
		if p.points[key] == nil && missing[key] != nil {
			pt, err := p.attach(key, w.Attachment, missing[key])
			if err != nil && isGone(key.ifindex) {
				delete(wanted, key)
				continue
			}
			p.fault(w.Name+" at "+w.name(), err)
			if err == nil {
				p.points[key] = pt
				p.log.Info("attached", "attachment", pt.Name, "interface", pt.ifname)
			}
		}
	}
	if all {
		p.prove(wanted)
		if p.uncounted {
			p.uncount()
		}
	}
	p.noteAbsent(wanted)
	p.fault("queues", p.tidy())
	p.save()
}

// forget lets go of a point whose interface is gone.
func (p *Plane) forget(pt *point) {
	p.log.Warn("interface is gone", "attachment", pt.Name, "interface", pt.ifname)
	p.drop(pt)
	p.uncounted = true
}

// isGone reports whether there is no interface of a number any more.
func isGone(ifindex int) bool {
	_, err := netlink.LinkByIndex(ifindex)
	return errors.As(err, new(netlink.LinkNotFoundError))
}

// mend finds what has changed at a point. One whose programs packets do not pass any more
// is taken away, to be attached again.
func (p *Plane) mend(pt *point, w *target) {
	err := pt.check()
	if err != nil && isGone(pt.ifindex) {
		p.forget(pt)
		return
	}
	if err == nil && !pt.fits(w.Attachment, p.policy) {
		err = errDetached // Commit could not replace its programs
	}
	if errors.Is(err, errQueue) {
		if err = p.addQueue(pt.key(), &pt.Attachment); err == nil {
			p.log.Warn("somebody had changed the queue", "attachment", pt.Name, "interface", pt.ifname)
		}
	}
	p.fault(pt.String(), err)
	if errors.Is(err, errDetached) { // other errors say that there is no telling
		_ = pt.detach()
		delete(p.points, pt.key())
		p.uncounted = true
	}
}

// noteAbsent finds where attachments are not, though they are to be there.
func (p *Plane) noteAbsent(wanted map[side]*target) {
	was := p.failed
	p.failed = nil
	present := map[string]map[string]bool{}
	for key, w := range wanted {
		if present[w.Name] == nil {
			present[w.Name] = map[string]bool{}
		}
		present[w.Name][w.name()] = true
		if p.points[key] == nil {
			err := cmp.Or(p.faults[w.Name+" at "+w.name()], "it is not attached")
			p.failed = append(p.failed, PointStatus{Attachment: w.Name, Interface: w.name(), Ingress: w.Ingress, Mode: w.Mode, Err: err})
		}
	}
	for _, pt := range was {
		if !present[pt.Attachment][pt.Interface] {
			delete(p.faults, pt.Attachment+" at "+pt.Interface)
		}
	}
	for i := range p.attachments {
		a := &p.attachments[i]
		p.fault(a.Name, noInterface(a.missing(present[a.Name])))
	}
}
