package bpf

import (
	"errors"
	"fmt"
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

// The filter that makes the detour is recognised by these.
const (
	detourPriority = 0x5b0
	detourHandle   = 0x5b0
)

// setUpIFB makes the intermediate device of an interface, and returns it. Packets make
// no detour before divert.
func setUpIFB(l netlink.Link) (netlink.Link, error) {
	name := ifbName(l.Attrs().Index)
	ifb, err := netlink.LinkByName(name)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		attrs.MTU = l.Attrs().MTU
		err = netlink.LinkAdd(&netlink.Ifb{LinkAttrs: attrs})
		if errors.Is(err, unix.EOPNOTSUPP) {
			err = errors.New(`this kernel has no ifb, which mode = "shape" needs at ingress: load the module with "modprobe ifb", or write mode = "police"`)
		}
		if err == nil {
			ifb, err = netlink.LinkByName(name)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("intermediate device %s: %w", name, err)
	}
	if err := netlink.LinkSetUp(ifb); err != nil {
		return nil, fmt.Errorf("intermediate device %s: %w", name, err)
	}
	return ifb, nil
}

func detour(l, ifb netlink.Link) *netlink.MatchAll {
	action := netlink.NewMirredAction(ifb.Attrs().Index)
	return &netlink.MatchAll{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: l.Attrs().Index, Parent: netlink.HANDLE_MIN_INGRESS,
			Priority: detourPriority, Handle: detourHandle, Protocol: unix.ETH_P_ALL,
		},
		Actions: []netlink.Action{action},
	}
}

// divert sends what comes in through the intermediate device.
func divert(l, ifb netlink.Link) error {
	if err := addClsact(l.Attrs().Index); err != nil {
		return err
	}
	if checkDetour(l) == nil {
		return nil
	}
	if err := netlink.FilterReplace(detour(l, ifb)); err != nil {
		return fmt.Errorf("detour through %s: %w", ifb.Attrs().Name, err)
	}
	return nil
}

// checkDetour returns an error when packets do not make the detour any more.
func checkDetour(l netlink.Link) error {
	if _, err := netlink.LinkByName(ifbName(l.Attrs().Index)); err != nil {
		return err
	}
	filters, err := netlink.FilterList(l, netlink.HANDLE_MIN_INGRESS)
	if err != nil {
		return err
	}
	for _, f := range filters {
		if f.Type() == "matchall" && f.Attrs().Priority == detourPriority {
			return nil
		}
	}
	return errDetached
}

// removeIFB ends the detour and removes the intermediate device, with what is queued
// in it.
func removeIFB(ifindex int) error {
	var errs []error
	ifb, err := netlink.LinkByName(ifbName(ifindex))
	if err == nil {
		if l, err := netlink.LinkByIndex(ifindex); err == nil {
			if err := netlink.FilterDel(detour(l, ifb)); err != nil && !gone(err) {
				errs = append(errs, fmt.Errorf("end the detour: %w", err))
			}
		}
		errs = append(errs, netlink.LinkDel(ifb))
	}
	return errors.Join(errs...)
}

// gone reports whether err says that there is nothing to remove.
func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL)
}
