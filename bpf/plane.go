// Package bpf is the packet plane: programs in the kernel that hold packets at an
// interface to the limits of a policy, with the arithmetic of package leaky and the
// decisions of package shaper.
//
// Programs and maps are pinned on a bpf file system, so that they outlive a daemon
// that is restarted, upgraded or killed, with every bucket in them.
package bpf

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// Plane is the packet plane of a daemon. Its methods may be called by several
// goroutines.
type Plane struct {
	log      *slog.Logger
	shaper   *shaper.Shaper
	clock    *leaky.Clock // of rankings
	dir      string
	occupied io.Closer // the folder above dir, until the end

	changing sync.Mutex // from Prepare to Commit or Cancel, and while interfaces are looked at; taken before mu
	programs shelf      // with changing
	sweeping bool       // with changing: this daemon has started the timer of connections

	mu          sync.Mutex // what mu guards changes with changing held too, but counts and faults
	kernel      *kernel
	sampler     *sampler
	attachments []Attachment
	listeners   []netip.AddrPort
	numbers     numbers
	policy      *shaper.Policy
	points      map[side]*point
	failed      []PointStatus     // where attachments could not be made at the last look
	uncounted   bool              // there may be connections that uncount is to find
	faults      map[string]string // by what they are of; each is logged once
	counted     counted
	pressures   map[string]*pressure // by what they are of

	beats, looks sync.Once
	quit         chan struct{}
	stop         func() // ends what is done at intervals; not with mu
	done         sync.WaitGroup
}

// Open opens the plane whose programs and maps are pinned under the folder pins, or
// makes one, with room for the buckets of so many keys. What an earlier daemon left
// attached stays as it is until the first Commit. It is an error while another plane is open
// there, and when attachments there are in another network namespace. The rankings of s are
// kept by clock, as all who add to them do.
func Open(s *shaper.Shaper, clock *leaky.Clock, pins string, keys int, log *slog.Logger) (_ *Plane, err error) {
	if err := mayOpen(); err != nil {
		return nil, err
	}
	occupied, err := occupy(pins)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			occupied.Close()
		}
	}()
	k, err := openKernel(pins, keys)
	if err != nil {
		return nil, err
	}
	p := &Plane{
		log: log, shaper: s, clock: clock, dir: folder(pins, keys), occupied: occupied, kernel: k,
		points: map[side]*point{}, faults: map[string]string{}, counted: counted{}, pressures: map[string]*pressure{},
		programs: shelf{},
		quit:     make(chan struct{}),
	}
	p.stop = sync.OnceFunc(func() {
		close(p.quit)
		p.done.Wait()
	})
	if p.sampler, err = newSampler(k); err != nil {
		k.close()
		return nil, privileges(err)
	}
	if err := os.MkdirAll(filepath.Join(p.dir, "links"), 0o700); err != nil {
		p.sampler.close()
		k.close()
		return nil, fmt.Errorf("[daemon] pin_path: %w", err)
	}
	p.counted.start(k)
	p.takeOver(p.dir, k.Points)
	for _, other := range p.otherFolders() {
		r, err := openRegistryHere(other)
		if err != nil {
			p.sampler.close()
			k.close()
			return nil, privileges(err)
		}
		p.takeOver(other, r.Points)
		k.Queues = append(k.Queues, r.Queues...)
		k.Clsacts = append(k.Clsacts, r.Clsacts...)
		_ = r.store.Close()
	}
	return p, nil
}

// takeOver finds the points that are pinned in a folder.
func (p *Plane) takeOver(dir string, points []savedPoint) {
	for _, saved := range points {
		pt, err := saved.adopt(dir)
		if err == nil && (pt.hook.check() != nil || p.points[pt.key()] != nil) {
			_ = pt.detach() // it is there no more, or was about to replace the one that is
			continue
		}
		if err == nil && dir != p.dir {
			err = pt.repin(saved.pin(p.dir))
		}
		if err != nil {
			p.log.Warn("take over an attachment", "attachment", saved.Attachment, "err", err)
			continue
		}
		p.points[pt.key()] = pt
		p.log.Info("taken over", "attachment", pt.Name, "interface", pt.ifname)
	}
}

// otherFolders returns where maps of another version or size are pinned. Their
// buckets are not used.
func (p *Plane) otherFolders() (others []string) {
	all, _ := filepath.Glob(filepath.Join(filepath.Dir(p.dir), "v*"))
	return slices.DeleteFunc(all, func(dir string) bool { return dir == p.dir })
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
	if reflect.DeepEqual(points, p.kernel.Points) && p.faults["registry"] == "" {
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

// drop takes a point away.
func (p *Plane) drop(pt *point) {
	if err := pt.detach(); err != nil {
		p.log.Error("detach", "attachment", pt.Name, "interface", pt.ifname, "err", err)
	}
	delete(p.points, pt.key())
	for _, what := range []string{pt.String(), pt.detour(), pt.enforcement(limiting), pt.enforcement(noting)} {
		p.fault(what, nil)
	}
	p.log.Info("detached", "attachment", pt.Name, "interface", pt.ifname)
}

// tidy removes what was made for points that are no more.
func (p *Plane) tidy() error {
	return p.kernel.tidy(func(at side) bool { return p.points[at] != nil && p.points[at].Mode == Shape })
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
		p.log.Info("packet plane: well again", "what", what)
		return
	}
	p.faults[what] = text
	p.log.Error("packet plane", "what", what, "err", text)
}

// Intervals at which the plane looks after itself. What is amiss is found within
// the second.
const (
	sampleInterval    = 200 * time.Millisecond
	beatInterval      = time.Second
	countInterval     = time.Second
	checkInterval     = 2 * time.Second
	reconcileInterval = 10 * time.Second
)

// every does something at intervals until the plane ends.
func (p *Plane) every(interval time.Duration, do func()) { p.everyOr(interval, do, nil, nil) }

// everyOr does something at intervals until the plane ends, and something else on an event.
func (p *Plane) everyOr(interval time.Duration, do func(), event <-chan struct{}, onEvent func()) {
	p.done.Go(func() {
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case <-p.quit:
				return
			case <-tick.C:
				do()
			case <-event:
				onEvent()
			}
		}
	})
}

// pause waits, and reports whether the plane has not ended meanwhile.
func (p *Plane) pause(d time.Duration) bool {
	select {
	case <-p.quit:
		return false
	case <-time.After(d):
		return true
	}
}

// beat begins to tell the programs that a daemon is there. It goes on whoever has the
// lock: on a machine that is short of time the verifier takes longer than they wait.
func (p *Plane) beat() error {
	if err := p.kernel.beat(); err != nil {
		return fmt.Errorf("heartbeat: %w", err)
	}
	p.beats.Do(func() {
		failed := false
		p.every(beatInterval, func() {
			err := p.kernel.beat()
			if err == nil && !failed {
				return
			}
			failed = err != nil
			p.mu.Lock()
			defer p.mu.Unlock()
			p.fault("heartbeat", err)
		})
	})
	return nil
}

// look begins to look after what is attached.
func (p *Plane) look() {
	p.checkRoom() // what had none before is none of this daemon's
	every := func(interval time.Duration, do func()) {
		p.every(interval, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			do()
		})
	}
	every(countInterval, func() {
		p.fault("counters", p.sync())
		p.kernel.freeWatches(p.policy, p.numbers, false)
	})
	every(sampleInterval, func() { p.fault("samples", p.rank()) })
	every(reconcileInterval, func() {
		repaired, _, err := p.kernel.reconcile(uint64(monotonic() / leaky.FromDuration(1)))
		p.fault("connections", err)
		if repaired > 0 {
			p.log.Warn("connection counts repaired", "slots", repaired)
		}
	})
	every(checkInterval, p.checkRoom)
	p.watch()
}

// Release lets go of a plane that was opened and not changed: what is attached stays.
func (p *Plane) Release() {
	p.stop()
	p.changing.Lock()
	defer p.changing.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pt := range p.points {
		pt.letGo()
	}
	unused := len(p.kernel.Points)+len(p.kernel.Queues)+len(p.kernel.Clsacts) == 0
	p.release()
	if unused {
		_ = p.remove()
	}
	p.occupied.Close()
}

// remove removes what is pinned.
func (p *Plane) remove() error {
	err := os.RemoveAll(p.dir)
	_ = os.Remove(filepath.Dir(p.dir)) // when nothing else is in it
	return err
}

func (p *Plane) release() {
	p.programs.close()
	p.sampler.close()
	p.kernel.close()
	p.kernel = nil
	_ = os.Remove(filepath.Join(p.dir, "links")) // when nothing is pinned there
}

// Close ends the plane: attachments that are to be kept stay enforced, the others
// are taken away.
func (p *Plane) Close() error {
	p.stop()
	p.changing.Lock()
	defer p.changing.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	keep := false
	for _, pt := range p.points {
		if pt.Keep {
			pt.letGo()
			keep = true
			p.log.Info("stays in force without a daemon", "attachment", pt.Name, "interface", pt.ifname)
			continue
		}
		errs = append(errs, pt.detach())
		delete(p.points, pt.key())
	}
	if keep {
		p.uncount()
	}
	errs = append(errs, p.tidy())
	p.save()
	errs = append(errs, p.kernel.keepListeners(nil)) // others may listen there
	p.release()
	defer p.occupied.Close()
	if err := errors.Join(errs...); err != nil || keep {
		return err // what is left, "shaperd detach" finds by the registry
	}
	return p.remove()
}
