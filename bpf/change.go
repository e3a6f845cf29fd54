package bpf

import (
	"net/netip"
	"os"
	"slices"
	"strings"

	"shaperd/shaper"
)

// Change is a policy with its attachments, ready to be put in force.
type Change struct {
	plane       *Plane
	attachments []Attachment
	listeners   []netip.AddrPort
	policy      *shaper.Policy
	numbers     numbers
	wanted      map[side]*target
	programs    shelf // loaded for this
	added       []*point
	changed     map[*point]*programs
}

// Prepare makes everything ready that may fail to put attachments, and the policy
// that names them, in force. Nothing is enforced, or enforced otherwise, before
// Commit; Cancel takes back what was made. An interface that is not there is
// attached to when it appears. At listeners the proxy takes TCP: what it takes is
// not counted at attachments. See [Plane.Own] too.
func (p *Plane) Prepare(attachments []Attachment, listeners []netip.AddrPort, policy *shaper.Policy) (*Change, error) {
	p.changing.Lock()
	c := &Change{
		plane: p, attachments: slices.Clone(attachments), listeners: slices.Clone(listeners), policy: policy,
		programs: shelf{}, changed: map[*point]*programs{},
	}
	err := c.load() // others look at the plane meanwhile
	if err == nil {
		err = c.prepare()
	}
	if err != nil {
		c.Cancel()
		return nil, err
	}
	return c, nil
}

// load loads the programs that the change takes: those of points that are new or
// changed, and of interfaces that may appear.
func (c *Change) load() (err error) {
	p := c.plane
	if c.wanted, err = wantedPoints(c.attachments); err != nil {
		return err
	}
	if c.numbers, err = p.kernel.number(c.policy, c.attachments, c.former()); err != nil {
		return err
	}
	c.numbers.fresh = c.moved()
	if err := p.beat(); err != nil {
		return err
	}
	if !p.sweeping && slices.ContainsFunc(c.attachments, func(a Attachment) bool { return a.counts(c.policy) }) {
		if err := p.kernel.sweep(); err != nil {
			return privileges(err)
		}
		p.sweeping = true
	}
	since := p.kernel.Generation + 1 // until then what is attached lets everything pass
	for key, w := range c.wanted {
		if present := p.points[key]; present == nil || !present.fits(w.Attachment, c.policy) {
			if _, err := c.programs.get(p.kernel, c.purpose(w.Attachment, w.ethernet()), since); err != nil {
				return attachError(w.Attachment, w.name(), err)
			}
		}
	}
	for i := range c.attachments {
		a := &c.attachments[i]
		f := c.purpose(a, true)
		if p.programs[f] != nil || c.programs[f] != nil {
			continue
		}
		if _, err := c.programs.get(p.kernel, f, since); err != nil {
			return attachError(a, strings.Join(a.Interfaces, " or "), err)
		}
	}
	return nil
}

// former returns which attachment each one replaces that comes to the interface of one which
// goes: an attachment that is renamed keeps its connections.
func (c *Change) former() map[string]string {
	present := map[string]bool{}
	for _, pt := range c.plane.points {
		present[pt.Name] = true
	}
	former := map[string]string{}
	for key, w := range c.wanted {
		pt := c.plane.points[key]
		if pt != nil && !present[w.Name] && !slices.ContainsFunc(c.attachments, func(a Attachment) bool { return a.Name == pt.Name }) {
			former[w.Name] = max(former[w.Name], pt.Name)
		}
	}
	return former
}

// moved returns the places that have none of the interfaces where they were: what is known of
// replies there holds no more.
func (c *Change) moved() (places []uint32) {
	stays := map[uint32]bool{}
	for key, w := range c.wanted {
		place := c.numbers.attachments[w.Name]
		if pt := c.plane.points[key]; pt != nil {
			was, ok := c.plane.kernel.Attachments[pt.Name]
			stays[place] = stays[place] || ok && was == place
		}
	}
	for _, place := range c.numbers.attachments {
		if !stays[place] {
			places = append(places, place)
		}
	}
	return places
}

func (c *Change) purpose(a *Attachment, ethernet bool) purpose {
	return purposeOf(a, c.numbers, c.policy, ethernet)
}

func (c *Change) prepare() error {
	p := c.plane
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.kernel.addListeners(c.listeners); err != nil {
		return err
	}
	for key, w := range c.wanted {
		a, present := w.Attachment, p.points[key]
		if present != nil && present.fits(a, c.policy) {
			continue
		}
		progs := c.programs[c.purpose(a, w.ethernet())]
		if present != nil && present.Hook == a.Hook && present.detours() == a.detours() {
			c.changed[present] = progs
			if a.Mode == Shape && present.Mode != Shape {
				if err := p.addQueue(key, a); err != nil {
					return attachError(a, present.ifname, privileges(err))
				}
			}
			continue
		}
		pt, err := p.attach(key, a, progs)
		if err != nil {
			return err
		}
		c.added = append(c.added, pt)
	}
	return nil
}

// Cancel takes back what Prepare made.
func (c *Change) Cancel() {
	defer c.plane.changing.Unlock()
	c.plane.mu.Lock()
	defer c.plane.mu.Unlock()
	c.takeBack()
}

func (c *Change) takeBack() {
	for _, pt := range c.added {
		_ = pt.detach()
	}
	c.programs.close()
	_ = c.plane.kernel.keepListeners(c.plane.listeners)
	c.plane.fault("queues", c.plane.tidy())
	c.plane.save()
}

// Commit puts the change in force. On an error all stays as it was.
func (c *Change) Commit() error {
	p := c.plane
	defer p.changing.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.kernel.adoptPolicy(c.policy, c.numbers, monotonic); err != nil {
		c.takeBack()
		return err
	}
	p.fault("registry", p.kernel.save()) // the policy is in force, whatever a daemon to come knows
	p.fault("counters", p.sync())        // those of limits that go
	p.attachments, p.listeners, p.numbers, p.policy = c.attachments, c.listeners, c.numbers, c.policy
	p.kernel.freeWatches(p.policy, p.numbers, true) // what was taken back since the swap was forgotten with the rest
	p.fault("listeners", p.kernel.keepListeners(c.listeners))
	for pt, progs := range c.changed {
		p.fault(pt.String(), p.replace(pt, progs, c.wanted[pt.key()].Attachment))
	}
	for _, pt := range c.added {
		if old := p.points[pt.key()]; old != nil {
			p.drop(old) // it is at another hook
		}
		p.points[pt.key()] = pt
		p.log.Info("attached", "attachment", pt.Name, "interface", pt.ifname, "direction", way(pt.Ingress), "mode", pt.Mode.String())
	}
	for key, pt := range p.points {
		if c.wanted[key] == nil {
			p.drop(pt)
		}
	}
	for _, pt := range p.failed {
		delete(p.faults, pt.Attachment+" at "+pt.Interface)
	}
	p.failed = nil
	p.programs.take(c.programs)
	p.programs.keep(func(f purpose) bool {
		return slices.ContainsFunc(p.attachments, func(a Attachment) bool {
			return f == purposeOf(&a, p.numbers, p.policy, f.at.Ethernet != 0)
		})
	})
	p.uncount()
	p.fault("queues", p.tidy())
	p.save()
	for _, other := range p.otherFolders() {
		p.fault(other, os.RemoveAll(other))
	}
	p.looks.Do(p.look)
	return nil
}
