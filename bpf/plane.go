// Package bpf is the packet plane: BPF programs that enforce the limits of a policy on
// the packets at an interface, with the arithmetic of package leaky and the decisions of
// package shaper.
//
// Programs and maps are pinned on a bpf file system, so that they and all buckets outlive
// a daemon that is restarted, upgraded or killed.
//
// The programs run on every CPU and share the maps. A [Plane] adds a few goroutines, which read
// counters, repair the counts of connections and watch the interfaces; its locks let other
// goroutines call it.
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

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// Plane is the packet plane of a daemon. Its methods may be called from several
// goroutines. The first line of a file names the lock that guards its types.
type Plane struct {
	log     *slog.Logger
	shaper  *shaper.Shaper
	clock   *pacer.Clock // for rankings
	dir     string
	pinLock io.Closer // lock on the parent directory of dir, held until the plane closes

	changeMu       sync.Mutex   // held from Prepare to Commit or Cancel, and while interfaces are checked; locked before mu
	programs       programCache // guarded by changeMu
	sweeperStarted bool         // guarded by changeMu: this daemon has started the connection sweeper

	mu             sync.Mutex // changes to what it guards need changeMu too, except for counters and faults
	kernel         *kernel
	sampler        *sampler
	attachments    []shaper.Attachment
	listeners      []netip.AddrPort
	numbers        numbers
	policy         *shaper.Policy
	points         map[attach.Point]*point
	failed         []PointStatus     // points that could not be attached at the last check
	uncountPending bool              // uncount must run: connections may have lost their programs
	faults         map[string]string // current errors by subject; each is logged once
	lastCounters   lastCounters
	alarms         map[string]*capacityAlarm // by subject
	sharing        sharing
	lacking        uint64 // hot buckets of shared limits for which there was no room

	heartbeatOnce, monitorOnce sync.Once
	quit                       chan struct{}
	stopLoops                  func() // ends the periodic goroutines; must be called without mu
	done                       sync.WaitGroup
}

// Options are what a plane needs from the daemon.
type Options struct {
	// Shaper has the limits' states and rankings, which the plane adds its counts to.
	Shaper *shaper.Shaper

	// Clock gives the time for the rankings, as to all their other writers.
	Clock *pacer.Clock

	// PinPath is a directory on a bpf file system, for maps and links.
	PinPath string

	// Keys is the number of keys that buckets are for. Maps for another number are other maps.
	Keys int

	// Log takes the plane's events and faults.
	Log *slog.Logger
}

// Open opens the plane whose programs and maps are pinned, or creates one. Programs that an earlier
// daemon left attached stay unchanged until the first Commit. Open fails while another plane is open
// there, and when attachments there belong to another network namespace.
func Open(o Options) (_ *Plane, err error) {
	if err := cmp.Or(CheckProcessor(), checkCapabilities()); err != nil {
		return nil, err
	}
	pinLock, err := lockPins(o.PinPath)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			pinLock.Close()
		}
	}()
	k, err := openKernel(o.PinPath, o.Keys)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			k.close()
		}
	}()
	sampler, err := newSampler(k)
	if err != nil {
		return nil, explainPermission(err)
	}
	defer func() {
		if err != nil {
			sampler.close()
		}
	}()
	p := &Plane{
		log: o.Log, shaper: o.Shaper, clock: o.Clock, dir: pinDir(o.PinPath, o.Keys), pinLock: pinLock, kernel: k, sampler: sampler,
		points: map[attach.Point]*point{}, faults: map[string]string{}, lastCounters: lastCounters{}, alarms: map[string]*capacityAlarm{},
		programs: programCache{}, sharing: sharing{given: map[shaper.Key]uint32{}, settled: map[shaper.Key]uint64{}, short: map[shaper.Key]shortRun{}, reportedAt: uint64(boottime())},
		quit: make(chan struct{}),
	}
	p.stopLoops = sync.OnceFunc(func() {
		close(p.quit)
		p.done.Wait()
	})
	if err := os.MkdirAll(filepath.Join(p.dir, "links"), 0o700); err != nil {
		return nil, fmt.Errorf("[daemon] pin_path: %w", err)
	}
	p.lastCounters.start(k)
	if err := p.takeOver(); err != nil {
		return nil, explainPermission(err)
	}
	return p, nil
}

// takeOver adopts what earlier daemons left, with maps of this version and size or of others.
func (p *Plane) takeOver() error {
	p.takeOverPoints(p.dir, p.kernel.Points)
	for _, other := range p.otherPinDirs() {
		r, err := openRegistryInNetwork(other)
		if err != nil {
			return err
		}
		p.takeOverPoints(other, r.Points)
		p.kernel.Queues = append(p.kernel.Queues, r.Queues...)
		p.kernel.Clsacts = append(p.kernel.Clsacts, r.Clsacts...)
		_ = r.store.Close()
	}
	return nil
}

// takeOverPoints adopts the points that are pinned in a directory.
func (p *Plane) takeOverPoints(dir string, points []savedPoint) {
	for _, saved := range points {
		pt, err := saved.adopt(dir)
		if err == nil && (pt.limiter.Check() != nil || p.points[pt.key()] != nil) {
			_ = pt.detach() // removed since, or it was about to replace an existing point
			continue
		}
		if err == nil && dir != p.dir {
			err = pt.repin(saved.pin(p.dir))
		}
		if err != nil {
			p.log.Warn("taking over attachment failed", "attachment", saved.Attachment, "err", err)
			continue
		}
		p.points[pt.key()] = pt
		p.log.Info("attachment taken over", "attachment", pt.Name, "interface", pt.ifname)
	}
}

// otherPinDirs returns the directories of maps of another version or size. Their buckets
// are not used.
func (p *Plane) otherPinDirs() (others []string) {
	all, _ := filepath.Glob(filepath.Join(filepath.Dir(p.dir), "v*"))
	return slices.DeleteFunc(all, func(dir string) bool { return dir == p.dir })
}

// savePoints records the attached points in the registry, for the next daemon.
func (p *Plane) savePoints() {
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
	p.report("registry", p.kernel.save())
}

// attachError adds the attachment, interface and direction to an error.
func attachError(a *shaper.Attachment, ifname string, err error) error {
	return fmt.Errorf("attach %q to %s, %s: %w", a.Name, ifname, a.Direction, err)
}

// detachPoint detaches a point and clears its faults.
func (p *Plane) detachPoint(pt *point) {
	if err := pt.detach(); err != nil {
		p.log.Error("detaching failed", "attachment", pt.Name, "interface", pt.ifname, "err", err)
	}
	delete(p.points, pt.key())
	for _, subject := range []string{pt.String(), pt.redirectSubject(), pt.coverageSubject(attach.Limiter), pt.coverageSubject(attach.ReplyTracker)} {
		p.report(subject, nil)
	}
	p.log.Info("detached", "attachment", pt.Name, "interface", pt.ifname)
}

// removeUnused removes the queues and qdiscs of points that no longer exist.
func (p *Plane) removeUnused() error {
	return p.kernel.removeUnused(func(at attach.Point) bool { return p.points[at] != nil && p.points[at].Shapes() })
}

// report sets the fault of a subject, or clears it when err is nil, and logs changes.
func (p *Plane) report(subject string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if p.faults[subject] == text {
		return
	}
	if text == "" {
		delete(p.faults, subject)
		p.log.Info("packet plane recovered", "subject", subject)
		return
	}
	p.faults[subject] = text
	p.log.Error("packet plane fault", "subject", subject, "err", text)
}

// Release closes a plane without a change: attached programs stay.
func (p *Plane) Release() {
	p.stopLoops()
	p.changeMu.Lock()
	defer p.changeMu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pt := range p.points {
		pt.release()
	}
	unused := len(p.kernel.Points)+len(p.kernel.Queues)+len(p.kernel.Clsacts) == 0
	p.closeKernel()
	if unused {
		_ = p.removePins()
	}
	p.pinLock.Close()
}

// removePins removes the pinned programs and maps.
func (p *Plane) removePins() error {
	err := os.RemoveAll(p.dir)
	_ = os.Remove(filepath.Dir(p.dir)) // fails unless it is empty
	return err
}

func (p *Plane) closeKernel() {
	p.programs.close()
	p.sampler.close()
	p.kernel.close()
	p.kernel = nil
	_ = os.Remove(filepath.Join(p.dir, "links")) // fails unless it is empty
}

// Close closes the plane. Attachments with Keep stay enforced, the others are
// detached.
func (p *Plane) Close() error {
	p.stopLoops()
	p.changeMu.Lock()
	defer p.changeMu.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	keep := false
	for _, pt := range p.points {
		if pt.OnStop == shaper.StopKeep {
			pt.release()
			keep = true
			p.log.Info("attachment stays enforced without a daemon", "attachment", pt.Name, "interface", pt.ifname)
			continue
		}
		errs = append(errs, pt.detach())
		delete(p.points, pt.key())
	}
	if keep {
		p.uncount()
	}
	errs = append(errs, p.removeUnused())
	p.savePoints()
	errs = append(errs, p.kernel.retainListeners(nil)) // other programs may listen there now
	p.closeKernel()
	defer p.pinLock.Close()
	if err := errors.Join(errs...); err != nil || keep {
		return err // "shaperd detach" finds the rest by the registry
	}
	return p.removePins()
}
