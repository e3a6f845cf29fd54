package bpf

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/shaper"
)

// Foreign is what another tool runs at an interface before the limits of an attachment.
type Foreign = attach.Foreign

// FindForeign returns what runs before the limits of attachments, whether a daemon with these
// pins has made them or not. It needs CAP_NET_ADMIN, and CAP_SYS_ADMIN for the names of
// programs.
func FindForeign(pins string, attachments []shaper.Attachment) (all []Foreign, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	own := ownLinks(pins)
	for i := range attachments {
		a := &attachments[i]
		for _, l := range links {
			if !a.Matches(l.Attrs().Name) || attach.IsIFB(l) {
				continue
			}
			found, err := attach.FindForeign(a, l, own)
			if err != nil {
				return nil, attachError(a, l.Attrs().Name, explainPermission(err))
			}
			all = append(all, found...)
		}
	}
	return all, nil
}

// ownLinks returns the links that are pinned under a directory, for maps of any version.
func ownLinks(dir string) attach.Own {
	roles := map[string]attach.Role{}
	pins, _ := filepath.Glob(filepath.Join(dir, "v*", "links", "*"))
	for _, pin := range pins {
		roles[pin] = attach.Limiter
		if strings.HasSuffix(pin, repliesPin) {
			roles[pin] = attach.ReplyTracker
		}
	}
	return attach.NewOwn(roles)
}

func (p *Plane) ownLinks() attach.Own { return ownLinks(filepath.Dir(p.dir)) }
