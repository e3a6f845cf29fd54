package bpf

import (
	"fmt"
	"path"
	"strings"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// Attachment is a set of interfaces, with a direction, whose packets limits apply to.
type Attachment struct {
	Name        string
	Interfaces  []string // names, or patterns of [path.Match]
	Ingress     bool
	Mode        Mode
	Hook        Hook
	Keep        bool          // stay enforced while no daemon runs
	Queue       int           // packets that an interface's queue holds; for Shape only
	IdleTimeout time.Duration // of counted TCP connections
}

// Mode is the treatment of packets that exceed a limit, numbered as in the programs.
type Mode uint32

// The modes.
const (
	Shape   Mode = iota // delay them until they may leave
	Police              // drop them if they would wait longer than max_delay, else pass them at once
	Observe             // only count them
)

func (m Mode) String() string { return [...]string{"shape", "police", "observe"}[m] }

// Hook is the place in the kernel where programs run.
type Hook uint8

// The hooks.
const (
	Auto   Hook = iota // TCX if the kernel has it, else Clsact
	TCX                // tc links, since Linux 6.6
	Clsact             // tc filters of the qdisc clsact
	XDP                // in the driver; only at ingress, and not with Shape
)

func (h Hook) String() string { return [...]string{"auto", "tcx", "clsact", "xdp"}[h] }

// replyHook returns the hook for the reply program, which is in the other direction: XDP
// has none there.
func (h Hook) replyHook() Hook {
	if h == XDP {
		return Auto
	}
	return h
}

// countsConnections reports whether limits of p count connections at a.
func (a *Attachment) countsConnections(p *shaper.Policy) bool {
	for i := range p.OriginSet(p.AttachmentIndex(a.Name)).All {
		if p.Limit(i).CountsConnections() {
			return true
		}
	}
	return false
}

// missingInterfaces returns the interfaces that a lists by name, not by a pattern, and that are not present.
func (a *Attachment) missingInterfaces(present map[string]bool) (names []string) {
	for _, name := range a.Interfaces {
		if !strings.ContainsAny(name, `*?[\`) && !present[name] {
			names = append(names, name)
		}
	}
	return names
}

// missingError returns an error that names the missing interfaces, or nil.
func missingError(missing []string) error {
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("missing interface %s", strings.Join(missing, ", "))
}

// matches reports whether a covers an interface.
func (a *Attachment) matches(name string) bool {
	for _, pattern := range a.Interfaces {
		if ok, _ := path.Match(pattern, name); ok || pattern == name {
			return true
		}
	}
	return false
}
