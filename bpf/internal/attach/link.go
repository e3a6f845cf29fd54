package attach

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// pinnedLink is a program at tcx or XDP, attached by a link that is pinned.
type pinnedLink struct {
	link.Link
	at Point
}

// attachPinned attaches a program by the link that create returns, and pins that.
func attachPinned(o Options, create func(Options) (link.Link, error)) (Link, error) {
	// Left by a daemon that was killed before it recorded the link.
	if l, err := link.LoadPinnedLink(o.Pin, nil); err == nil {
		p := &pinnedLink{l, o.At}
		if p.Check() == nil && p.Update(o.Program) == nil {
			return p, nil
		}
		_ = l.Close()
	}
	l, err := create(o)
	if err != nil {
		return nil, err
	}
	_ = os.Remove(o.Pin) // of a link that no longer exists
	if err := l.Pin(o.Pin); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("pin link: %w", err)
	}
	return &pinnedLink{l, o.At}, nil
}

func (p *pinnedLink) Check() error {
	info, err := p.Info()
	if err != nil {
		return err
	}
	if tcx := info.TCX(); tcx != nil {
		if at := ebpf.AttachType(tcx.AttachType) == ebpf.AttachTCXIngress; at != p.at.Ingress {
			return ErrDetached
		}
	}
	if interfaceOf(info) != uint32(p.at.Ifindex) {
		return ErrDetached
	}
	return nil
}

// Detach detaches the program at once: removing the pin alone takes effect with a delay.
func (p *pinnedLink) Detach() error {
	_ = p.Link.Detach() // on an error Unpin and Close detach it
	err := p.Unpin()
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, p.Close())
}

func (p *pinnedLink) Repin(path string) error {
	if err := p.Pin(path); err != nil {
		return fmt.Errorf("pin link: %w", err)
	}
	return nil
}

func (p *pinnedLink) Release() { _ = p.Close() }

// interfaceOf returns the interface index of a link; 0 when the interface has been removed.
func interfaceOf(info *link.Info) uint32 {
	if tcx := info.TCX(); tcx != nil {
		return tcx.Ifindex
	}
	if xdp := info.XDP(); xdp != nil {
		return xdp.Ifindex
	}
	return 0
}

// InterfaceGone reports whether the link pinned at a path exists and its interface does not: the
// kernel ends the links of an interface when it is removed, as with its network namespace.
func InterfaceGone(pin string) bool {
	l, err := link.LoadPinnedLink(pin, nil)
	if err != nil {
		return false
	}
	defer l.Close()
	info, err := l.Info()
	return err == nil && interfaceOf(info) == 0
}
