// Owner: Plane.changeMu.

package bpf

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/shaper"
)

// target is an interface that an attachment matches.
type target struct {
	*shaper.Attachment
	link netlink.Link
}

func (w *target) name() string { return w.link.Attrs().Name }

func (w *target) ethernet() bool { return hasEthernet(w.link) }

// wantedPoints returns the points that attachments ask for. Where two attachments match the
// same point, the first has it, and an error is returned along with the points. When interfaces
// cannot be listed, the points are nil.
func wantedPoints(attachments []shaper.Attachment) (map[attach.Point]*target, error) {
	var errs []error
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	wanted := map[attach.Point]*target{}
	for i := range attachments {
		a := &attachments[i]
		for _, l := range links {
			attrs := l.Attrs()
			if !a.Matches(attrs.Name) || attach.IsIFB(l) {
				continue
			}
			at := attach.Point{Ifindex: attrs.Index, Ingress: a.Direction == shaper.Ingress}
			if other := wanted[at]; other != nil {
				errs = append(errs, fmt.Errorf("attachments %q and %q are both at %s, %s, where their limits would count packets twice: "+
					`change the "interface" of one`, other.Name, a.Name, attrs.Name, a.Direction))
				continue
			}
			wanted[at] = &target{a, l}
		}
	}
	return wanted, errors.Join(errs...)
}

// watchInterfaces checks the interfaces at intervals, and as soon as one that an attachment
// matches appears, disappears or is renamed.
func (p *Plane) watchInterfaces() {
	appeared := make(chan struct{}, 1)
	p.done.Go(func() { p.subscribeLinks(appeared) })
	p.runEveryOr(checkInterval, func() { p.checkInterfaces(true) }, appeared, func() {
		p.checkInterfaces(false)
		p.sleep(linkInterval) // interfaces that appear together are handled together
	})
}

// linkInterval is the minimum time between two checks caused by link events.
const linkInterval = 20 * time.Millisecond

// subscribeLinks receives the kernel's link events. The periodic checks make up for events
// that overflow the socket.
func (p *Plane) subscribeLinks(appeared chan<- struct{}) {
	for {
		updates, done := make(chan netlink.LinkUpdate), make(chan struct{})
		err := netlink.LinkSubscribeWithOptions(updates, done, netlink.LinkSubscribeOptions{
			ErrorCallback: func(error) {}, ReceiveBufferSize: 1 << 20,
		})
		p.mu.Lock()
		p.report("link events", err)
		p.mu.Unlock()
		if err == nil {
			p.filterUpdates(updates, appeared)
			close(done)
			for range updates { // until the subscription ends
			}
		}
		if !p.sleep(checkInterval) {
			return
		}
	}
}

// filterUpdates forwards link events that concern an attachment, until the plane or the subscription ends.
func (p *Plane) filterUpdates(updates <-chan netlink.LinkUpdate, appeared chan<- struct{}) {
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
				default: // a check is pending and will see this too
				}
			}
		}
	}
}

// concerns reports whether an interface should be attached to and is not under its current
// name, or the other way round.
func (p *Plane) concerns(l *netlink.LinkAttrs, gone bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.attachments {
		a := &p.attachments[i]
		pt := p.points[attach.Point{Ifindex: l.Index, Ingress: a.Direction == shaper.Ingress}]
		has := pt != nil && pt.Name == a.Name && pt.ifname == l.Name
		if (a.Matches(l.Name) && !gone) != has {
			return true
		}
	}
	return false
}

// checkInterfaces attaches to interfaces that have appeared and detaches from those that have
// disappeared. With all set it also checks the other points and repairs them.
func (p *Plane) checkInterfaces(all bool) {
	p.changeMu.Lock()
	defer p.changeMu.Unlock()
	wanted, err := wantedPoints(p.attachments)
	missing := map[attach.Point]*programs{}
	faults := map[string]error{"interfaces": err}
	for key, w := range wanted {
		if p.points[key] != nil && !all {
			continue
		}
		progs, err := p.programs.get(p.kernel, programKeyOf(w.Attachment, p.numbers, p.policy, w.ethernet()), 0)
		missing[key] = progs
		if p.points[key] == nil {
			faults[pointName(w.Name, w.name())] = err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for what, err := range faults {
		p.report(what, err)
	}
	if wanted == nil {
		return
	}
	for key, pt := range p.points {
		w := wanted[key]
		if w == nil {
			p.removePoint(pt)
		} else if all {
			p.repair(pt, w)
		}
	}
	for key, w := range wanted {
		if p.points[key] == nil && missing[key] != nil {
			pt, err := p.attach(key, w.Attachment, missing[key])
			if err != nil && interfaceGone(key.Ifindex) {
				delete(wanted, key)
				continue
			}
			p.report(pointName(w.Name, w.name()), err)
			if err == nil {
				p.points[key] = pt
				p.log.Info("attached", "attachment", pt.Name, "interface", pt.ifname)
			}
		}
	}
	if all {
		p.checkCoverage(wanted)
		if p.uncountPending {
			p.uncount()
		}
	}
	p.updateFailed(wanted)
	p.report("queues", p.removeUnused())
	p.savePoints()
}

// removePoint removes a point whose interface is gone.
func (p *Plane) removePoint(pt *point) {
	p.log.Warn("interface removed", "attachment", pt.Name, "interface", pt.ifname)
	p.detachPoint(pt)
	p.uncountPending = true
}

// interfaceGone reports whether an interface no longer exists.
func interfaceGone(ifindex int) bool {
	_, err := netlink.LinkByIndex(ifindex)
	return errors.As(err, new(netlink.LinkNotFoundError))
}

// repair checks a point and restores its queue. A point whose programs see no packets any more
// is removed, so that it is attached again.
func (p *Plane) repair(pt *point, w *target) {
	err := pt.check()
	if err != nil && interfaceGone(pt.ifindex) {
		p.removePoint(pt)
		return
	}
	if err == nil && !pt.fits(w.Attachment, p.policy) {
		err = attach.ErrDetached // Commit could not replace its programs
	}
	if errors.Is(err, attach.ErrQueueChanged) {
		if err = p.addQueue(pt.key(), &pt.Attachment); err == nil {
			p.log.Warn("qdisc was modified externally; restored", "attachment", pt.Name, "interface", pt.ifname)
		}
	}
	p.report(pt.String(), err)
	if errors.Is(err, attach.ErrDetached) { // after other errors the state is unknown
		_ = pt.detach()
		delete(p.points, pt.key())
		p.uncountPending = true
	}
}

// updateFailed collects the points that are wanted and not attached.
func (p *Plane) updateFailed(wanted map[attach.Point]*target) {
	was := p.failed
	p.failed = nil
	present := map[string]map[string]bool{}
	for key, w := range wanted {
		if present[w.Name] == nil {
			present[w.Name] = map[string]bool{}
		}
		present[w.Name][w.name()] = true
		if p.points[key] == nil {
			err := cmp.Or(p.faults[pointName(w.Name, w.name())], "not attached")
			p.failed = append(p.failed, PointStatus{Attachment: w.Name, Interface: w.name(), Direction: w.Direction, Mode: w.EffectiveMode(), Err: err})
		}
	}
	for _, pt := range was {
		if !present[pt.Attachment][pt.Interface] {
			delete(p.faults, pointName(pt.Attachment, pt.Interface))
		}
	}
	for i := range p.attachments {
		a := &p.attachments[i]
		p.report(a.Name, missingError(missingInterfaces(a, present[a.Name])))
	}
}
