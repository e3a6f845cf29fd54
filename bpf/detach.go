package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// savedPoint is what has to be known of an attachment at an interface to take it
// away, by a daemon that did not put it there.
type savedPoint struct {
	Attachment string
	Ifindex    int
	Ingress    bool
	Hook       Hook
	Mode       Mode
	Counts     bool // there is a program for replies
}

// detours reports whether the program is at an intermediate device.
func (s savedPoint) detours() bool { return s.Ingress && s.Mode == Shape }

// pin is the name of a link's pin. A bpf file system takes no dots.
func (s savedPoint) pin(dir string) string {
	name := fmt.Sprintf("%d-%s-%s", s.Ifindex, way(s.Ingress), s.Hook)
	if s.detours() {
		name += "-ifb"
	}
	return filepath.Join(dir, "links", name)
}

// adopt finds the point as an earlier daemon left it.
func (s savedPoint) adopt(dir string) (*point, error) {
	pt := &point{Attachment: Attachment{Name: s.Attachment, Ingress: s.Ingress, Hook: s.Hook, Mode: s.Mode}, ifindex: s.Ifindex}
	if l, err := netlink.LinkByIndex(s.Ifindex); err == nil {
		pt.ifname = l.Attrs().Name
	}
	at := pt.key()
	if pt.detours() {
		at = side{}
		if ifb, err := netlink.LinkByName(ifbName(s.Ifindex)); err == nil {
			at.ifindex = ifb.Attrs().Index
		}
	}
	var err error
	if pt.hook, err = adoptHook(s.pin(dir), s.Hook, at, limiting); err == nil && s.Counts {
		pt.replies, err = adoptHook(s.pin(dir)+repliesPin, s.Hook.ofReplies(), side{s.Ifindex, !s.Ingress}, noting)
	}
	return pt, err
}

// adoptHook finds a program as an earlier daemon attached it.
func adoptHook(pin string, h Hook, at side, r role) (hook, error) {
	l, err := link.LoadPinnedLink(pin, nil)
	switch {
	case err == nil:
		return &linkHook{l, at}, nil
	case errors.Is(err, os.ErrNotExist) && (h == Clsact || h == Auto):
		return &clsactHook{at: at, role: r}, nil
	case errors.Is(err, os.ErrNotExist):
		return goneHook{}, nil
	}
	return nil, err
}

// goneHook is what a daemon had taken away when it was killed.
type goneHook struct{}

func (goneHook) update(*ebpf.Program) error { return errDetached }
func (goneHook) check() error               { return errDetached }
func (goneHook) detach() error              { return nil }
func (goneHook) repin(string) error         { return nil }
func (goneHook) release()                   {}

// Detach removes every trace of planes whose programs and maps are pinned under the
// folder pins: what a daemon left that was killed, or that was to keep them. The
// folder stays when it is not this process's to remove. It is an error while a plane is open
// there, or another Detach runs.
func Detach(pins string) error {
	locked, err := lock(pins)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer locked.Close()
	entries, err := os.ReadDir(pins)
	if err != nil {
		return privileges(err)
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

// Pinned reports whether anything of shaperd is pinned under the folder pins.
func Pinned(pins string) bool {
	found, _ := filepath.Glob(filepath.Join(pins, "v*", kernelMapHeartbeats))
	return len(found) > 0
}

func detachFolder(dir string) error {
	r, err := openRegistryHere(dir)
	if err != nil {
		return privileges(err)
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
	errs = append(errs, r.tidy(func(side) bool { return false }))
	if err := errors.Join(errs...); err != nil {
		return err // the registry is needed to try again
	}
	return os.RemoveAll(dir)
}

// occupy makes the folder pins, and keeps other daemons from it until it is closed, or this
// process ends: they would take each other's attachments for what an earlier one left.
func occupy(pins string) (f *os.File, err error) {
	for range 10 { // who has just ended may remove it
		if err = makeFolder(pins); err == nil {
			f, err = lock(pins)
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

// lockTime is how long lock waits for somebody who only looks whether a daemon runs.
const lockTime = 200 * time.Millisecond

// lock opens a folder of pins that nobody else has locked.
func lock(pins string) (*os.File, error) {
	for end := time.Now().Add(lockTime); ; time.Sleep(lockTime / 20) {
		f, err := os.Open(pins)
		if err != nil {
			return nil, privileges(err)
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil && isAt(f, pins) {
			return f, nil
		}
		f.Close()
		if err != nil && (!errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end)) {
			return nil, fmt.Errorf(`%s: another daemon, or "shaperd detach", runs with it: end that, or name another folder (%w)`, pins, err)
		}
	}
}

// isAt reports whether path is still that of f: who had it before may have removed it.
func isAt(f *os.File, path string) bool {
	is, err := f.Stat()
	at, err2 := os.Stat(path)
	return err == nil && err2 == nil && os.SameFile(is, at)
}

// Alive reports whether a daemon runs whose maps are pinned under the folder pins.
func Alive(pins string) bool {
	f, err := os.Open(pins)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}
