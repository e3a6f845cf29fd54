package attach

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

func attachXDP(o Options) (link.Link, error) {
	x := link.XDPOptions{Interface: o.At.Ifindex, Program: o.Program}
	l, err := link.AttachXDP(x)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		// The driver has no XDP: generic mode runs later, at the cost of a copy.
		x.Flags = link.XDPGenericMode
		l, err = link.AttachXDP(x)
	}
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) {
		return nil, fmt.Errorf("another XDP program is attached, and an interface takes only one: write hook = \"tcx\" or \"clsact\" (%w)", err)
	}
	return l, err
}
