package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
)

// Own tells the programs that a TCP socket is the proxy's: one that is to listen or
// to connect, or one that is connected. Limits at attachments do not count its
// connections, nor those accepted from it later. It may be called by several
// goroutines, also between Prepare and Commit, but not after Close or Release.
func (p *Plane) Own(fd int) error {
	if err := p.kernel.Proxied.Put(int32(fd), uint32(1)); err != nil {
		return fmt.Errorf("mark a socket of the proxy: %w", err)
	}
	return nil
}

// addListeners tells the programs of XDP where the proxy listens by TCP.
func (k *kernel) addListeners(all []netip.AddrPort) error {
	for _, at := range all {
		if err := k.Listeners.Put(newListener(at), uint32(1)); err != nil {
			return fmt.Errorf("add listener %s: %w", at, err)
		}
	}
	return nil
}

// keepListeners forgets those that are not among all.
func (k *kernel) keepListeners(all []netip.AddrPort) error {
	keep := map[kernelListener]bool{}
	for _, at := range all {
		keep[newListener(at)] = true
	}
	var gone []kernelListener
	var l kernelListener
	var unused uint32
	known := k.Listeners.Iterate()
	for known.Next(&l, &unused) {
		if !keep[l] {
			gone = append(gone, l)
		}
	}
	err := known.Err()
	for _, l := range gone {
		err = errors.Join(err, k.Listeners.Delete(l))
	}
	if err != nil {
		return fmt.Errorf("remove listeners: %w", err)
	}
	return nil
}

func newListener(at netip.AddrPort) kernelListener {
	l := kernelListener{Port: uint32(at.Port())}
	address := at.Addr().As16()
	for i := range l.Address {
		l.Address[i] = binary.BigEndian.Uint32(address[4*i:])
	}
	return l
}
