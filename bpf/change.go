// Owner: the caller of Prepare, with Plane.changeMu until Commit or Cancel.

package bpf

import (
	"net/netip"
	"os"
	"slices"
	"strings"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/shaper"
)

// Change is a prepared policy with its attachments.
type Change struct {
	plane       *Plane
	attachments []shaper.Attachment
	listeners   []netip.AddrPort
	policy      *shaper.Policy
	numbers     numbers
	wanted      map[attach.Point]*target
	programs    programCache // loaded for this change
	added       []*point
	changed     map[*point]*programs
}

// Prepare does everything that may fail before attachments and their policy take effect.
// Enforcement does not change before Commit; Cancel undoes the preparation. An interface
// that does not exist yet is attached to when it appears. TCP connections that the proxy
// accepts at listeners are not counted at attachments. See [Plane.MarkProxied] too.
func (p *Plane) Prepare(attachments []shaper.Attachment, listeners []netip.AddrPort, policy *shaper.Policy) (*Change, error) {
	p.changeMu.Lock()
	c := &Change{
		plane: p, attachments: slices.Clone(attachments), listeners: slices.Clone(listeners), policy: policy,
		programs: programCache{}, changed: map[*point]*programs{},
	}
	err := c.load() // without mu: others may use the plane meanwhile
	if err == nil {
		err = c.prepare()
	}
	if err != nil {
		c.Cancel()
		return nil, err
	}
	return c, nil
}

// load loads the programs that the change needs: for new and changed points, and for
// interfaces that may appear.
func (c *Change) load() (err error) {
	p := c.plane
	if c.wanted, err = wantedPoints(c.attachments); err != nil {
		return err
	}
	if c.numbers, err = p.kernel.assignNumbers(c.policy, c.attachments, c.renamedFrom()); err != nil {
		return err
	}
	c.numbers.moved = c.moved()
	if err := p.startHeartbeat(); err != nil {
		return err
	}
	if !p.sweeperStarted && slices.ContainsFunc(c.attachments, func(a shaper.Attachment) bool { return countsConnections(&a, c.policy) }) {
		if err := p.kernel.loadSweeper(); err != nil {
			return explainPermission(err)
		}
		p.sweeperStarted = true
	}
	since := p.kernel.Generation + 1 // until then the programs let everything pass
	for key, w := range c.wanted {
		if present := p.points[key]; present == nil || !present.fits(w.Attachment, c.policy) {
			if _, err := c.programs.get(p.kernel, c.programKey(w.Attachment, w.ethernet()), since); err != nil {
				return attachError(w.Attachment, w.name(), err)
			}
		}
	}
	for i := range c.attachments {
		a := &c.attachments[i]
		key := c.programKey(a, true)
		if p.programs[key] != nil || c.programs[key] != nil {
			continue
		}
		if _, err := c.programs.get(p.kernel, key, since); err != nil {
			return attachError(a, strings.Join(a.Interfaces, " or "), err)
		}
	}
	return nil
}

// renamedFrom maps each renamed attachment to its old name: it has an interface of an attachment
// that is removed, and keeps its connections.
func (c *Change) renamedFrom() map[string]string {
	present := map[string]bool{}
	for _, pt := range c.plane.points {
		present[pt.Name] = true
	}
	former := map[string]string{}
	for key, w := range c.wanted {
		pt := c.plane.points[key]
		if pt != nil && !present[w.Name] && !slices.ContainsFunc(c.attachments, func(a shaper.Attachment) bool { return a.Name == pt.Name }) {
			former[w.Name] = max(former[w.Name], pt.Name)
		}
	}
	return former
}

// moved returns the numbers of attachments that keep none of their interfaces: what was learned
// about replies there is void.
func (c *Change) moved() (moved []uint32) {
	kept := map[uint32]bool{}
	for key, w := range c.wanted {
		number := c.numbers.attachments[w.Name]
		if pt := c.plane.points[key]; pt != nil {
			was, ok := c.plane.kernel.Attachments[pt.Name]
			kept[number] = kept[number] || ok && was == number
		}
	}
	for _, number := range c.numbers.attachments {
		if !kept[number] {
			moved = append(moved, number)
		}
	}
	return moved
}

func (c *Change) programKey(a *shaper.Attachment, ethernet bool) programKey {
	return programKeyOf(a, c.numbers, c.policy, ethernet)
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
		progs := c.programs[c.programKey(a, w.ethernet())]
		if present != nil && present.Hook == a.Hook && attach.UsesIFB(&present.Attachment) == attach.UsesIFB(a) {
			c.changed[present] = progs
			if a.Shapes() && !present.Shapes() {
				if err := p.addQueue(key, a); err != nil {
					return attachError(a, present.ifname, explainPermission(err))
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

// Cancel undoes Prepare.
func (c *Change) Cancel() {
	defer c.plane.changeMu.Unlock()
	c.plane.mu.Lock()
	defer c.plane.mu.Unlock()
	c.rollBack()
}

func (c *Change) rollBack() {
	for _, pt := range c.added {
		_ = pt.detach()
	}
	c.programs.close()
	_ = c.plane.kernel.retainListeners(c.plane.listeners)
	c.plane.report("queues", c.plane.removeUnused())
	c.plane.savePoints()
}

// Commit applies the change. On an error nothing changes.
func (c *Change) Commit() error {
	p := c.plane
	defer p.changeMu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	sharing := p.sharing
	p.followPolicy(c.policy, c.numbers, c.attachments)
	p.report("cgroups", p.kernel.followCgroups(c.numbers))
	if err := p.kernel.installPolicy(c.policy, c.numbers, monotonic); err != nil {
		if p.sharing = sharing; sharing.told {
			p.reshare(p.kernel.lease(), true)
		}
		c.rollBack()
		return err
	}
	lease := p.kernel.lease()
	if p.adoptShares() {
		lease = kernelLease{} // nobody knows which buckets that of the daemon before had
	}
	p.reshare(lease, true)
	p.report("registry", p.kernel.save())  // the policy is active even if the next daemon will not know
	p.report("counters", p.syncCounters()) // of limits that are removed
	p.attachments, p.listeners, p.numbers, p.policy = c.attachments, c.listeners, c.numbers, c.policy
	p.kernel.freeMonitors(p.policy, p.numbers, true) // refunds recorded since the swap were reset with the rest
	p.report("listeners", p.kernel.retainListeners(c.listeners))
	for pt, progs := range c.changed {
		p.report(pt.String(), p.replace(pt, progs, c.wanted[pt.key()].Attachment))
	}
	for _, pt := range c.added {
		if old := p.points[pt.key()]; old != nil {
			p.detachPoint(old) // attached by another hook
		}
		p.points[pt.key()] = pt
		p.log.Info("attached", "attachment", pt.Name, "interface", pt.ifname, "direction", pt.Direction.String(), "mode", pt.EffectiveMode().String())
	}
	for key, pt := range p.points {
		if c.wanted[key] == nil {
			p.detachPoint(pt)
		}
	}
	for _, pt := range p.failed {
		delete(p.faults, pointName(pt.Attachment, pt.Interface))
	}
	p.failed = nil
	p.programs.merge(c.programs)
	p.programs.prune(func(key programKey) bool {
		return slices.ContainsFunc(p.attachments, func(a shaper.Attachment) bool {
			return key == programKeyOf(&a, p.numbers, p.policy, key.at.Ethernet != 0)
		})
	})
	p.uncount()
	p.report("queues", p.removeUnused())
	p.savePoints()
	for _, other := range p.otherPinDirs() {
		p.report(other, os.RemoveAll(other))
	}
	p.monitorOnce.Do(p.startMonitoring)
	return nil
}
