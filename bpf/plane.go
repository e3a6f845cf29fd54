// Package bpf is the packet plane: programs in the kernel that hold packets at an
// interface to the limits of a policy, with the arithmetic of package leaky and the
// decisions of package shaper.
//
// Programs and maps are pinned on a bpf file system, so that they outlive a daemon
// that is restarted, upgraded or killed, with every bucket in them.
package bpf

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"shaperd/shaper"
)

// Plane is the packet plane of a daemon. Its methods may be called by several
// goroutines.
type Plane struct {
	log    *slog.Logger
	shaper *shaper.Shaper
	dir    string

	mu          sync.Mutex
	kernel      *kernel
	attachments []Attachment
	numbers     numbers
	policy      *shaper.Policy
	points      map[side]*point
	faults      map[string]string // by what they are of; each is logged once
	counted     counted

	stop func()
	done sync.WaitGroup
}

// Open opens the plane whose programs and maps are pinned under the folder pins, or
// makes one, with room for the buckets of so many keys. What an earlier daemon left
// attached stays as it is until the first Commit.
func Open(s *shaper.Shaper, pins string, keys int, log *slog.Logger) (*Plane, error) {
	k, err := openKernel(pins, keys)
	if err != nil {
		return nil, err
	}
	p := &Plane{
		log: log, shaper: s, dir: folder(pins, keys), kernel: k,
		points: map[side]*point{}, faults: map[string]string{}, counted: counted{},
	}
	if err := os.MkdirAll(filepath.Join(p.dir, "links"), 0o700); err != nil {
		k.close()
		return nil, fmt.Errorf("[daemon] pins: %w", err)
	}
	p.counted.start(k)
	p.takeOver(p.dir, k.Points)
	for _, other := range p.otherFolders() {
		r, err := openRegistry(other)
		if err != nil {
			log.Warn("take over from another version", "folder", other, "err", err)
			continue
		}
		p.takeOver(other, r.Points)
		_ = r.store.Close()
	}
	return p, nil
}

// takeOver finds the points that are pinned in a folder.
func (p *Plane) takeOver(dir string, points []savedPoint) {
	for _, saved := range points {
		pt, err := saved.adopt(dir)
		if err == nil && dir != p.dir {
			err = pt.hook.repin(saved.pin(p.dir))
		}
		if err != nil {
			p.log.Warn("take over an attachment", "attachment", saved.Attachment, "err", err)
			continue
		}
		p.points[pt.key()] = pt
	}
}

// otherFolders returns where maps of another version or size are pinned. Their
// buckets are of no use.
func (p *Plane) otherFolders() (others []string) {
	all, _ := filepath.Glob(filepath.Join(filepath.Dir(p.dir), "v*"))
	return slices.DeleteFunc(all, func(dir string) bool { return dir == p.dir })
}

// Change is a policy with its attachments, ready to be put in force.
type Change struct {
	plane       *Plane
	attachments []Attachment
	policy      *shaper.Policy
	numbers     numbers
	wanted      map[side]*Attachment
	added       []*point
	changed     map[*point]*programs
	queued      []*point // of changed, those that got a queue
}

// Prepare makes everything ready that may fail to put attachments, and the policy
// that names them, in force. Nothing is enforced, or enforced otherwise, before
// Commit; Cancel takes back what was made. An interface that is not there is
// attached to when it appears.
func (p *Plane) Prepare(attachments []Attachment, policy *shaper.Policy) (*Change, error) {
	p.mu.Lock()
	c := &Change{plane: p, attachments: slices.Clone(attachments), policy: policy, changed: map[*point]*programs{}}
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
	if err := p.kernel.beat(); err != nil {
		return fmt.Errorf("heartbeat: %w", err)
	}
	// Programs of attachments that are not in the policy in force let everything
	// pass: it is the swap that begins to enforce.
	for key, a := range c.wanted {
		present := p.points[key]
		if present != nil && present.same(a) {
			continue
		}
		progs, err := p.load(a, key.ifindex, c.numbers)
		if err != nil {
			return err
		}
		if present != nil && present.Hook == a.Hook && present.detours() == a.detours() {
			c.changed[present] = progs
			if a.Mode == Shape && present.Mode != Shape {
				if err := present.addQueue(a); err != nil {
					return attachError(a, present.ifname, privileges(err))
				}
				c.queued = append(c.queued, present)
			}
			continue
		}
		pt, err := p.attach(key, a, progs)
		if err != nil {
			progs.close()
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
	for _, pt := range c.queued {
		_ = pt.removeQueue()
	}
	for _, progs := range c.changed {
		progs.close()
	}
}

// Commit puts the change in force. On an error all stays as it was.
func (c *Change) Commit() error {
	p := c.plane
	if err := p.kernel.adoptPolicy(c.policy, c.numbers, monotonic()); err != nil {
		c.Cancel()
		return err
	}
	defer p.mu.Unlock()
	p.attachments, p.numbers, p.policy = c.attachments, c.numbers, c.policy
	for pt, progs := range c.changed {
		p.fault(pt.String(), pt.replace(progs, c.wanted[pt.key()]))
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
	p.save()
	for _, other := range p.otherFolders() {
		p.fault(other, os.RemoveAll(other))
	}
	p.start()
	return nil
}

// save remembers what is attached, for a daemon to come.
func (p *Plane) save() {
	var points []savedPoint
	for _, pt := range p.points {
		points = append(points, pt.saved())
	}
	slices.SortFunc(points, func(a, b savedPoint) int {
		return cmp.Or(cmp.Compare(a.Attachment, b.Attachment), cmp.Compare(a.Ifindex, b.Ifindex))
	})
	if reflect.DeepEqual(points, p.kernel.Points) {
		return
	}
	p.kernel.Points = points
	p.fault("registry", p.kernel.save())
}

// attachError says where an attachment failed.
func attachError(a *Attachment, ifname string, err error) error {
	return fmt.Errorf("attach %q to %s, %s: %w", a.Name, ifname, way(a.Ingress), err)
}

func way(ingress bool) string {
	if ingress {
		return "ingress"
	}
	return "egress"
}

// wantedPoints finds where attachments are to be.
func wantedPoints(attachments []Attachment) (map[side]*Attachment, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	wanted := map[side]*Attachment{}
	for i := range attachments {
		a := &attachments[i]
		for _, l := range links {
			attrs := l.Attrs()
			if !a.matches(attrs.Name) || isOwnIFB(l) {
				continue
			}
			at := side{attrs.Index, a.Ingress}
			if other := wanted[at]; other != nil {
				return nil, fmt.Errorf("attachments %q and %q are both at %s, %s: their limits would count packets twice",
					other.Name, a.Name, attrs.Name, way(a.Ingress))
			}
			wanted[at] = a
		}
	}
	return wanted, nil
}

// point is an attachment at an interface.
type point struct {
	Attachment
	ifindex int
	ifname  string
	hook    hook
	former  *former   // what stood where the queue is; nil without a queue
	progs   *programs // nil for what another daemon attached
}

func (pt *point) key() side { return side{pt.ifindex, pt.Ingress} }

func (pt *point) saved() savedPoint {
	return savedPoint{pt.Name, pt.ifindex, pt.Ingress, pt.Hook, pt.Mode, pt.former}
}

func (pt *point) String() string { return pt.Name + " at " + pt.ifname }

// same reports whether nothing has changed that a program knows.
func (pt *point) same(a *Attachment) bool {
	return pt.progs != nil && pt.Name == a.Name && pt.Mode == a.Mode && pt.Hook == a.Hook && pt.Keep == a.Keep &&
		pt.Queue == a.Queue && pt.IdleTimeout == a.IdleTimeout
}

// programs are the programs of one attachment.
type programs struct {
	limit *ebpf.Program // holds packets to the limits
}

func (p *programs) close() { _ = p.limit.Close() }

// load loads the programs of a for an interface.
func (p *Plane) load(a *Attachment, ifindex int, n numbers) (*programs, error) {
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return nil, attachError(a, strconv.Itoa(ifindex), err)
	}
	at := kernelAttachment{Place: n.attachments[a.Name], Mode: uint32(a.Mode)}
	if hasEthernet(l) {
		at.Ethernet = 1
	}
	if a.Keep {
		at.Keep = 1
	}
	var tc struct {
		Program *ebpf.Program `ebpf:"shaperd_tc"`
	}
	var xdp struct {
		Program *ebpf.Program `ebpf:"shaperd_xdp"`
	}
	if a.Hook == XDP {
		err = p.kernel.load(at, nil, &xdp)
		tc.Program = xdp.Program
	} else {
		err = p.kernel.load(at, nil, &tc)
	}
	if err != nil {
		return nil, attachError(a, l.Attrs().Name, err)
	}
	return &programs{limit: tc.Program}, nil
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
	pt.hook, err = attach(a.Hook, at, progs.limit, pt.saved().pin(p.dir))
	if err == nil && a.Mode == Shape {
		if err = pt.addQueue(a); err != nil {
			_ = pt.hook.detach()
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
func (pt *point) replace(progs *programs, a *Attachment) error {
	if err := pt.hook.update(progs.limit); err != nil {
		return err
	}
	pt.closePrograms()
	was := pt.Attachment
	pt.progs, pt.Attachment = progs, *a
	if a.Mode == Shape {
		return pt.addQueue(a)
	}
	if was.Mode == Shape {
		return pt.removeQueue()
	}
	return nil
}

func (pt *point) detach() error {
	defer pt.closePrograms()
	err := pt.hook.detach()
	if pt.Mode == Shape {
		err = errors.Join(err, pt.removeQueue())
	}
	return err
}

func (pt *point) closePrograms() {
	if pt.progs != nil {
		pt.progs.close()
	}
}

// drop takes a point away.
func (p *Plane) drop(pt *point) {
	if err := pt.detach(); err != nil {
		p.log.Error("detach", "attachment", pt.Name, "interface", pt.ifname, "err", err)
	}
	delete(p.points, pt.key())
	p.fault(pt.String(), nil)
}

// fault logs what becomes of something, when it changes.
func (p *Plane) fault(what string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if p.faults[what] == text {
		return
	}
	if text == "" {
		delete(p.faults, what)
		p.log.Info("attachment is back", "what", what)
		return
	}
	p.faults[what] = text
	p.log.Error("attachment", "what", what, "err", text)
}

// Intervals at which the plane looks after itself. What is amiss is found within
// the second.
const (
	beatInterval  = time.Second
	checkInterval = 2 * time.Second
)

// start begins to look after what is attached.
func (p *Plane) start() {
	if p.stop != nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	p.stop = cancel
	every := func(interval time.Duration, do func()) {
		p.done.Go(func() {
			tick := time.NewTicker(interval)
			defer tick.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
					do()
				}
			}
		})
	}
	every(beatInterval, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.fault("heartbeat", p.kernel.beat())
		p.fault("counters", p.sync())
	})
	every(checkInterval, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.check()
	})
}

// check finds what has changed at the interfaces, and mends it.
func (p *Plane) check() {
	wanted, err := wantedPoints(p.attachments)
	p.fault("interfaces", err)
	if err != nil {
		return
	}
	for key, pt := range p.points {
		if wanted[key] == nil {
			p.log.Warn("interface is gone", "attachment", pt.Name, "interface", pt.ifname)
			p.drop(pt)
			continue
		}
		err := pt.hook.check()
		if err == nil && pt.Mode == Shape {
			err = pt.checkQueue()
		}
		if err != nil {
			p.fault(pt.String(), err)
			_ = pt.detach()
			delete(p.points, key)
		}
	}
	for key, a := range wanted {
		if p.points[key] == nil {
			pt, err := p.add(key, a)
			p.fault(a.Name+" at "+strconv.Itoa(key.ifindex), err)
			if err == nil {
				p.points[key] = pt
				p.fault(pt.String(), nil)
				p.log.Info("attached", "attachment", pt.Name, "interface", pt.ifname)
			}
		}
	}
	for i := range p.attachments {
		p.fault(p.attachments[i].Name, present(&p.attachments[i], wanted))
	}
	p.save()
}

// present returns an error when a is at no interface.
func present(a *Attachment, wanted map[side]*Attachment) error {
	for _, w := range wanted {
		if w.Name == a.Name {
			return nil
		}
	}
	return fmt.Errorf("there is no interface %s yet", strings.Join(a.Interfaces, " or "))
}

func (p *Plane) add(key side, a *Attachment) (*point, error) {
	progs, err := p.load(a, key.ifindex, p.numbers)
	if err != nil {
		return nil, err
	}
	return p.attach(key, a, progs)
}

// Release lets go of a plane that was opened and not changed: what is attached stays.
func (p *Plane) Release() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pt := range p.points {
		pt.hook.release()
	}
	unused := len(p.kernel.Points) == 0
	p.release()
	if unused {
		_ = p.remove()
	}
}

// remove removes what is pinned.
func (p *Plane) remove() error {
	err := os.RemoveAll(p.dir)
	_ = os.Remove(filepath.Dir(p.dir)) // when nothing else is in it
	return err
}

func (p *Plane) release() {
	p.kernel.close()
	p.kernel = nil
	_ = os.Remove(filepath.Join(p.dir, "links")) // when nothing is pinned there
}

// Close ends the plane: attachments that are to be kept stay enforced, the others
// are taken away.
func (p *Plane) Close() error {
	if p.stop != nil {
		p.stop()
		p.done.Wait()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	keep := false
	for _, pt := range p.points {
		if pt.Keep {
			pt.hook.release()
			keep = true
			continue
		}
		errs = append(errs, pt.detach())
		delete(p.points, pt.key())
	}
	p.save()
	// Nobody needs to wait until the last heartbeat is an old one.
	errs = append(errs, p.kernel.stopped())
	p.release()
	if !keep {
		errs = append(errs, p.remove())
	}
	return errors.Join(errs...)
}
