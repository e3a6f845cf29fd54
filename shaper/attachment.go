package shaper

import (
	"path"
	"time"
)

// Attachment is one attachment: interfaces at which packets meet the limits, in one direction.
type Attachment struct {
	Name        string
	Interfaces  []string // names, or patterns of [path.Match]
	Direction   AttachDirection
	Mode        AttachMode
	Observe     bool // dry run: count what would be delayed or dropped, and let everything pass
	Hook        Hook
	OnStop      OnStop
	Queue       int           // packets in the queue of an interface, 1000 to 10000000; only if the attachment shapes
	IdleTimeout time.Duration // of counted TCP connections: tcp_idle_timeout, 1s to 240h
}

// Matches reports whether a covers the interface of a name.
func (a *Attachment) Matches(ifname string) bool {
	for _, pattern := range a.Interfaces {
		if ok, _ := path.Match(pattern, ifname); ok || pattern == ifname {
			return true
		}
	}
	return false
}

// EffectiveMode returns the mode of a, which is AttachObserve if it observes.
func (a *Attachment) EffectiveMode() AttachMode {
	if a.Observe {
		return AttachObserve
	}
	return a.Mode
}

// Shapes reports whether a delays packets.
func (a *Attachment) Shapes() bool { return a.EffectiveMode() == AttachShape }

// AttachDirection is the direction in which packets pass an interface, seen from the host.
type AttachDirection uint8

// The directions of an attachment.
const (
	Egress AttachDirection = iota
	Ingress
)

func (d AttachDirection) String() string {
	return enumName(d, "egress", "ingress")
}

// AttachMode is what happens to packets that exceed a limit.
type AttachMode uint8

// The modes of an attachment.
const (
	AttachShape   AttachMode = iota // held until their departure time
	AttachPolice                    // dropped if their delay would exceed max_delay; others pass at once
	AttachObserve                   // counted, and pass: the effective mode of an attachment with Observe
)

func (m AttachMode) String() string {
	return enumName(m, "shape", "police", "observe")
}

// Hook is the place in the kernel where programs run.
type Hook uint8

// The hooks.
const (
	HookAuto   Hook = iota // TCX if the kernel has it, else clsact
	HookTCX                // links of tc, since Linux 6.6
	HookClsact             // filters of tc's qdisc clsact
	HookXDP                // the driver, before the kernel allocates an skb; only at ingress, and not to shape
)

func (h Hook) String() string {
	return enumName(h, "auto", "tcx", "clsact", "xdp")
}

// OnStop is what happens to traffic while no daemon runs.
type OnStop uint8

// The effects of the end of the daemon.
const (
	StopOpen OnStop = iota // traffic passes without limits
	StopKeep               // the last limits stay effective
)

func (s OnStop) String() string {
	return enumName(s, "open", "keep")
}
