package attach

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// SavedQdiscs are the qdiscs of an interface before ours, from the root down. They are empty
// when the interface had the kernel's default. They are stored as JSON, for later versions too.
type SavedQdiscs []Qdisc

// restorable are the kinds that can be restored from their options.
var restorable = []string{
	"bfifo", "cake", "codel", "etf", "fq", "fq_codel", "fq_pie", "hhf", "noqueue",
	"pfifo", "pfifo_fast", "pfifo_head_drop", "pie", "sfq", "tbf",
}

// Capture returns the qdiscs of an interface. It is an error when they could not be
// restored.
func Capture(l netlink.Link) (was SavedQdiscs, err error) {
	all, err := Qdiscs(l)
	if err != nil {
		return nil, err
	}
	root := rootOf(all)
	if root == nil {
		return nil, nil // the interface has never been up
	}
	for _, d := range all {
		switch {
		case d.Parent == netlink.HANDLE_INGRESS:
			continue // ours does not replace it
		case d.Parent == netlink.HANDLE_ROOT && d.Kind == "mq":
		case d.Parent != netlink.HANDLE_ROOT && root.Kind != "mq", !slices.Contains(restorable, d.Kind):
			return nil, unsupportedQdisc(l, d.Kind)
		case d.sized:
			return nil, unsupportedQdisc(l, d.Kind+" with a size table")
		}
		if d.Handle == 0 && d.Parent != netlink.HANDLE_ROOT {
			continue // a default qdisc: nothing can be configured on it
		}
		filters, err := netlink.FilterList(l, d.Handle)
		if err != nil {
			return nil, fmt.Errorf("list filters of %s's qdisc %s: %w", l.Attrs().Name, d.Kind, err)
		}
		if len(filters) > 0 {
			return nil, unsupportedQdisc(l, d.Kind+" with filters")
		}
		if d.Handle != 0 {
			was = append(was, d)
		}
	}
	return was, nil
}

func unsupportedQdisc(l netlink.Link, what string) error {
	return fmt.Errorf("%[1]s has a qdisc %[2]s, which mode = \"shape\" would replace and could not restore: write mode = \"police\", attach to another interface, or remove it with \"tc qdisc del dev %[1]s root\"", l.Attrs().Name, what)
}

// restore replaces the queue with s.
func (s SavedQdiscs) restore(l netlink.Link) error {
	if len(s) == 0 {
		err := qdiscRequest(l, unix.RTM_DELQDISC, 0, Qdisc{Handle: ownHandle, Parent: netlink.HANDLE_ROOT})
		if isNotFound(err) {
			return nil
		}
		return err
	}
	for _, d := range s {
		d.Options = d.requestOptions()
		if err := replaceQdisc(l, d); err != nil {
			return err
		}
	}
	return nil
}

// codelTimes are the options of the kinds that store times in units of 1024 ns, and
// report them in us, rounded down (include/net/codel.h).
var codelTimes = map[string][]uint16{
	"codel":    {1, 3, 5}, // target, interval, ce_threshold
	"fq_codel": {1, 3, 7},
}

// requestOptions returns the options that restore d: times that were rounded down are raised by
// 1 us, which is still the same unit.
func (d Qdisc) requestOptions() []byte {
	times := codelTimes[d.Kind]
	if times == nil || len(d.Options) < unix.SizeofRtAttr {
		return d.Options
	}
	options := bytes.Clone(d.Options)
	attrs, err := nl.ParseRouteAttr(options[unix.SizeofRtAttr:])
	if err != nil {
		return d.Options
	}
	for _, a := range attrs { // their values alias options
		if slices.Contains(times, a.Attr.Type) && len(a.Value) == 4 {
			binary.NativeEndian.PutUint32(a.Value, binary.NativeEndian.Uint32(a.Value)+1)
		}
	}
	return options
}

// RestoreQueue replaces the queue of an interface by the saved qdiscs. If another tool has
// replaced the queue, its qdisc stays.
func RestoreQueue(l netlink.Link, was SavedQdiscs) error {
	all, err := Qdiscs(l)
	if err != nil {
		return err
	}
	if root := rootOf(all); root == nil || root.Handle != ownHandle {
		return nil
	}
	if err := was.restore(l); err != nil {
		return fmt.Errorf("restore the former qdisc: %w", errors.Join(err, SavedQdiscs{}.restore(l)))
	}
	return nil
}
