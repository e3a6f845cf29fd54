package conn

import (
	"slices"

	"shaperd/leaky"
	"shaperd/shaper"
)

// relieve has idle UDP flows make room for the connections that wait at gt, and looks again
// as long as some do. Else sources that may be forged would keep connections out of what
// both count against, with a datagram now and then.
func (g *gates) relieve(gt *gate, now leaky.Time) {
	for n := gt.waiting; n > 0 && len(gt.turns) > 0 && gt.capped(now); n-- {
		f := gt.spare(now)
		if f == nil {
			break
		}
		f.site.counts.FlowsEvicted.Add(1)
		f.close(now)
		if gt.pool != nil {
			gt.pool.site.wake(now)
		}
	}
	if len(gt.turns) > 0 {
		g.wheel.Schedule(&gt.relief, now+muteGrace)
	}
}

// spare returns a flow that makes room at gt, or nil. For another flow one does that is known.
func (gt *gate) spare(now leaky.Time) *udpFlow {
	most := answered
	if gt.turns[0].queues[0].head.flow.Protocol == shaper.UDP {
		most = known
	}
	if gt.pool == nil {
		return gt.flows.spare(most, now)
	}
	for _, d := range gt.pool.site.crowded(gt.pool.to, gt.pool.failed, now) {
		if f := d.flows.spare(most, now); f != nil {
			return f
		}
	}
	return nil
}

// spare returns the flow of r, of rank most at most, that makes room, or nil. For a connection
// that is one that nobody answered, or whose source did not go on after an answer.
func (r *roster) spare(most rank, now leaky.Time) *udpFlow {
	if f := r.candidate(nil, now); f != nil && f.rank <= most {
		return f
	}
	return nil
}

// crowded returns the full downstreams of which one would take a connection to to, if it had
// one less. Those that are out are only tried when all are.
func (s *site) crowded(to target, failed []*downstream, now leaky.Time) (full []*downstream) {
	for _, usable := range [...]bool{true, false} {
		found := false
		for _, d := range s.downstreams {
			if d.usable(to.at(d), now) != usable || d.drained || slices.Contains(failed, d) || !d.host.addr().IsValid() || !d.reaches(to.source) {
				continue
			}
			found = true
			if d.inFlight == d.Connections {
				full = append(full, d)
			}
		}
		if found {
			break
		}
	}
	return full
}
