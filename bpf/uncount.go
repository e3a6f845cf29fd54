package bpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"shaperd/shaper"
)

// atEgress is AT_EGRESS of conns.h.
const atEgress = 1 << 31

// uncount ends the counting of connections whose ends nobody would see: where they came by last,
// packets do not meet the programs of their place, or no limit that counts matches them. They
// give their slots back. Those that are counted all the same, elsewhere or later, are taken in as
// soon as their responders send.
func (p *Plane) uncount() {
	err := p.tryUncount()
	p.uncounted = err != nil
	p.fault("uncounted connections", err)
}

func (p *Plane) tryUncount() error {
	if p.policy == nil {
		return nil
	}
	attached, err := p.attached()
	if err != nil {
		return err
	}
	var over []kernelUncounted
	err = p.kernel.eachConnection(func(t *kernelTuple, f *kernelFlight) {
		if f.Word&flightClosed != 0 {
			return
		}
		if a := attached[placed{t.Place, f.Interface}]; a == nil || !a.countsFlow(p.policy, t) {
			over = append(over, kernelUncounted{Tuple: *t, Word: f.Word})
		}
	})
	if err != nil || len(over) == 0 {
		return err
	}
	return p.kernel.uncount(over)
}

// placed is a place and an interface, as a connection has them.
type placed struct{ place, at uint32 }

// attached returns the attachments, by where their programs meet packets.
func (p *Plane) attached() (map[placed]*Attachment, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	all := map[placed]*Attachment{}
	for _, pt := range p.points {
		place, ok := p.numbers.attachments[pt.Name]
		if !ok {
			continue
		}
		at := uint32(pt.ifindex)
		if !pt.Ingress {
			at |= atEgress
		}
		all[placed{place, at}] = &pt.Attachment
		for _, l := range links { // the members of a bond run its program of XDP
			if pt.Hook == XDP && l.Attrs().MasterIndex == pt.ifindex {
				all[placed{place, uint32(l.Attrs().Index)}] = &pt.Attachment
			}
		}
	}
	return all, nil
}

// countsFlow reports whether a limit of p counts a connection at a, which none blocks.
func (a *Attachment) countsFlow(p *shaper.Policy, t *kernelTuple) bool {
	set := p.Route(&shaper.Flow{
		Source: addressOf(&t.Initiator), Destination: addressOf(&t.Responder), Port: t.ResponderPort,
		Listen: p.AttachIndex(a.Name), Protocol: shaper.TCP,
	}).Limits()
	blocks := p.Blocks() &^ p.Observed(set)
	if a.Mode == Observe {
		blocks = p.Always()
	}
	counted := false
	for i := range set.All {
		counted = counted || p.Limit(i).CountsConnections()
	}
	return counted && set&blocks == 0
}

// addressOf returns an address as the programs have it.
func addressOf(words *[4]uint32) netip.Addr {
	var b [16]byte
	for i, word := range words {
		binary.BigEndian.PutUint32(b[4*i:], word)
	}
	return netip.AddrFrom16(b).Unmap()
}

// uncount has the kernel close connections. Programs may close them too, at the same time.
func (k *kernel) uncount(over []kernelUncounted) error {
	var program struct {
		Uncount *ebpf.Program `ebpf:"shaperd_uncount"`
	}
	if err := k.load(kernelAttachment{}, nil, &program); err != nil {
		return fmt.Errorf("load what ends connections: %w", err)
	}
	defer program.Uncount.Close()
	for i := range over {
		if _, err := program.Uncount.Run(&ebpf.RunOptions{Context: &over[i]}); err != nil {
			return fmt.Errorf("end a connection: %w", err)
		}
	}
	return nil
}
