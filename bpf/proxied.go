package bpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
)

// MarkProxied tells the programs that a TCP socket is the proxy's, before it listens or
// connects, or when it is connected. Limits at attachments do not count its
// connections, nor those accepted from it later. It may be called from several
// goroutines, also between Prepare and Commit, but not after Close or Release.
func (p *Plane) MarkProxied(fd int) error {
	if err := p.kernel.Proxied.Put(int32(fd), uint32(1)); err != nil {
		return fmt.Errorf("mark proxied socket: %w", err)
	}
	return nil
}

// addListeners tells the XDP programs the TCP addresses that the proxy listens on.
func (k *kernel) addListeners(all []netip.AddrPort) error {
	for _, at := range all {
		if err := k.Listeners.Put(newListener(at), uint32(1)); err != nil {
			return fmt.Errorf("add listener %s: %w", at, err)
		}
	}
	return nil
}

// retainListeners removes all listeners but the given ones.
func (k *kernel) retainListeners(all []netip.AddrPort) error {
	keep := map[kernelListener]bool{}
	for _, at := range all {
		keep[newListener(at)] = true
	}
	var removed []kernelListener
	var l kernelListener
	var unused uint32
	known := k.Listeners.Iterate()
	for known.Next(&l, &unused) {
		if !keep[l] {
			removed = append(removed, l)
		}
	}
	err := known.Err()
	for _, l := range removed {
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
