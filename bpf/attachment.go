package bpf

import (
	"fmt"
	"strings"

	"shaperd.dev/shaperd/shaper"
)

// programModes are the modes of attachments as the programs number them.
var programModes = [...]uint32{
	shaper.AttachShape:   uint32(kernelModeMODE_SHAPE),
	shaper.AttachPolice:  uint32(kernelModeMODE_POLICE),
	shaper.AttachObserve: uint32(kernelModeMODE_OBSERVE),
}

// direction converts a direction from the form of an [attach.Point].
func direction(ingress bool) shaper.AttachDirection {
	if ingress {
		return shaper.Ingress
	}
	return shaper.Egress
}

// replyHook returns the hook for the reply program of one at h, which is in the other
// direction: XDP has none there.
func replyHook(h shaper.Hook) shaper.Hook {
	if h == shaper.HookXDP {
		return shaper.HookAuto
	}
	return h
}

// countsConnections reports whether limits of p count connections at a.
func countsConnections(a *shaper.Attachment, p *shaper.Policy) bool {
	for i := range p.OriginSet(p.AttachmentIndex(a.Name)).All {
		if p.Limit(i).CountsConnections() {
			return true
		}
	}
	return false
}

// missingInterfaces returns the interfaces that a lists by name, not by a pattern, and that are not present.
func missingInterfaces(a *shaper.Attachment, present map[string]bool) (names []string) {
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
