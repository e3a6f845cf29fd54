package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"shaperd/leaky"
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

// pin is the name of a link's pin. A bpf file system takes no dots.
func (s savedPoint) pin(dir string) string {
	name := fmt.Sprintf("%d-%s-%s", s.Ifindex, way(s.Ingress), s.Hook)
	if s.Ingress && s.Mode == Shape {
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
// folder stays when it is not this process's to remove.
func Detach(pins string) error {
	entries, err := os.ReadDir(pins)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
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
	r, err := openRegistry(dir)
	if err != nil {
		return privileges(err)
	}
	defer r.store.Close()
	if here := namespace(); r.Namespace != here {
		return fmt.Errorf("%s is of interfaces in another network namespace: run this there, with \"ip netns exec\" or \"nsenter --net\"; "+
			"if it is gone, remove the folder", dir)
	}
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

// Alive reports whether a daemon is running whose maps are pinned under the folder
// pins, by its heartbeat.
func Alive(pins string) bool {
	dirs, _ := filepath.Glob(filepath.Join(pins, "v*"))
	for _, dir := range dirs {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, kernelMapHeartbeats), nil)
		if err != nil {
			continue
		}
		var last uint64
		err = m.Lookup(uint32(0), &last)
		_ = m.Close()
		if err == nil && monotonic() < leaky.Time(last)*leaky.FromDuration(1)+leaky.FromDuration(3*beatInterval) {
			return true
		}
	}
	return false
}
