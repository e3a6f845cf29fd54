package bpf

import (
	"fmt"
	"path"
	"strings"
	"time"

	"shaperd/shaper"
)

// Attachment is where packets meet the limits that name it.
type Attachment struct {
	Name        string
	Interfaces  []string // names, or patterns as [path.Match] reads them
	Ingress     bool
	Mode        Mode
	Hook        Hook
	Keep        bool          // enforced even while no daemon runs
	Queue       int           // packets that an interface's queue holds; of Shape alone
	IdleTimeout time.Duration // of TCP connections that are counted
}

// Mode is what happens to packets that come too fast, as the programs number it.
type Mode uint32

// The modes.
const (
	Shape   Mode = iota // held until they may leave
	Police              // dropped when they would wait longer than max_delay; else they pass at once
	Observe             // counted
)

func (m Mode) String() string { return [...]string{"shape", "police", "observe"}[m] }

// Hook is where in the kernel packets are met.
type Hook uint8

// The hooks.
const (
	Auto   Hook = iota // TCX where the kernel has it, else Clsact
	TCX                // links of tc, from Linux 6.6
	Clsact             // filters of tc's qdisc clsact
	XDP                // the driver; at ingress, and not with Shape
)

func (h Hook) String() string { return [...]string{"auto", "tcx", "clsact", "xdp"}[h] }

// ofReplies returns the hook for the program on the other side of the interface: XDP
// has none there.
func (h Hook) ofReplies() Hook {
	if h == XDP {
		return Auto
	}
	return h
}

// counts reports whether limits of p count connections at a.
func (a *Attachment) counts(p *shaper.Policy) bool {
	for i := range p.PlaceSet(p.AttachIndex(a.Name)).All {
		if p.Limit(i).CountsConnections() {
			return true
		}
	}
	return false
}

// missing returns the interfaces that a names, other than by a pattern, and that are not present.
func (a *Attachment) missing(present map[string]bool) (names []string) {
	for _, name := range a.Interfaces {
		if !strings.ContainsAny(name, `*?[\`) && !present[name] {
			names = append(names, name)
		}
	}
	return names
}

// noInterface returns an error when there are interfaces missing.
func noInterface(missing []string) error {
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("there is no interface %s yet", strings.Join(missing, ", "))
}

// matches reports whether a belongs at an interface.
func (a *Attachment) matches(name string) bool {
	for _, pattern := range a.Interfaces {
		if ok, _ := path.Match(pattern, name); ok || pattern == name {
			return true
		}
	}
	return false
}
