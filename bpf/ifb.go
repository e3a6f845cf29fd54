package bpf

import (
	"errors"
	"fmt"
	"runtime"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// What comes in has no queue in the kernel. To hold it, it takes a detour through an
// intermediate device, at whose egress it is shaped, and comes back as if it had just
// come in.
//
// The detour is a mirred action: a device of this kind wants to know where packets came
// from, which bpf_redirect does not say.

// ifbName is the name of the intermediate device of an interface.
func ifbName(ifindex int) string { return fmt.Sprint("shaperd", ifindex) }

// isOwnIFB reports whether l is an intermediate device of this package.
func isOwnIFB(l netlink.Link) bool {
	return l.Type() == "ifb" && strings.HasPrefix(l.Attrs().Name, "shaperd")
}

// setUpIFB makes the intermediate device of an interface, and returns it. Packets make
// no detour before divert.
func setUpIFB(l netlink.Link) (netlink.Link, error) {
	name := ifbName(l.Attrs().Index)
	ifb, err := netlink.LinkByName(name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		ifb, err = addIFB(l, name)
	}
	if err == nil && ifb.Type() != "ifb" {
		err = fmt.Errorf("there is a %s of this name", ifb.Type())
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
	// As many queues as packets come in by, but none that no processor would serve:
	// each has a lock and a tasklet of its own.
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
		// For people who list their interfaces, and for nothing else.
		_ = netlink.LinkSetAlias(ifb, "shaperd ingress of "+l.Attrs().Name)
	}
	return ifb, err
}

// detourPriority is that of the filter that makes the detour, by which it is
// recognised: the last there is. Filters behind it would see no packets, as those that
// come back meet none.
const detourPriority = 0xffff

// detour is the filter that sends all that comes in to a device. It is of the kind
// u32, which unlike matchall can be pointed elsewhere while packets pass.
func detour(l netlink.Link, to int) *netlink.U32 {
	return &netlink.U32{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS,
			Priority: detourPriority, Protocol: unix.ETH_P_ALL,
		},
		// Without keys, of which any packet has all. Linux 6.12 warns of itself when
		// it copies one.
		Sel:     &netlink.TcU32Sel{Flags: netlink.TC_U32_TERMINAL},
		Actions: []netlink.Action{netlink.NewMirredAction(to)},
	}
}

// divert sends what comes in through the intermediate device.
func divert(l, ifb netlink.Link) error {
	if err := addClsact(side{l.Attrs().Index, true}); err != nil {
		return err
	}
	present, err := findDetour(l)
	if err != nil {
		return err
	}
	f := detour(l, ifb.Attrs().Index)
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
		return fmt.Errorf("detour through %s: %w", ifb.Attrs().Name, err)
	}
	return nil
}

// findDetour returns the filter that makes the detour, or nil.
func findDetour(l netlink.Link) (*netlink.U32, error) {
	filters, err := netlink.FilterList(l, netlink.HANDLE_MIN_INGRESS)
	if err != nil && !gone(err) {
		return nil, fmt.Errorf("list filters of %s: %w", l.Attrs().Name, err)
	}
	for _, f := range filters {
		u, ok := f.(*netlink.U32)
		if ok && u.Priority == detourPriority && isIFB(u.RedirIndex) {
			return u, nil
		}
		if f.Attrs().Priority == detourPriority {
			return nil, fmt.Errorf("%s has a filter %s of preference %d at ingress, where the detour is to be: give it another preference",
				l.Attrs().Name, f.Type(), detourPriority)
		}
	}
	return nil, nil
}

// isIFB reports whether an interface is an intermediate device of this package, or gone.
func isIFB(ifindex int) bool {
	l, err := netlink.LinkByIndex(ifindex)
	return err != nil || isOwnIFB(l)
}

// hindrance returns why packets are not to take a detour where they meet these: they would
// not, or they would miss what others have there.
func hindrance(all []Foreign) error {
	var what []string
	for _, f := range all {
		if f.Refuses {
			what = append(what, f.What)
		}
	}
	if what == nil {
		return nil
	}
	return fmt.Errorf(`%s has %s at ingress: packets would miss that by the detour that mode = "shape" makes, or be kept from it: write mode = "police"`,
		all[0].Interface, strings.Join(what, ", "))
}

// checkDetour returns an error when packets do not make the detour any more. While
// its device is gone or down they are lost.
func checkDetour(l netlink.Link) error {
	ifb, err := netlink.LinkByName(ifbName(l.Attrs().Index))
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return errDetached
	}
	if err != nil {
		return err
	}
	f, err := findDetour(l)
	if err != nil {
		return err
	}
	if f == nil || f.RedirIndex != ifb.Attrs().Index || ifb.Attrs().RawFlags&unix.IFF_UP == 0 {
		return errDetached
	}
	return nil
}

// removeIFB ends the detour and removes the intermediate device, with what is queued
// in it.
func removeIFB(ifindex int) error {
	var errs []error
	if l, err := netlink.LinkByIndex(ifindex); err == nil {
		// The filter first, even without its device: what it cannot send on is lost.
		if f, err := findDetour(l); err != nil {
			errs = append(errs, err)
		} else if f != nil {
			if err := netlink.FilterDel(f); err != nil && !gone(err) {
				errs = append(errs, fmt.Errorf("end the detour of %s: %w", l.Attrs().Name, err))
			}
		}
	}
	if ifb, err := netlink.LinkByName(ifbName(ifindex)); err == nil && isOwnIFB(ifb) {
		if err := netlink.LinkDel(ifb); err != nil && !gone(err) {
			errs = append(errs, fmt.Errorf("remove %s: %w", ifb.Attrs().Name, err))
		}
	}
	return errors.Join(errs...)
}

// gone reports whether err says that there is nothing to remove.
func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL)
}
