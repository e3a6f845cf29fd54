// Package attach attaches programs and queues to network interfaces, and takes them away again
// without a trace. What other tools have there stays, or comes back.
//
// Nothing here is kept in memory: the state is in the kernel and in pins, so that another process
// can continue with it. No function may be called concurrently with another one for the same
// interface.
package attach

import (
	"errors"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"shaperd.dev/shaperd/shaper"
)

// ErrDetached is returned by checks: packets no longer pass the program.
var ErrDetached = errors.New("its program was detached")

// Point is an interface and a direction.
type Point struct {
	Ifindex int
	Ingress bool
}

// Role is what a program does at a point. Programs of both roles may share one, for different
// attachments.
type Role uint16

// The roles.
const (
	Limiter      Role = iota
	ReplyTracker      // tracks the replies of counted connections
)

// Options say which program is attached, and where.
type Options struct {
	// Hook is the place in the kernel. HookAuto is tcx, or clsact on kernels without it.
	Hook shaper.Hook

	// At is the interface and the direction. XDP knows only ingress.
	At Point

	// Role distinguishes the filters of clsact at one point.
	Role Role

	// Program is the program. Adopt ignores it: there it is an earlier process's.
	Program *ebpf.Program

	// Pin is the path, on a bpf file system, at which links of tcx and XDP are pinned.
	Pin string
}

// Link is a program that is attached to an interface. It stays attached when the process ends.
type Link interface {
	// Update replaces the program atomically.
	Update(*ebpf.Program) error
	// Check returns an error when the program is no longer attached: ErrDetached, or that of
	// the system call that could not tell.
	Check() error
	// Detach detaches the program.
	Detach() error
	// Repin pins the link at another path.
	Repin(path string) error
	// Release closes the link, and leaves the program attached.
	Release()
}

// Attach attaches a program. A link that a killed process left at the pin is used again.
func Attach(o Options) (Link, error) {
	switch o.Hook {
	case shaper.HookXDP:
		return attachPinned(o, attachXDP)
	case shaper.HookClsact:
		return attachClsact(o)
	case shaper.HookTCX:
		return attachPinned(o, attachTCX)
	}
	o.Hook = shaper.HookTCX
	l, err := Attach(o)
	if errors.Is(err, ebpf.ErrNotSupported) {
		o.Hook = shaper.HookClsact
		return Attach(o)
	}
	return l, err
}

// Adopt returns the link of a program that an earlier process attached. If that had detached it
// already, the link's Check returns ErrDetached.
func Adopt(o Options) (Link, error) {
	l, err := link.LoadPinnedLink(o.Pin, nil)
	switch {
	case err == nil:
		return &pinnedLink{l, o.At}, nil
	case errors.Is(err, os.ErrNotExist) && (o.Hook == shaper.HookClsact || o.Hook == shaper.HookAuto):
		return &clsactFilter{at: o.At, role: o.Role}, nil
	case errors.Is(err, os.ErrNotExist):
		return missing{}, nil
	}
	return nil, err
}

// missing is the link of a program that had been detached when its process was killed.
type missing struct{}

func (missing) Update(*ebpf.Program) error { return ErrDetached }
func (missing) Check() error               { return ErrDetached }
func (missing) Detach() error              { return nil }
func (missing) Repin(string) error         { return nil }
func (missing) Release()                   {}
