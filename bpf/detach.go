package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"

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
