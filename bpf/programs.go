package bpf

import (
	"cmp"
	"math/bits"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"shaperd/shaper"
)

// programs are the programs of one attachment. They are the same at all interfaces that
// have a header of the same kind: the verifier takes a tenth of a second for them, and
// half a second where packets may be under many limits.
type programs struct {
	limit   *ebpf.Program // holds packets to the limits
	replies *ebpf.Program // takes note of the other direction; nil when no connections are counted
	limits  uint32        // that a packet may be under
}

func (p *programs) close() {
	_ = p.limit.Close()
	_ = p.replies.Close()
}

// purpose is what programs are loaded for.
type purpose struct {
	at     kernelAttachment // since the first policy there is
	xdp    bool
	counts bool // connections
}

// fewLimits is how many limits programs are loaded for where there are no more: the
// verifier follows them from limit to limit.
const fewLimits = 8

// limits returns how many limits the programs of a are loaded for under p.
func (a *Attachment) limits(p *shaper.Policy) uint32 {
	if bits.OnesCount64(uint64(p.PlaceSet(p.AttachIndex(a.Name)))) <= fewLimits {
		return fewLimits
	}
	return shaper.MaxLimits
}

// purposeOf returns what programs of a are for under p, by the numbers n, where packets
// have an Ethernet header or have none.
func purposeOf(a *Attachment, n numbers, p *shaper.Policy, ethernet bool) purpose {
	return purpose{
		at: kernelAttachment{
			Place: n.attachments[a.Name], Mode: uint32(a.Mode), Ethernet: number(ethernet), Keep: number(a.Keep),
			Egress: number(!a.Ingress), IdleTimeout: uint64(a.IdleTimeout), Limits: a.limits(p), Queue: uint32(a.Queue),
		},
		xdp: a.Hook == XDP, counts: a.counts(p),
	}
}

func number(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// hasEthernet reports whether packets at l begin with an Ethernet header.
func hasEthernet(l netlink.Link) bool {
	switch l.Attrs().EncapType {
	case "ether", "loopback":
		return true
	}
	return false
}

// loadPrograms loads the programs for a purpose. They let everything pass before the
// policy of generation since is in force.
func (k *kernel) loadPrograms(f purpose, since uint32) (*programs, error) {
	f.at.Since = since
	var tc struct {
		Limit *ebpf.Program `ebpf:"shaperd_tc"`
	}
	var xdp struct {
		Limit *ebpf.Program `ebpf:"shaperd_xdp"`
	}
	var other struct {
		Replies *ebpf.Program `ebpf:"shaperd_replies"`
	}
	var objects any = &tc
	if f.xdp {
		objects = &xdp
	}
	err := k.load(f.at, nil, objects)
	if err == nil && f.counts {
		err = k.load(f.at, nil, &other)
	}
	p := &programs{limit: cmp.Or(tc.Limit, xdp.Limit), replies: other.Replies, limits: f.at.Limits}
	if err != nil {
		p.close()
		return nil, tooOld(err)
	}
	return p, nil
}

// shelf holds the programs that are loaded. An interface that appears finds its own there.
type shelf map[purpose]*programs

// get returns the programs for a purpose, and loads them if they are not there.
func (s shelf) get(k *kernel, f purpose, since uint32) (*programs, error) {
	if p := s[f]; p != nil {
		return p, nil
	}
	p, err := k.loadPrograms(f, since)
	if err == nil {
		s[f] = p
	}
	return p, err
}

// close lets go of all. What is attached stays.
func (s shelf) close() {
	for _, p := range s {
		p.close()
	}
	clear(s)
}

// take puts the programs of another shelf onto s, in the place of those for the same.
func (s shelf) take(other shelf) {
	for f, p := range other {
		if old := s[f]; old != nil {
			old.close()
		}
		s[f] = p
	}
	clear(other)
}

// keep lets go of programs that are for none of the attachments any more.
func (s shelf) keep(used func(purpose) bool) {
	for f, p := range s {
		if !used(f) {
			p.close()
			delete(s, f)
		}
	}
}
