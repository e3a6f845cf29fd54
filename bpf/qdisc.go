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
	Handle  uint32 // 0 for what the kernel put there by itself
	Parent  uint32
	Options []byte // as an attribute; what is in it is the kind's own affair

	stats []byte
	sized bool // it has a table of sizes, which the kernel does not give away
}

// former is what stood at the root of an interface, from there down. It is empty when
// that was what the kernel puts there by itself.
type former []qdisc

// classless are the disciplines that a description of their options brings back.
var classless = []string{
	"bfifo", "cake", "codel", "etf", "fq", "fq_codel", "fq_pie", "hhf", "noqueue",
	"pfifo", "pfifo_fast", "pfifo_head_drop", "pie", "sfq", "tbf",
}

// capture describes what stands at the root of an interface. What could not be put
// back is refused.
func capture(l netlink.Link, all []qdisc) (was former, err error) {
	root := rootOf(all)
	if root == nil {
		return nil, nil // the interface has never been up
	}
	for _, d := range all {
		switch {
		case d.Parent == netlink.HANDLE_INGRESS:
			continue // it stays
		case d.Parent == netlink.HANDLE_ROOT && d.Kind == "mq":
		case d.Parent != netlink.HANDLE_ROOT && root.Kind != "mq", !slices.Contains(classless, d.Kind):
			return nil, refusal(l, d.Kind)
		case d.sized:
			return nil, refusal(l, d.Kind+" with a table of sizes")
		}
		if d.Handle == 0 && d.Parent != netlink.HANDLE_ROOT {
			continue // nobody can name it, to give it anything
		}
		filters, err := netlink.FilterList(l, d.Handle)
		if err != nil {
			return nil, fmt.Errorf("list filters of %s's qdisc %s: %w", l.Attrs().Name, d.Kind, err)
		}
		if len(filters) > 0 {
			return nil, refusal(l, d.Kind+" with filters")
		}
		if d.Handle != 0 {
			was = append(was, d)
		}
	}
	return was, nil
}

func refusal(l netlink.Link, what string) error {
	return fmt.Errorf("%[1]s has a qdisc %[2]s of its own, which mode = \"shape\" would remove for good: write mode = \"police\", attach to another interface, or remove it with \"tc qdisc del dev %[1]s root\"", l.Attrs().Name, what)
}

// putBack puts f where the queue is.
func (f former) putBack(l netlink.Link) error {
	if len(f) == 0 {
		err := qdiscRequest(l, unix.RTM_DELQDISC, 0, qdisc{Handle: ownHandle, Parent: netlink.HANDLE_ROOT})
		if gone(err) {
			return nil
		}
		return err
	}
	for _, d := range f {
		d.Options = d.asked()
		if err := replaceQdisc(l, d); err != nil {
			return err
		}
	}
	return nil
}

// codelTimes are the options of the kinds that count time in units of 1024 ns, and
// describe it in us, rounded down (include/net/codel.h).
var codelTimes = map[string][]uint16{
	"codel":    {1, 3, 5}, // target, interval, ce_threshold
	"fq_codel": {1, 3, 7},
}

// asked returns the options to ask for what d describes: where units are rounded down,
// one us more is the same unit.
func (d qdisc) asked() []byte {
	times := codelTimes[d.Kind]
	if times == nil || len(d.Options) < unix.SizeofRtAttr {
		return d.Options
	}
	options := bytes.Clone(d.Options)
	attrs, err := nl.ParseRouteAttr(options[unix.SizeofRtAttr:])
	if err != nil {
		return d.Options
	}
	for _, a := range attrs { // whose values are where they are in options
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

// qdiscs returns the disciplines of an interface, the root's before others.
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
				// With its type as it is: some kinds say that it is nested, and
				// take nothing back that does not.
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
