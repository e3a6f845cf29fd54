package bpf

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Foreign is a program, a filter or a chain of others that packets meet at an interface before the
// limits of an attachment: what it takes does not meet them.
type Foreign struct {
	Attachment, Interface string
	Ingress               bool
	What                  string // the program, filter or chain, with its name
	Fix                   string // commands that show and remove it, or what to configure instead
	Refuses               bool   // the attachment is not made because of it
}

// FindForeign returns what packets meet before the limits of attachments: those that are made,
// by a daemon with these pins, or would be. It takes CAP_NET_ADMIN, and CAP_SYS_ADMIN
// for the names of programs.
func FindForeign(pins string, attachments []Attachment) (all []Foreign, err error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	own := ownLinks(pins)
	for i := range attachments {
		a := &attachments[i]
		for _, l := range links {
			if !a.matches(l.Attrs().Name) || isOwnIFB(l) {
				continue
			}
			found, err := a.foreign(l, own)
			if err != nil {
				return nil, attachError(a, l.Attrs().Name, privileges(err))
			}
			all = append(all, found...)
		}
	}
	return all, nil
}

// owned is what a daemon has attached, by links that are pinned.
type owned struct {
	links    map[link.ID]role
	programs map[ebpf.ProgramID]bool
}

// ownLinks returns what is pinned under a folder, by maps of whatever version.
func ownLinks(dir string) owned {
	own := owned{map[link.ID]role{}, map[ebpf.ProgramID]bool{}}
	pins, _ := filepath.Glob(filepath.Join(dir, "v*", "links", "*"))
	for _, pin := range pins {
		l, err := link.LoadPinnedLink(pin, nil)
		if err != nil {
			continue
		}
		if info, err := l.Info(); err == nil {
			own.links[info.ID] = limiting
			if strings.HasSuffix(pin, repliesPin) {
				own.links[info.ID] = noting
			}
			own.programs[info.Program] = true
		}
		_ = l.Close()
	}
	return own
}

func (p *Plane) ownLinks() owned { return ownLinks(filepath.Dir(p.dir)) }

// foreign lists what packets at l meet before the program of a that holds them to the limits.
// Each of these may end their way there.
func (a *Attachment) foreign(l netlink.Link, own owned) (all []Foreign, err error) {
	at := side{l.Attrs().Index, a.Ingress}
	name, way := l.Attrs().Name, way(a.Ingress)
	add := func(refuses bool, fix string, what ...string) {
		for _, what := range what {
			all = append(all, Foreign{a.Name, name, a.Ingress, what, fix, refuses})
		}
	}
	if x := l.Attrs().Xdp; a.Ingress && x != nil && x.Attached && !own.programs[ebpf.ProgramID(x.ProgId)] {
		add(a.Hook == XDP, fmt.Sprintf(`"ip link show dev %s" shows it, "ip link set dev %s xdp off" removes it`, name, name),
			"the XDP program "+programName(ebpf.ProgramID(x.ProgId)))
	}
	if a.Hook == XDP {
		return all, nil
	}
	programs, attached, err := tcxPrograms(at, own)
	if err != nil {
		return nil, err
	}
	show := fmt.Sprintf(`"bpftool net show dev %s" shows it; `, name)
	switch {
	case a.detours():
		add(true, show+`write mode = "police"`, programs...)
		chains, err := ingressChains(name)
		if err != nil {
			return nil, err
		}
		add(true, `"nft list ruleset" shows it; write mode = "police"`, chains...)
	case attached:
		add(false, show+`"systemctl restart shaperd" puts the limits first`, programs...)
		return all, nil
	case a.Hook != Clsact && tcxAt(at):
		return all, nil // it goes before them
	default:
		add(false, show+`write hook = "tcx"`, programs...)
	}
	priority := clsactPriority + uint16(limiting)
	if a.detours() {
		priority = detourPriority
	}
	filters, err := filtersBefore(l, at, priority)
	for _, f := range filters {
		pref := f.Attrs().Priority
		add(false, fmt.Sprintf(`"tc filter show dev %s %s" shows it, "tc filter del dev %s %s pref %d" removes it`, name, way, name, way, pref),
			fmt.Sprintf("the filter %s of preference %d", f.Type(), pref))
	}
	return all, err
}

// tcxPrograms lists the programs at one side of an interface that are not one's own, up to
// one's own that holds packets to limits; and whether that is there.
func tcxPrograms(at side, own owned) (all []string, attached bool, err error) {
	q, err := queryTCX(at)
	if err != nil || q == nil {
		return nil, false, err
	}
	for _, p := range q.Programs {
		id, _ := p.LinkID()
		r, ours := own.links[id]
		if ours && r == limiting {
			return all, true, nil
		}
		if !ours {
			all = append(all, "the tcx program "+programName(p.ID))
		}
	}
	return all, false, nil
}

// queryTCX asks for the programs at one side of an interface. The answer is nil where the kernel
// is from before tcx.
func queryTCX(at side) (*link.QueryResult, error) {
	kind := ebpf.AttachTCXEgress
	if at.ingress {
		kind = ebpf.AttachTCXIngress
	}
	q, err := link.QueryPrograms(link.QueryOptions{Target: at.ifindex, Attach: kind})
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) {
		return nil, nil
	}
	return q, err
}

// tcxAt reports whether programs may be attached at one side of an interface by tcx.
func tcxAt(at side) bool {
	q, err := queryTCX(at)
	return q != nil && err == nil
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
// preference and are not one's own, one of each preference, in the order in which packets
// meet them.
func filtersBefore(l netlink.Link, at side, priority uint16) ([]netlink.Filter, error) {
	parent := uint32(netlink.HANDLE_MIN_EGRESS)
	if at.ingress {
		parent = netlink.HANDLE_MIN_INGRESS
	}
	filters, err := netlink.FilterList(l, parent)
	if err != nil && !gone(err) {
		return nil, fmt.Errorf("list filters of %s: %w", l.Attrs().Name, err)
	}
	filters = slices.DeleteFunc(filters, func(f netlink.Filter) bool {
		pref := f.Attrs().Priority
		return pref >= priority || pref == clsactPriority+uint16(limiting) || pref == clsactPriority+uint16(noting)
	})
	byPreference := func(a, b netlink.Filter) int { return cmp.Compare(a.Attrs().Priority, b.Attrs().Priority) }
	slices.SortStableFunc(filters, byPreference)
	return slices.CompactFunc(filters, func(a, b netlink.Filter) bool { return byPreference(a, b) == 0 }), nil
}
