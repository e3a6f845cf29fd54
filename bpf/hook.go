package bpf

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

// hook attaches one program to an interface. It leaves other programs there alone.
type hook interface {
	// update replaces the program atomically.
	update(*ebpf.Program) error
	// check returns an error when the program is no longer attached.
	check() error
	// detach detaches the program.
	detach() error
	// repin pins the hook at another path.
	repin(path string) error
	// release closes the hook; a pinned program stays attached.
	release()
}

var errDetached = errors.New("its program was detached")

// hookPoint is an interface and a direction.
type hookPoint struct {
	ifindex int
	ingress bool
}

// role is what a program does at a hook point. Programs of both roles may share one, for
// different attachments.
type role uint16

const (
	limitProg role = iota
	replyProg      // tracks the replies of counted connections
)

// attach attaches a program by a hook, which is pinned at pin.
func attach(h shaper.Hook, at hookPoint, r role, program *ebpf.Program, pin string) (hook, error) {
	switch h {
	case shaper.HookXDP:
		return attachLink(pin, at, program, func() (link.Link, error) { return attachXDP(at.ifindex, program) })
	case shaper.HookClsact:
		return attachClsact(at, r, program)
	case shaper.HookTCX:
		return attachLink(pin, at, program, func() (link.Link, error) { return attachTCX(at, program) })
	}
	l, err := attach(shaper.HookTCX, at, r, program, pin)
	if errors.Is(err, ebpf.ErrNotSupported) {
		return attach(shaper.HookClsact, at, r, program, pin)
	}
	return l, err
}

func attachTCX(at hookPoint, program *ebpf.Program) (link.Link, error) {
	kind := ebpf.AttachTCXEgress
	if at.ingress {
		kind = ebpf.AttachTCXIngress
	}
	// Before all others: any of them may consume a packet, and all run on those that this one passes on.
	return link.AttachTCX(link.TCXOptions{Interface: at.ifindex, Program: program, Attach: kind, Anchor: link.Head()})
}

func attachXDP(ifindex int, program *ebpf.Program) (link.Link, error) {
	l, err := link.AttachXDP(link.XDPOptions{Interface: ifindex, Program: program})
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		// The driver has no XDP: generic mode runs later, at the cost of a copy.
		l, err = link.AttachXDP(link.XDPOptions{Interface: ifindex, Program: program, Flags: link.XDPGenericMode})
	}
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("another XDP program is attached, and an interface takes only one: write hook = \"tcx\" or \"clsact\" (%w)", err)
	}
	return l, err
}

// linkHook is a program attached by a pinned link: it stays when the daemon ends.
type linkHook struct {
	link.Link
	at hookPoint
}

func attachLink(pin string, at hookPoint, program *ebpf.Program, create func() (link.Link, error)) (hook, error) {
	// Left by a daemon that was killed before it recorded the link.
	if l, err := link.LoadPinnedLink(pin, nil); err == nil {
		h := &linkHook{l, at}
		if h.check() == nil && h.update(program) == nil {
			return h, nil
		}
		_ = l.Close()
	}
	l, err := create()
	if err != nil {
		return nil, err
	}
	_ = os.Remove(pin) // of a link that no longer exists
	if err := l.Pin(pin); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("pin link: %w", err)
	}
	return &linkHook{l, at}, nil
}

func (h *linkHook) update(program *ebpf.Program) error { return h.Link.Update(program) }

func (h *linkHook) check() error {
	info, err := h.Link.Info()
	if err != nil {
		return err
	}
	if tcx := info.TCX(); tcx != nil {
		if at := ebpf.AttachType(tcx.AttachType) == ebpf.AttachTCXIngress; at != h.at.ingress {
			return errDetached
		}
	}
	if interfaceOf(info) != uint32(h.at.ifindex) {
		return errDetached
	}
	return nil
}

// interfaceOf returns the interface index of a link; 0 when the interface has been removed.
func interfaceOf(info *link.Info) uint32 {
	if tcx := info.TCX(); tcx != nil {
		return tcx.Ifindex
	}
	if xdp := info.XDP(); xdp != nil {
		return xdp.Ifindex
	}
	return 0
}

// detach detaches the program at once: removing the pin alone takes effect with a delay.
func (h *linkHook) detach() error {
	_ = h.Link.Detach() // on an error Unpin and Close detach it
	err := h.Link.Unpin()
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, h.Link.Close())
}

func (h *linkHook) repin(path string) error {
	if err := h.Link.Pin(path); err != nil {
		return fmt.Errorf("pin link: %w", err)
	}
	return nil
}

func (h *linkHook) release() { _ = h.Link.Close() }

// clsactHook is a program attached by a filter of the qdisc clsact, for kernels before
// tcx. The filter stays when the daemon ends.
type clsactHook struct {
	at      hookPoint
	role    role
	program ebpf.ProgramID // 0 while it is an earlier daemon's
}

// These identify the filter. Priorities are shared by all tools; Cilium uses 1 and
// stays before this one.
const (
	clsactPriority = 0x5ad // the role is added
	clsactHandle   = 0x5ad
	clsactName     = "shaperd"
)

func attachClsact(at hookPoint, r role, program *ebpf.Program) (hook, error) {
	if err := addClsact(at); err != nil {
		return nil, err
	}
	h := &clsactHook{at: at, role: r}
	return h, h.update(program)
}

// addClsact gives an interface the qdisc clsact, if it has none.
func addClsact(at hookPoint) error {
	err := netlink.QdiscAdd(clsact(at.ifindex))
	if errors.Is(err, unix.EEXIST) {
		err = nil
		if !at.ingress { // the qdisc ingress suffices for ingress
			err = onlyIngress(at.ifindex)
		}
	}
	if err != nil {
		return fmt.Errorf("add qdisc clsact: %w", err)
	}
	return nil
}

// onlyIngress returns an error when an interface has the older qdisc ingress, which
// would run egress filters at ingress.
func onlyIngress(ifindex int) error {
	l, err := netlink.LinkByIndex(ifindex)
	if err != nil {
		return err
	}
	present, err := clsactOf(l)
	if err == nil && present != nil && present.Kind == "ingress" {
		err = fmt.Errorf("the qdisc ingress occupies its place: remove it with \"tc qdisc del dev %s ingress\"", l.Attrs().Name)
	}
	return err
}

func clsact(ifindex int) *netlink.Clsact {
	return &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: ifindex, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}}
}

// clsactOf returns the qdisc clsact or ingress of an interface, or nil.
func clsactOf(l netlink.Link) (*qdisc, error) {
	all, err := qdiscs(l)
	if i := slices.IndexFunc(all, func(d qdisc) bool { return d.Parent == netlink.HANDLE_CLSACT }); i >= 0 {
		return &all[i], nil
	}
	return nil, err
}

// removeClsact removes the qdisc clsact from an interface unless it has filters. It
// reports whether the qdisc is gone.
func removeClsact(ifindex int) (bool, error) {
	l, err := netlink.LinkByIndex(ifindex)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	if present, err := clsactOf(l); err != nil || present == nil {
		return err == nil, err
	}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		filters, err := netlink.FilterList(l, parent)
		if err != nil || len(filters) > 0 {
			return false, err
		}
	}
	if err := netlink.QdiscDel(clsact(ifindex)); err != nil && !isNotFound(err) {
		return false, fmt.Errorf("remove qdisc clsact of %s: %w", l.Attrs().Name, err)
	}
	return true, nil
}

func (h *clsactHook) priority() uint16 { return clsactPriority + uint16(h.role) }

func (h *clsactHook) parent() uint32 {
	if h.at.ingress {
		return netlink.HANDLE_MIN_INGRESS
	}
	return netlink.HANDLE_MIN_EGRESS
}

func (h *clsactHook) filter() *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: h.at.ifindex, Parent: h.parent(), Handle: clsactHandle,
			Priority: h.priority(), Protocol: unix.ETH_P_ALL,
		},
		Name: clsactName, DirectAction: true,
	}
}

func (h *clsactHook) update(program *ebpf.Program) error {
	info, err := program.Info()
	if err != nil {
		return err
	}
	f := h.filter()
	f.Fd = program.FD()
	if err := netlink.FilterReplace(f); err != nil {
		return fmt.Errorf("add filter to clsact: %w", err)
	}
	h.program, _ = info.ID()
	return nil
}

func (h *clsactHook) check() error {
	link, err := netlink.LinkByIndex(h.at.ifindex)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return errDetached
	}
	if err != nil {
		return err
	}
	filters, err := netlink.FilterList(link, h.parent())
	if err != nil && !isNotFound(err) {
		return err
	}
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok && b.Priority == h.priority() && (h.program == 0 || ebpf.ProgramID(b.Id) == h.program) {
			h.program = ebpf.ProgramID(b.Id)
			return nil
		}
	}
	return errDetached
}

// detach leaves the filter if another hook has replaced its program.
func (h *clsactHook) detach() error {
	err := h.check()
	if errors.Is(err, errDetached) {
		return nil
	}
	if err == nil {
		err = netlink.FilterDel(h.filter())
	}
	if err != nil && !isNotFound(err) {
		return fmt.Errorf("remove filter from clsact: %w", err)
	}
	return nil
}

func (h *clsactHook) repin(string) error { return nil }

func (h *clsactHook) release() {}
