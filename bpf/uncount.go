package bpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"shaperd/shaper"
)

// uncount ends the counting of connections that limits count no more, whose ends nobody would
// see: what comes by where they began does not meet the programs, or no limit that counts
// matches them. They give their slots back. Those that another attachment counts are taken in
// there as soon as their responders send.
func (p *Plane) uncount() error {
	type where struct{ place, ifindex uint32 }
	attached := map[where]uint16{}
	for _, pt := range p.points {
		if place, ok := p.numbers.attachments[pt.Name]; ok {
			attached[where{place, uint32(pt.ifindex)}] = p.policy.AttachIndex(pt.Name)
		}
	}
	var over []kernelUncounted
	err := p.kernel.eachConnection(func(t *kernelTuple, f *kernelFlight) {
		if f.Word&flightClosed != 0 {
			return
		}
		index, ok := attached[where{t.Place, f.Interface}]
		if !ok || !p.policy.Counts(t.flow(index)) {
			over = append(over, kernelUncounted{Tuple: *t, Word: f.Word})
		}
	})
	if err != nil || len(over) == 0 {
		return err
	}
	return p.kernel.uncount(over)
}

// flow returns the flow of a connection at the attachment of an index.
func (t *kernelTuple) flow(index uint16) *shaper.Flow {
	return &shaper.Flow{
		Source: addressOf(&t.Initiator), Destination: addressOf(&t.Responder), Port: t.ResponderPort,
		Listen: index, Protocol: shaper.TCP,
	}
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
