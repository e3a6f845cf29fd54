package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/shaper"
)

// savedPoint is the registry entry of a point, with all that another daemon needs to
// detach it.
type savedPoint struct {
	Attachment string
	Ifindex    int
	Ingress    bool
	Hook       shaper.Hook
	Mode       shaper.AttachMode
	Counts     bool // it has a reply program
}

// usesIFB reports whether the program is attached to an intermediate device.
func (s savedPoint) usesIFB() bool { return s.Ingress && s.Mode == shaper.AttachShape }

// pin returns the path of a link's pin. A bpf file system allows no dots.
func (s savedPoint) pin(dir string) string {
	name := fmt.Sprintf("%d-%s-%s", s.Ifindex, direction(s.Ingress), s.Hook)
	if s.usesIFB() {
		name += "-ifb"
	}
	return filepath.Join(dir, "links", name)
}

// adopt returns the point that an earlier daemon left.
func (s savedPoint) adopt(dir string) (*point, error) {
	pt := &point{Attachment: shaper.Attachment{Name: s.Attachment, Direction: direction(s.Ingress), Hook: s.Hook, Mode: s.Mode}, ifindex: s.Ifindex}
	if l, err := netlink.LinkByIndex(s.Ifindex); err == nil {
		pt.ifname = l.Attrs().Name
	}
	at := pt.key()
	if attach.UsesIFB(&pt.Attachment) {
		at = attach.Point{}
		if ifb, err := netlink.LinkByName(attach.IFBName(s.Ifindex)); err == nil {
			at.Ifindex = ifb.Attrs().Index
		}
	}
	var err error
	if pt.limiter, err = attach.Adopt(attach.Options{Hook: s.Hook, At: at, Role: attach.Limiter, Pin: s.pin(dir)}); err == nil && s.Counts {
		pt.replies, err = attach.Adopt(pt.repliesOptions(s.pin(dir)))
	}
	return pt, err
}

// Detach removes every trace of planes whose programs and maps are pinned in the
// directory pins: of daemons that were killed, or that kept their attachments. The
// directory stays if this process may not remove it. Detach fails while a plane is open
// there, or another Detach runs.
func Detach(pins string) error {
	locked, err := lockDir(pins)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer locked.Close()
	entries, err := os.ReadDir(pins)
	if err != nil {
		return explainPermission(err)
	}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "v") {
			errs = append(errs, detachFolder(filepath.Join(pins, e.Name())))
		}
	}
	_ = os.Remove(pins)
	return errors.Join(errs...)
}

// Pinned reports whether maps of shaperd are pinned in the directory pins.
func Pinned(pins string) bool {
	found, _ := filepath.Glob(filepath.Join(pins, "v*", kernelMapHeartbeats))
	return len(found) > 0
}

func detachFolder(dir string) error {
	r, err := openRegistryInNetwork(dir)
	if err != nil {
		return explainPermission(err)
	}
	defer r.store.Close()
	var errs []error
	for _, s := range r.Points {
		pt, err := s.adopt(dir)
		if err == nil {
			err = pt.detach()
		}
		errs = append(errs, err)
	}
	errs = append(errs, r.removeUnused(func(attach.Point) bool { return false }))
	if err := errors.Join(errs...); err != nil {
		return err // keep the registry, to try again
	}
	return os.RemoveAll(dir)
}

// lockPins creates the directory pins and locks it until the file is closed or this process ends:
// two daemons would take each other's attachments for those of an earlier one.
func lockPins(pins string) (f *os.File, err error) {
	for range 10 { // a daemon that has just ended may remove it
		if err = makePinDir(pins); err == nil {
			f, err = lockDir(pins)
		}
		if !errors.Is(err, os.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("[daemon] pin_path: %w", err)
	}
	return f, nil
}

// lockTimeout is how long lockDir waits for a process in Alive, which locks the directory briefly.
const lockTimeout = 200 * time.Millisecond

// lockDir opens and locks a pin directory.
func lockDir(pins string) (*os.File, error) {
	for end := time.Now().Add(lockTimeout); ; time.Sleep(lockTimeout / 20) {
		f, err := os.Open(pins)
		if err != nil {
			return nil, explainPermission(err)
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil && sameFile(f, pins) {
			return f, nil
		}
		f.Close()
		if err != nil && (!errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end)) {
			return nil, fmt.Errorf(`%s: in use by another daemon or "shaperd detach": stop that, or name another directory (%w)`, pins, err)
		}
	}
}

// sameFile reports whether path still names f: the previous owner of the lock may have removed it.
func sameFile(f *os.File, path string) bool {
	is, err := f.Stat()
	at, err2 := os.Stat(path)
	return err == nil && err2 == nil && os.SameFile(is, at)
}

// Alive reports whether a daemon runs whose maps are pinned in the directory pins.
func Alive(pins string) bool {
	f, err := os.Open(pins)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}
