package attach

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// clsactFilter is a program attached by a filter of the qdisc clsact, for kernels before
// tcx.
type clsactFilter struct {
	at      Point
	role    Role
	program ebpf.ProgramID // 0 while it is an earlier process's
}

// These identify the filter. Priorities are shared by all tools; Cilium uses 1 and
// stays before this one.
const (
	clsactPriority = 0x5ad // the role is added
	clsactHandle   = 0x5ad
	clsactName     = "shaperd"
)

func attachClsact(o Options) (Link, error) {
	if err := addClsact(o.At); err != nil {
		return nil, err
	}
	f := &clsactFilter{at: o.At, role: o.Role}
	return f, f.Update(o.Program)
}

// addClsact gives an interface the qdisc clsact, if it has none.
func addClsact(at Point) error {
	err := netlink.QdiscAdd(clsact(at.Ifindex))
	if errors.Is(err, unix.EEXIST) {
		err = nil
		if !at.Ingress { // the qdisc ingress suffices for ingress
			err = onlyIngress(at.Ifindex)
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
func clsactOf(l netlink.Link) (*Qdisc, error) {
	all, err := Qdiscs(l)
	if i := slices.IndexFunc(all, func(d Qdisc) bool { return d.Parent == netlink.HANDLE_CLSACT }); i >= 0 {
		return &all[i], nil
	}
	return nil, err
}

// HasClsact reports whether an interface has the qdisc clsact or ingress.
func HasClsact(l netlink.Link) (bool, error) {
	present, err := clsactOf(l)
	return present != nil, err
}

// RemoveClsact removes the qdisc clsact from an interface unless it has filters. It
// reports whether the qdisc is gone.
func RemoveClsact(ifindex int) (bool, error) {
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

// priorityOf returns the priority, or preference, of a role's filter.
func priorityOf(r Role) uint16 { return clsactPriority + uint16(r) }

// parentOf returns the parent of the filters at a point.
func parentOf(at Point) uint32 {
	if at.Ingress {
		return netlink.HANDLE_MIN_INGRESS
	}
	return netlink.HANDLE_MIN_EGRESS
}

func (f *clsactFilter) filter() *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: f.at.Ifindex, Parent: parentOf(f.at), Handle: clsactHandle,
			Priority: priorityOf(f.role), Protocol: unix.ETH_P_ALL,
		},
		Name: clsactName, DirectAction: true,
	}
}

func (f *clsactFilter) Update(program *ebpf.Program) error {
	info, err := program.Info()
	if err != nil {
		return err
	}
	b := f.filter()
	b.Fd = program.FD()
	if err := netlink.FilterReplace(b); err != nil {
		return fmt.Errorf("add filter to clsact: %w", err)
	}
	f.program, _ = info.ID()
	return nil
}

func (f *clsactFilter) Check() error {
	l, err := netlink.LinkByIndex(f.at.Ifindex)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return ErrDetached
	}
	if err != nil {
		return err
	}
	filters, err := netlink.FilterList(l, parentOf(f.at))
	if err != nil && !isNotFound(err) {
		return err
	}
	for _, other := range filters {
		if b, ok := other.(*netlink.BpfFilter); ok && b.Priority == priorityOf(f.role) && (f.program == 0 || ebpf.ProgramID(b.Id) == f.program) {
			f.program = ebpf.ProgramID(b.Id)
			return nil
		}
	}
	return ErrDetached
}

// Detach leaves the filter if another link has replaced its program.
func (f *clsactFilter) Detach() error {
	err := f.Check()
	if errors.Is(err, ErrDetached) {
		return nil
	}
	if err == nil {
		err = netlink.FilterDel(f.filter())
	}
	if err != nil && !isNotFound(err) {
		return fmt.Errorf("remove filter from clsact: %w", err)
	}
	return nil
}

func (f *clsactFilter) Repin(string) error { return nil }

func (f *clsactFilter) Release() {}

// isNotFound reports whether err means that there is nothing to remove.
func isNotFound(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL)
}
