package attach

import (
	"errors"
	"fmt"
	"runtime"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

// The kernel has no queue at ingress. To delay incoming packets they are redirected to an
// intermediate device (IFB), at whose egress they are shaped, and which then passes them on
// as if they had just come in.
//
// The redirect is a mirred action: an IFB has to know the interface that packets came from,
// which bpf_redirect does not pass.

// UsesIFB reports whether packets of a pass through an intermediate device.
func UsesIFB(a *shaper.Attachment) bool { return a.Direction == shaper.Ingress && a.Shapes() }

// IFBName is the name of the intermediate device of an interface.
func IFBName(ifindex int) string { return fmt.Sprint("shaperd", ifindex) }

// IsIFB reports whether this package created the intermediate device l.
func IsIFB(l netlink.Link) bool {
	return l.Type() == "ifb" && strings.HasPrefix(l.Attrs().Name, "shaperd")
}

// SetUpIFB creates the intermediate device of an interface, and returns it. No packets are
// redirected before AddRedirect.
func SetUpIFB(l netlink.Link) (netlink.Link, error) {
	name := IFBName(l.Attrs().Index)
	ifb, err := netlink.LinkByName(name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		ifb, err = addIFB(l, name)
	}
	if err == nil && ifb.Type() != "ifb" {
		err = fmt.Errorf("the name is taken by a %s", ifb.Type())
	}
	if err == nil {
		err = netlink.LinkSetUp(ifb)
	}
	if err != nil {
		return nil, fmt.Errorf("intermediate device %s: %w", name, err)
	}
	return ifb, nil
}

func addIFB(l netlink.Link, name string) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	attrs.MTU = l.Attrs().MTU
	// As many queues as the interface has receive queues, but not more than CPUs: each
	// has its own lock and tasklet.
	attrs.NumTxQueues = max(1, min(l.Attrs().NumRxQueues, runtime.NumCPU()))
	err := netlink.LinkAdd(&netlink.Ifb{LinkAttrs: attrs})
	if errors.Is(err, unix.EOPNOTSUPP) {
		return nil, errors.New(`this kernel has no ifb, which mode = "shape" needs at ingress: load the module with "modprobe ifb", or write mode = "police"`)
	}
	if err != nil {
		return nil, err
	}
	ifb, err := netlink.LinkByName(name)
	if err == nil {
		// Only informative, in lists of interfaces.
		_ = netlink.LinkSetAlias(ifb, "shaperd ingress of "+l.Attrs().Name)
	}
	return ifb, err
}

// redirectPriority is the priority of the redirecting filter, and identifies it. It is the last
// one: filters after it would see no packets, as packets from the IFB pass no filters.
const redirectPriority = 0xffff

// redirectFilter returns the filter that redirects all incoming packets to a device. It is of
// the kind u32, which unlike matchall can be changed while packets pass.
func redirectFilter(l netlink.Link, to int) *netlink.U32 {
	return &netlink.U32{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS,
			Priority: redirectPriority, Protocol: unix.ETH_P_ALL,
		},
		// Without keys it matches all packets. Linux 6.12 logs a warning when it copies
		// a key.
		Sel:     &netlink.TcU32Sel{Flags: netlink.TC_U32_TERMINAL},
		Actions: []netlink.Action{netlink.NewMirredAction(to)},
	}
}

// AddRedirect adds the filter that redirects incoming packets to the intermediate device.
func AddRedirect(l, ifb netlink.Link) error {
	if err := addClsact(Point{l.Attrs().Index, true}); err != nil {
		return err
	}
	present, err := findRedirect(l)
	if err != nil {
		return err
	}
	f := redirectFilter(l, ifb.Attrs().Index)
	if present != nil {
		if present.RedirIndex == ifb.Attrs().Index {
			return nil
		}
		f.Handle = present.Handle
	}
	if err = netlink.FilterReplace(f); errors.Is(err, unix.ENOENT) {
		err = errors.New(`this kernel lacks what mode = "shape" needs at ingress: load the modules with "modprobe -a cls_u32 act_mirred", or write mode = "police"`)
	}
	if err != nil {
		return fmt.Errorf("redirect to %s: %w", ifb.Attrs().Name, err)
	}
	return nil
}

// findRedirect returns the redirecting filter, or nil.
func findRedirect(l netlink.Link) (*netlink.U32, error) {
	filters, err := netlink.FilterList(l, netlink.HANDLE_MIN_INGRESS)
	if err != nil && !isNotFound(err) {
		return nil, fmt.Errorf("list filters of %s: %w", l.Attrs().Name, err)
	}
	for _, f := range filters {
		u, ok := f.(*netlink.U32)
		if ok && u.Priority == redirectPriority && isIFBOrGone(u.RedirIndex) {
			return u, nil
		}
		if f.Attrs().Priority == redirectPriority {
			return nil, fmt.Errorf("%s has a filter %s with preference %d at ingress, which the redirect needs: give it another preference",
				l.Attrs().Name, f.Type(), redirectPriority)
		}
	}
	return nil, nil
}

// isIFBOrGone reports whether an interface is an intermediate device of this package, or no longer exists.
func isIFBOrGone(ifindex int) bool {
	l, err := netlink.LinkByIndex(ifindex)
	return err != nil || IsIFB(l)
}

// RedirectConflict returns an error if programs, filters or chains at ingress forbid the redirect: they
// would consume packets before it, or miss those that are redirected.
func RedirectConflict(all []Foreign) error {
	var what []string
	for _, f := range all {
		if f.Refuses {
			what = append(what, f.What)
		}
	}
	if what == nil {
		return nil
	}
	return fmt.Errorf(`%s has %s at ingress, which conflicts with the redirect that mode = "shape" needs: write mode = "police"`,
		all[0].Interface, strings.Join(what, ", "))
}

// CheckRedirect returns an error when packets are no longer redirected. While the IFB is missing
// or down they are lost.
func CheckRedirect(l netlink.Link) error {
	ifb, err := netlink.LinkByName(IFBName(l.Attrs().Index))
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return ErrDetached
	}
	if err != nil {
		return err
	}
	f, err := findRedirect(l)
	if err != nil {
		return err
	}
	if f == nil || f.RedirIndex != ifb.Attrs().Index || ifb.Attrs().RawFlags&unix.IFF_UP == 0 {
		return ErrDetached
	}
	return nil
}

// RemoveIFB removes the redirect and the intermediate device, with the packets queued
// in it.
func RemoveIFB(ifindex int) error {
	var errs []error
	if l, err := netlink.LinkByIndex(ifindex); err == nil {
		// The filter first, even without its device: packets that it cannot redirect are lost.
		if f, err := findRedirect(l); err != nil {
			errs = append(errs, err)
		} else if f != nil {
			if err := netlink.FilterDel(f); err != nil && !isNotFound(err) {
				errs = append(errs, fmt.Errorf("remove the redirect of %s: %w", l.Attrs().Name, err))
			}
		}
	}
	if ifb, err := netlink.LinkByName(IFBName(ifindex)); err == nil && IsIFB(ifb) {
		if err := netlink.LinkDel(ifb); err != nil && !isNotFound(err) {
			errs = append(errs, fmt.Errorf("remove %s: %w", ifb.Attrs().Name, err))
		}
	}
	return errors.Join(errs...)
}
