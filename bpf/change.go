package bpf

import (
	"net/netip"
	"os"
	"slices"

	"shaperd/shaper"
)

// Change is a policy with its attachments, ready to be put in force.
type Change struct {
	plane       *Plane
	attachments []Attachment
	listeners   []netip.AddrPort
	policy      *shaper.Policy
	numbers     numbers
	wanted      map[side]*Attachment
	added       []*point
	changed     map[*point]*programs
}

// Prepare makes everything ready that may fail to put attachments, and the policy
// that names them, in force. Nothing is enforced, or enforced otherwise, before
// Commit; Cancel takes back what was made. An interface that is not there is
// attached to when it appears. At listeners the proxy takes TCP: what it takes is
// not counted at attachments. See [Plane.Own] too.
func (p *Plane) Prepare(attachments []Attachment, listeners []netip.AddrPort, policy *shaper.Policy) (*Change, error) {
	p.mu.Lock()
	c := &Change{
		plane: p, attachments: slices.Clone(attachments), listeners: slices.Clone(listeners), policy: policy,
		changed: map[*point]*programs{},
	}
	if err := c.prepare(); err != nil {
		c.Cancel()
		return nil, err
	}
	return c, nil
}

func (c *Change) prepare() (err error) {
	p := c.plane
	if c.numbers, err = p.kernel.number(c.policy, c.attachments); err != nil {
		return err
	}
	if c.wanted, err = wantedPoints(c.attachments); err != nil {
		return err
	}
	if err := p.beat(); err != nil {
		return err
	}
	p.since = p.kernel.Generation + 1 // until then what is attached lets everything pass
	defer func() { p.since = 0 }()
	if err := p.kernel.addListeners(c.listeners); err != nil {
		return err
	}
	for key, a := range c.wanted {
		present := p.points[key]
		if present != nil && present.same(a) && (present.replies != nil) == a.counts(c.policy) {
			continue
		}
		progs, err := p.load(a, key.ifindex, c.numbers, a.counts(c.policy))
		if err != nil {
			return err
		}
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
	defer c.plane.mu.Unlock()
	for _, pt := range c.added {
		_ = pt.detach()
	}
	for _, progs := range c.changed {
		progs.close()
	}
	_ = c.plane.kernel.keepListeners(c.plane.listeners)
	c.plane.fault("queues", c.plane.tidy())
	c.plane.save()
}

// Commit puts the change in force. On an error all stays as it was.
func (c *Change) Commit() error {
	p := c.plane
	if err := p.kernel.adoptPolicy(c.policy, c.numbers, monotonic); err != nil {
		c.Cancel()
		return err
	}
	defer p.mu.Unlock()
	p.fault("registry", p.kernel.save()) // the policy is in force, whatever a daemon to come knows
	p.fault("counters", p.sync())        // those of limits that go
	p.attachments, p.listeners, p.numbers, p.policy = c.attachments, c.listeners, c.numbers, c.policy
	p.kernel.freeWatches(p.policy, p.numbers, true) // what was taken back since the swap was forgotten with the rest
	p.fault("listeners", p.kernel.keepListeners(c.listeners))
	for pt, progs := range c.changed {
		p.fault(pt.String(), p.replace(pt, progs, c.wanted[pt.key()]))
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
	p.fault("queues", p.tidy())
	p.save()
	for _, other := range p.otherFolders() {
		p.fault(other, os.RemoveAll(other))
	}
	p.looks.Do(p.look)
	return nil
}
