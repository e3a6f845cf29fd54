package attach

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Qdisc is a queueing discipline as the kernel describes it.
type Qdisc struct {
	Kind    string
	Handle  uint32 // 0 for a default qdisc of the kernel
	Parent  uint32
	Options []byte // the attribute; its content is specific to the kind

	stats []byte
	sized bool // it has a size table (stab), which the kernel does not report completely
}

func rootOf(all []Qdisc) *Qdisc {
	for i := range all {
		if all[i].Parent == netlink.HANDLE_ROOT {
			return &all[i]
		}
	}
	return nil
}

// Qdiscs returns the qdiscs of an interface, the root first.
func Qdiscs(l netlink.Link) ([]Qdisc, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETQDISC, unix.NLM_F_DUMP)
	req.AddData(&nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(l.Attrs().Index)})
	messages, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWQDISC)
	if err != nil {
		return nil, fmt.Errorf("list qdiscs: %w", err)
	}
	var all []Qdisc
	for _, m := range messages {
		msg := nl.DeserializeTcMsg(m)
		if msg.Ifindex != int32(l.Attrs().Index) {
			continue
		}
		attrs, err := nl.ParseRouteAttr(m[msg.Len():])
		if err != nil {
			return nil, fmt.Errorf("list qdiscs: %w", err)
		}
		d := Qdisc{Handle: msg.Handle, Parent: msg.Parent}
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

func replaceQdisc(l netlink.Link, d Qdisc) error {
	err := qdiscRequest(l, unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, d)
	if errors.Is(err, unix.ENOENT) && d.Kind == "fq" {
		return ErrNoFQ
	}
	if err != nil {
		return fmt.Errorf("qdisc %s at %s: %w", d.Kind, l.Attrs().Name, err)
	}
	return nil
}

func qdiscRequest(l netlink.Link, kind, flags int, d Qdisc) error {
	req := nl.NewNetlinkRequest(kind, flags|unix.NLM_F_ACK)
	req.AddData(&nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(l.Attrs().Index), Handle: d.Handle, Parent: d.Parent})
	if d.Kind != "" {
		req.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated(d.Kind)))
	}
	req.AddRawData(d.Options)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	return err
}
