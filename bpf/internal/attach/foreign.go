package attach

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/shaper"
)

// Foreign is a program, filter or chain of another tool that runs at an interface before the
// limits of an attachment. Packets that it consumes are not limited.
type Foreign struct {
	Attachment, Interface string
	Direction             shaper.AttachDirection
	What                  string // the program, filter or chain, with its name
	Fix                   string // commands that show and remove it, or the configuration to use instead
	Refuses               bool   // the attachment fails because of it
}

// Own are the pinned links of a daemon and their programs.
type Own struct {
	links    map[link.ID]Role
	programs map[ebpf.ProgramID]bool
}

// NewOwn returns the links that are pinned at the given paths, with the roles of their programs.
func NewOwn(pins map[string]Role) Own {
	own := Own{map[link.ID]Role{}, map[ebpf.ProgramID]bool{}}
	for pin, role := range pins {
		l, err := link.LoadPinnedLink(pin, nil)
		if err != nil {
			continue
		}
		if info, err := l.Info(); err == nil {
			own.links[info.ID] = role
			own.programs[info.Program] = true
		}
		_ = l.Close()
	}
	return own
}

// FindForeign lists what runs at l before the limiter of a. Each of these may consume packets.
func FindForeign(a *shaper.Attachment, l netlink.Link, own Own) (all []Foreign, err error) {
	at := Point{l.Attrs().Index, a.Direction == shaper.Ingress}
	name, dir := l.Attrs().Name, a.Direction
	add := func(refuses bool, fix string, what ...string) {
		for _, what := range what {
			all = append(all, Foreign{a.Name, name, a.Direction, what, fix, refuses})
		}
	}
	if x := l.Attrs().Xdp; a.Direction == shaper.Ingress && x != nil && x.Attached && !own.programs[ebpf.ProgramID(x.ProgId)] {
		add(a.Hook == shaper.HookXDP, fmt.Sprintf(`"ip link show dev %s" shows it, "ip link set dev %s xdp off" removes it`, name, name),
			"the XDP program "+programName(ebpf.ProgramID(x.ProgId)))
	}
	if a.Hook == shaper.HookXDP {
		return all, nil
	}
	programs, attached, err := tcxPrograms(at, own)
	if err != nil {
		return nil, err
	}
	show := fmt.Sprintf(`"bpftool net show dev %s" shows it; `, name)
	switch {
	case UsesIFB(a):
		add(true, show+`write mode = "police"`, programs...)
		chains, err := ingressChains(name)
		if err != nil {
			return nil, err
		}
		add(true, `"nft list ruleset" shows it; write mode = "police"`, chains...)
	case attached:
		add(false, show+`"systemctl restart shaperd" puts the limits first`, programs...)
		return all, nil
	case a.Hook != shaper.HookClsact && supportsTCX(at):
		return all, nil // tcx runs before the filters
	default:
		add(false, show+`write hook = "tcx"`, programs...)
	}
	priority := priorityOf(Limiter)
	if UsesIFB(a) {
		priority = redirectPriority
	}
	filters, err := filtersBefore(l, at, priority)
	for _, f := range filters {
		pref := f.Attrs().Priority
		add(false, fmt.Sprintf(`"tc filter show dev %s %s" shows it, "tc filter del dev %s %s pref %d" removes it`, name, dir, name, dir, pref),
			fmt.Sprintf("the filter %s with preference %d", f.Type(), pref))
	}
	return all, err
}

// tcxPrograms lists the foreign programs at a point that run before the own limiting
// program, and reports whether that is attached.
func tcxPrograms(at Point, own Own) (all []string, attached bool, err error) {
	q, err := queryTCX(at)
	if err != nil || q == nil {
		return nil, false, err
	}
	for _, p := range q.Programs {
		id, _ := p.LinkID()
		r, ours := own.links[id]
		if ours && r == Limiter {
			return all, true, nil
		}
		if !ours {
			all = append(all, "the tcx program "+programName(p.ID))
		}
	}
	return all, false, nil
}

// programName returns the name and ID of a program, or the ID alone without CAP_SYS_ADMIN.
func programName(id ebpf.ProgramID) string {
	if p, err := ebpf.NewProgramFromID(id); err == nil {
		defer p.Close()
		if info, err := p.Info(); err == nil && info.Name != "" {
			return fmt.Sprintf("%s (id %d)", info.Name, id)
		}
	}
	return fmt.Sprintf("with id %d", id)
}

// filtersBefore lists the foreign tc filters at a point that run before a preference,
// one of each preference, in the order in which they run.
func filtersBefore(l netlink.Link, at Point, priority uint16) ([]netlink.Filter, error) {
	filters, err := netlink.FilterList(l, parentOf(at))
	if err != nil && !isNotFound(err) {
		return nil, fmt.Errorf("list filters of %s: %w", l.Attrs().Name, err)
	}
	filters = slices.DeleteFunc(filters, func(f netlink.Filter) bool {
		pref := f.Attrs().Priority
		return pref >= priority || pref == priorityOf(Limiter) || pref == priorityOf(ReplyTracker)
	})
	byPreference := func(a, b netlink.Filter) int { return cmp.Compare(a.Attrs().Priority, b.Attrs().Priority) }
	slices.SortStableFunc(filters, byPreference)
	return slices.CompactFunc(filters, func(a, b netlink.Filter) bool { return byPreference(a, b) == 0 }), nil
}
