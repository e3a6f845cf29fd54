package bpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/shaper"
)

// uncount stops counting connections whose end no program would see: at the interface of their last
// packet, the programs of their attachment no longer run, or no counting limit matches them. Their
// slots are released. A connection that is counted elsewhere or later is adopted as soon as its
// responder sends.
func (p *Plane) uncount() {
	err := p.tryUncount()
	p.uncountPending = err != nil
	p.report("uncounted connections", err)
}

func (p *Plane) tryUncount() error {
	if p.policy == nil {
		return nil
	}
	attached, err := p.attachmentsByPoint()
	if err != nil {
		return err
	}
	var over []kernelUncounted
	err = p.kernel.eachConnection(func(t *kernelTuple, f *kernelConn) {
		if f.State&connClosed != 0 {
			return
		}
		if a := attached[connPoint{t.AttachId, f.Interface}]; a == nil || !countsFlow(a, p.policy, t) {
			over = append(over, kernelUncounted{Tuple: *t, State: f.State})
		}
	})
	if err != nil || len(over) == 0 {
		return err
	}
	return p.kernel.uncount(over)
}

// connPoint is an attachment's number and an interface, as in a connection's record.
type connPoint struct{ attachment, iface uint32 }

// attachmentsByPoint returns the attachments by where their programs run.
func (p *Plane) attachmentsByPoint() (map[connPoint]*shaper.Attachment, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	all := map[connPoint]*shaper.Attachment{}
	for _, pt := range p.points {
		number, ok := p.numbers.attachments[pt.Name]
		if !ok {
			continue
		}
		iface := uint32(pt.ifindex)
		if pt.Direction == shaper.Egress {
			iface |= uint32(kernelInterfaceFlagAT_EGRESS)
		}
		all[connPoint{number, iface}] = &pt.Attachment
		for _, l := range links { // the ports of a bond run its XDP program
			if pt.Hook == shaper.HookXDP && l.Attrs().MasterIndex == pt.ifindex {
				all[connPoint{number, uint32(l.Attrs().Index)}] = &pt.Attachment
			}
		}
	}
	return all, nil
}

// countsFlow reports whether a limit of p counts a connection at a, and none blocks it.
func countsFlow(a *shaper.Attachment, p *shaper.Policy, t *kernelTuple) bool {
	set := p.Route(&shaper.Flow{
		Source: addressOf(&t.Initiator), Destination: addressOf(&t.Responder), Port: t.ResponderPort,
		Origin: p.AttachmentIndex(a.Name), Protocol: shaper.TCP,
	}).Limits()
	blocks := p.Blocks() &^ p.Observed(set) &^ p.ByPacket()
	if a.EffectiveMode() == shaper.AttachObserve {
		blocks = p.Always()
	}
	counted := false
	for i := range set.All {
		counted = counted || p.Limit(i).CountsConnections()
	}
	return counted && set&blocks == 0
}

// addressOf converts an address from the programs' format.
func addressOf(words *[4]uint32) netip.Addr {
	var b [16]byte
	for i, word := range words {
		binary.BigEndian.PutUint32(b[4*i:], word)
	}
	return netip.AddrFrom16(b).Unmap()
}

// uncount closes connection records in the kernel. Programs may close them at the same time.
func (k *kernel) uncount(over []kernelUncounted) error {
	var program struct {
		Uncount *ebpf.Program `ebpf:"shaperd_uncount"`
	}
	if err := k.load(kernelConfig{}, nil, &program); err != nil {
		return fmt.Errorf("load uncount program: %w", err)
	}
	defer program.Uncount.Close()
	for i := range over {
		if _, err := program.Uncount.Run(&ebpf.RunOptions{Context: &over[i]}); err != nil {
			return fmt.Errorf("stop counting a connection: %w", err)
		}
	}
	return nil
}
