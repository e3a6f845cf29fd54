package daemon

import (
	"sync"

	"shaperd.dev/shaperd/bpf"
	"shaperd.dev/shaperd/shaper"
)

// packetShares is the packet plane as the members of a group see it: it is there whether or not the
// configuration has attachments. Its methods are safe for concurrent use.
type packetShares struct {
	mu    sync.Mutex
	plane *bpf.Plane // nil without attachments
	told  bool       // of lease and given
	lease shaper.Lease
	given map[shaper.Key]uint32
}

// SetShares changes what packets may use of shared limits, now or when there are attachments.
func (p *packetShares) SetShares(s shaper.Shares) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.told, p.lease = true, s.Lease
	if s.Reset || p.given == nil {
		p.given = map[shaper.Key]uint32{}
	}
	for _, k := range s.Cold {
		delete(p.given, k)
	}
	for _, g := range s.Given {
		p.given[g.Key] = g.Parts
	}
	if p.plane != nil {
		p.plane.SetShares(s)
	}
}

// Demands appends what packets need of shared limits.
func (p *packetShares) Demands(all []shaper.Demand) []shaper.Demand {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.plane == nil {
		return all
	}
	return p.plane.Demands(all)
}

// use makes plane enforce what was told, or nothing if it is nil.
func (p *packetShares) use(plane *bpf.Plane) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if plane == p.plane {
		return
	}
	if p.plane = plane; plane == nil || !p.told {
		return
	}
	all := shaper.Shares{Lease: p.lease, Reset: true}
	for k, parts := range p.given {
		all.Given = append(all.Given, shaper.KeyParts{Key: k, Parts: parts})
	}
	plane.SetShares(all)
}
