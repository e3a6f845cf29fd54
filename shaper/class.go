package shaper

import (
	"fmt"
	"slices"
	"sync/atomic"
)

// Bounds of classes.
const (
	MaxClasses  = 16 // of a policy, without the default class
	MaxWeight   = 100
	MaxPriority = 100
)

// DefaultClass is the name of the class of flows that no other class matches. It has weight 1 and priority 0.
const DefaultClass = "default"

// TrafficClass is a class of connections and UDP flows at listeners: how their sources take turns with those of other classes. A flow
// is of the first class that matches it.
type TrafficClass struct {
	Name     string
	Match    Match // Listen, Protocol, Source, ASN, Group and Port
	Weight   int   // of a source in the queue of a bucket, 1 to MaxWeight
	Priority int   // at the gate of a bucket, 0 to MaxPriority: the highest is admitted first
}

// ClassState holds the counters of a class. It belongs to the name of the class and outlives policies. Any goroutine may read and write
// its counters.
type ClassState struct {
	Name string
	ID   uint32 // of no other class

	// New connections and UDP flows that had all slots that they needed, and that limits or downstreams without any refused.
	Admitted, Refused atomic.Uint64
}

// addClasses sets the classes of p, the default class last.
func (p *Policy) addClasses(s *Shaper, classes []TrafficClass) {
	p.classes = append(slices.Clone(classes), TrafficClass{Name: DefaultClass, Weight: 1})
	p.classProtocol = [numProtocols]Set{}
	for c := range p.classes {
		p.classStates = append(p.classStates, s.classState(p.classes[c].Name))
		m, bit := &p.classes[c].Match, Set(1)<<c
		for protocol := range p.classProtocol {
			if m.Protocol == AnyProtocol || m.Protocol == Protocol(protocol) {
				p.classProtocol[protocol] |= bit
			}
		}
		if len(m.Source)+len(m.ASN)+len(m.Group) == 0 {
			p.classAnySource |= bit
		}
	}
}

// Classes returns the number of classes of p, with the default class, which is the last one.
func (p *Policy) Classes() int { return len(p.classes) }

// Class returns class c, which must not be changed.
func (p *Policy) Class(c int) *TrafficClass { return &p.classes[c] }

// ClassState returns the state of class c.
func (p *Policy) ClassState(c int) *ClassState { return p.classStates[c] }

// ClassOf returns the class of f, a flow at a listener that was routed as r. If f is unverified, its source may be forged, and
// classes that match by source do not match it.
func (p *Policy) ClassOf(f *Flow, r Route, unverified bool) int {
	last := len(p.classes) - 1
	if last == 0 {
		return 0
	}
	set := p.classAnySource
	if !unverified {
		set = p.sources.matching[r.row]
	}
	set &= p.portClasses[p.portSegment(f.Port)] & p.origins[f.Origin].classes & p.classProtocol[f.Protocol]
	for c := range set.All {
		return c
	}
	return last
}

// FindClass returns the index of the class with a state, or that of the default class if p has none.
func (p *Policy) FindClass(state *ClassState) int {
	if c := slices.Index(p.classStates, state); c >= 0 {
		return c
	}
	return len(p.classes) - 1
}

// classState returns the state of the class named name, which never changes.
func (s *Shaper) classState(name string) *ClassState {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.classes[name]
	if st == nil {
		st = &ClassState{Name: name, ID: uint32(len(s.classes))}
		s.classes[name] = st
	}
	return st
}

// ClassError is an error in a class.
type ClassError struct {
	Class int    // index into those given to Compile
	Name  string // name of the class
	Key   string // configuration key of the invalid value
	Msg   string
}

func (e *ClassError) Error() string { return fmt.Sprintf("class %q: %s: %s", e.Name, e.Key, e.Msg) }

// validateClasses returns the errors in the classes of r.
func (r *Rules) validateClasses() (errs []error) {
	if len(r.Classes) > MaxClasses {
		return []error{fmt.Errorf("too many classes: %d (maximum %d)", len(r.Classes), MaxClasses)}
	}
	for i := range r.Classes {
		c := &r.Classes[i]
		bad := func(key, format string, args ...any) {
			errs = append(errs, &ClassError{i, c.Name, key, fmt.Sprintf(format, args...)})
		}
		m := &c.Match
		switch {
		case c.Name == DefaultClass:
			bad("name", "reserved for flows that no class matches")
		case slices.ContainsFunc(r.Classes[:i], func(o TrafficClass) bool { return o.Name == c.Name }):
			bad("name", "duplicate name")
		case len(m.Attach)+len(m.Destination) > 0 || m.Protocol >= ICMP:
			bad("match", "unsupported: at attachments nothing takes turns by class")
		}
		if c.Weight < 1 || c.Weight > MaxWeight {
			bad("weight", "%d: must be from 1 to %d", c.Weight, MaxWeight)
		}
		if c.Priority < 0 || c.Priority > MaxPriority {
			bad("priority", "%d: must be from 0 to %d", c.Priority, MaxPriority)
		}
		for _, name := range m.Listen {
			if !slices.ContainsFunc(r.Listeners, func(l Listener) bool { return l.Name == name }) {
				bad("match.listen", "unknown listener %q", name)
			}
		}
		for _, name := range m.Group {
			if !slices.ContainsFunc(r.Groups, func(g Group) bool { return g.Name == name }) {
				bad("match.group", "unknown group %q", name)
			}
		}
		for _, p := range m.Source {
			if !validSource(p) {
				bad("match.source", "%v: invalid, or IPv4 in the form of IPv6", p)
			}
		}
		for _, ports := range m.Port {
			if ports.First > ports.Last {
				bad("match.port", "invalid range %v", ports)
			}
		}
	}
	return errs
}
