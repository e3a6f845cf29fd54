package bpf

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ownLinks returns the links that are pinned under a folder.
func ownLinks(dir string) map[link.ID]bool {
	own := map[link.ID]bool{}
	pins, _ := filepath.Glob(filepath.Join(dir, "links", "*"))
	for _, pin := range pins {
		if l, err := link.LoadPinnedLink(pin, nil); err == nil {
			if info, err := l.Info(); err == nil {
				own[info.ID] = true
			}
			_ = l.Close()
		}
	}
	return own
}

// standsBefore lists what packets meet before the program of pt that holds them to the
// limits. Each of these may end their way there.
func (pt *point) standsBefore(own map[link.ID]bool) (all []string, err error) {
	l, isLink := pt.hook.(*linkHook)
	switch {
	case pt.Hook == XDP:
		return nil, nil // an interface takes one
	case isLink && !pt.detours():
		info, err := l.Info()
		if err != nil {
			return nil, err
		}
		return tcxPrograms(pt.key(), own, info.ID)
	}
	if all, err = tcxPrograms(pt.key(), own, 0); err != nil {
		return nil, err
	}
	priority := uint16(detourPriority)
	if h, ok := pt.hook.(*clsactHook); ok && !pt.detours() {
		priority = h.priority()
	}
	filters, err := filtersBefore(pt.key(), priority)
	return append(all, filters...), err
}

// tcxPrograms lists the programs at one side of an interface that are not held by links of
// one's own, up to that of the link until.
func tcxPrograms(at side, own map[link.ID]bool, until link.ID) (all []string, err error) {
	kind := ebpf.AttachTCXEgress
	if at.ingress {
		kind = ebpf.AttachTCXIngress
	}
	q, err := link.QueryPrograms(link.QueryOptions{Target: at.ifindex, Attach: kind})
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) {
		return nil, nil // a kernel before tcx
	}
	if err != nil {
		return nil, err
	}
	for _, p := range q.Programs {
		id, _ := p.LinkID()
		if id != 0 && id == until {
			break
		}
		if !own[id] {
			all = append(all, "the tcx program "+programName(p.ID))
		}
	}
	return all, nil
}

// programName names a program as people know it, where it may be looked at: that takes
// CAP_SYS_ADMIN.
func programName(id ebpf.ProgramID) string {
	if p, err := ebpf.NewProgramFromID(id); err == nil {
		defer p.Close()
		if info, err := p.Info(); err == nil && info.Name != "" {
			return fmt.Sprintf("%s (id %d)", info.Name, id)
		}
	}
	return fmt.Sprintf("of id %d", id)
}

// filtersBefore lists the filters of tc at one side of an interface that come before a
// preference and are not one's own, in the order in which packets meet them.
func filtersBefore(at side, priority uint16) (all []string, err error) {
	l, err := netlink.LinkByIndex(at.ifindex)
	if err != nil {
		return nil, err
	}
	parent := uint32(netlink.HANDLE_MIN_EGRESS)
	if at.ingress {
		parent = netlink.HANDLE_MIN_INGRESS
	}
	filters, err := netlink.FilterList(l, parent)
	if err != nil && !gone(err) {
		return nil, fmt.Errorf("list filters of %s: %w", l.Attrs().Name, err)
	}
	slices.SortStableFunc(filters, func(a, b netlink.Filter) int { return cmp.Compare(a.Attrs().Priority, b.Attrs().Priority) })
	for _, f := range filters {
		pref := f.Attrs().Priority
		if pref < priority && pref != clsactPriority+uint16(limiting) && pref != clsactPriority+uint16(noting) {
			all = append(all, fmt.Sprintf("the filter %s of preference %d", f.Type(), pref))
		}
	}
	return slices.Compact(all), nil
}
