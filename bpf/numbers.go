// Owner: Plane.mu. Changes of attachments need Plane.changeMu too, which suffices to read.

package bpf

import (
	"fmt"

	"shaperd.dev/shaperd/shaper"
)

// numbers maps the names of limits, attachments and control groups to their numbers in the kernel. These
// are stable over policies and restarts, as buckets and programs refer to them.
type numbers struct {
	limits      map[string]uint32 // below len(kernelPolicy.Limit) * 4
	attachments map[string]uint32
	cgroups     map[string]uint32 // by path
	moved       []uint32          // numbers of attachments that have none of their former interfaces
}

// Sizes of the programs' tables.
const (
	maxLimits      = uint32(len(kernelMonitorOwners{}.Owner))
	maxAttachments = uint32(len(kernelPolicy{}.Attachment))
	maxCgroups     = uint32(len(kernelPolicy{}.Cgroup))
)

// assignNumbers assigns numbers to the limits and attachments of a policy. Those of an earlier
// policy keep theirs until the numbers run out. An attachment takes over the number of its
// former name, if there is one.
func (r *registry) assignNumbers(p *shaper.Policy, attachments []shaper.Attachment, former map[string]string) (numbers, error) {
	n := numbers{limits: map[string]uint32{}, attachments: map[string]uint32{}, cgroups: map[string]uint32{}}
	r.assignCgroups(p, n)
	for i := range p.Len() {
		name := p.Limit(i).Name
		if known := r.Limits[name]; known != nil {
			n.limits[name] = known.Number
		}
	}
	taken := map[uint32]string{}
	for name, known := range r.Limits {
		taken[known.Number] = name
	}
	for i := range p.Len() {
		name := p.Limit(i).Name
		if _, ok := n.limits[name]; ok {
			continue
		}
		number, ok := freeNumber(maxLimits, taken, n.limits)
		if !ok {
			return n, fmt.Errorf("limit %q: out of limit numbers", name) // a policy has fewer
		}
		n.limits[name] = number
		taken[number] = name
	}
	taken = map[uint32]string{}
	for name, number := range r.Attachments {
		taken[number] = name
	}
	for _, a := range attachments {
		if number, ok := r.Attachments[a.Name]; ok && former[a.Name] == "" {
			n.attachments[a.Name] = number
		}
	}
	for _, a := range attachments {
		if _, ok := n.attachments[a.Name]; ok {
			continue
		}
		number, ok := r.Attachments[former[a.Name]]
		if !ok || taken[number] != former[a.Name] {
			if number, ok = freeNumber(maxAttachments, taken, n.attachments); !ok {
				return n, fmt.Errorf("attachment %q: too many attachments", a.Name)
			}
		}
		n.attachments[a.Name] = number
		taken[number] = a.Name
	}
	return n, nil
}

// assignCgroups assigns numbers to the control groups of a policy. Those of the current policy keep theirs: its programs go on
// with them until the next one is swapped in.
func (r *registry) assignCgroups(p *shaper.Policy, n numbers) {
	taken := map[uint32]string{}
	for path, number := range r.Cgroups {
		taken[number] = path
	}
	for _, path := range p.Cgroups() {
		number, ok := r.Cgroups[path]
		if !ok {
			number, _ = freeNumber(maxCgroups, taken, n.cgroups) // a policy has half of them
		}
		n.cgroups[path] = number
		taken[number] = path
	}
}

// freeNumber returns a free number, or else one whose name is no longer used.
func freeNumber(limit uint32, taken map[uint32]string, used map[string]uint32) (uint32, bool) {
	for number := range limit {
		if _, ok := taken[number]; !ok {
			return number, true
		}
	}
	for number := range limit {
		if _, ok := used[taken[number]]; !ok {
			return number, true
		}
	}
	return 0, false
}

// recordPolicy records the current policy.
func (r *registry) recordPolicy(n numbers, p *shaper.Policy) {
	for name, known := range r.Limits {
		for other, number := range n.limits {
			if number == known.Number && other != name {
				delete(r.Limits, name)
			}
		}
	}
	for i := range p.Len() {
		l := p.Limit(i)
		r.Limits[l.Name] = &knownLimit{Number: n.limits[l.Name], Rates: ratesOf(l), Slotted: slotShiftsOf(p, i)}
	}
	for name, number := range r.Attachments {
		for other, taken := range n.attachments {
			if number == taken && other != name {
				delete(r.Attachments, name)
			}
		}
	}
	for name, number := range n.attachments {
		r.Attachments[name] = number
	}
	r.Cgroups = n.cgroups
}
