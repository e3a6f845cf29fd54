package attach

import (
	"errors"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

func attachTCX(o Options) (link.Link, error) {
	// Before all others: any of them may consume a packet, and all run on those that this one passes on.
	return link.AttachTCX(link.TCXOptions{Interface: o.At.Ifindex, Program: o.Program, Attach: tcxType(o.At), Anchor: link.Head()})
}

func tcxType(at Point) ebpf.AttachType {
	if at.Ingress {
		return ebpf.AttachTCXIngress
	}
	return ebpf.AttachTCXEgress
}

// queryTCX returns the programs at a point, or nil on kernels without tcx.
func queryTCX(at Point) (*link.QueryResult, error) {
	q, err := link.QueryPrograms(link.QueryOptions{Target: at.Ifindex, Attach: tcxType(at)})
	if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, unix.EINVAL) {
		return nil, nil
	}
	return q, err
}

// supportsTCX reports whether programs can be attached by tcx at a point.
func supportsTCX(at Point) bool {
	q, err := queryTCX(at)
	return q != nil && err == nil
}
