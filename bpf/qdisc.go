package bpf

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

// qdisc is a queueing discipline as the kernel describes it.
type qdisc struct {
	Kind    string
	Handle  uint32 // 0 for a default qdisc of the kernel
	Parent  uint32
	Options []byte // the attribute; its content is specific to the kind

	stats []byte
	sized bool // it has a size table (stab), which the kernel does not report completely
}

// savedQdiscs are the qdiscs of an interface before ours, from the root down. They are empty
// when the interface had the kernel's default.
type savedQdiscs []qdisc

// restorable are the kinds that can be restored from their options.
var restorable = []string{
	"bfifo", "cake", "codel", "etf", "fq", "fq_codel", "fq_pie", "hhf", "noqueue",
	"pfifo", "pfifo_fast", "pfifo_head_drop", "pie", "sfq", "tbf",
}

// capture saves the qdiscs of an interface. It is an error when they could not be
// restored.
func capture(l netlink.Link, all []qdisc) (was savedQdiscs, err error) {
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

// restore replaces the queue with f.
func (s savedQdiscs) restore(l netlink.Link) error {
	if len(s) == 0 {
		err := qdiscRequest(l, unix.RTM_DELQDISC, 0, qdisc{Handle: ownHandle, Parent: netlink.HANDLE_ROOT})
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
func (d qdisc) requestOptions() []byte {
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

func rootOf(all []qdisc) *qdisc {
	for i := range all {
		if all[i].Parent == netlink.HANDLE_ROOT {
			return &all[i]
		}
	}
	return nil
}

// qdiscs returns the qdiscs of an interface, the root first.
func qdiscs(l netlink.Link) ([]qdisc, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETQDISC, unix.NLM_F_DUMP)
	req.AddData(&nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(l.Attrs().Index)})
	messages, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWQDISC)
	if err != nil {
		return nil, fmt.Errorf("list qdiscs: %w", err)
	}
	var all []qdisc
	for _, m := range messages {
		msg := nl.DeserializeTcMsg(m)
		if msg.Ifindex != int32(l.Attrs().Index) {
			continue
		}
		attrs, err := nl.ParseRouteAttr(m[msg.Len():])
		if err != nil {
			return nil, fmt.Errorf("list qdiscs: %w", err)
		}
		d := qdisc{Handle: msg.Handle, Parent: msg.Parent}
		for _, a := range attrs {
			switch a.Attr.Type &^ unix.NLA_F_NESTED {
			case nl.TCA_KIND:
				d.Kind = string(bytes.TrimRight(a.Value, "\x00"))
			case nl.TCA_OPTIONS:
				// With its type unchanged: some kinds set the nested flag, and accept
				// only options that have it.
				d.Options = nl.NewRtAttr(int(a.Attr.Type), a.Value).Serialize()
			case nl.TCA_STATS2:
				d.stats = a.Value
			case nl.TCA_STAB:
				d.sized = true
			}
		}
		all = append(all, d)
	}
	return all, nil
}

func replaceQdisc(l netlink.Link, d qdisc) error {
	err := qdiscRequest(l, unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, d)
	if errors.Is(err, unix.ENOENT) && d.Kind == "fq" {
		return errNoFQ
	}
	if err != nil {
		return fmt.Errorf("qdisc %s at %s: %w", d.Kind, l.Attrs().Name, err)
	}
	return nil
}

func qdiscRequest(l netlink.Link, kind, flags int, d qdisc) error {
	req := nl.NewNetlinkRequest(kind, flags|unix.NLM_F_ACK)
	req.AddData(&nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(l.Attrs().Index), Handle: d.Handle, Parent: d.Parent})
	if d.Kind != "" {
		req.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated(d.Kind)))
	}
	req.AddRawData(d.Options)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}
