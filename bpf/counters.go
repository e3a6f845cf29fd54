// Owner: Plane.mu.

package bpf

import (
	"fmt"

	"shaperd.dev/shaperd/shaper"
)

// lastCounters are the values of the programs' counters that package shaper's counters include, by
// the number of the limit.
type lastCounters map[uint32]counters

// counters are the programs' counters of a limit.
type counters struct {
	kernelCounters
	violations uint64 // of conformance
}

// start takes the counters of the time before this daemon as included.
func (c lastCounters) start(k *kernel) {
	for _, known := range k.Limits {
		if t, err := k.readCounters(known.Number); err == nil {
			c[known.Number] = t
		}
	}
}

// readCounters returns the counters of a limit.
func (k *kernel) readCounters(number uint32) (t counters, err error) {
	t.violations = k.violations(number)
	t.kernelCounters, err = k.readState(number)
	return t, err
}

// readState returns the sum of a limit's counters over all CPUs.
func (k *kernel) readState(number uint32) (kernelCounters, error) {
	var cpus []kernelCounters
	if err := k.LimitCounters.Lookup(number, &cpus); err != nil {
		return kernelCounters{}, fmt.Errorf("read %s: %w", kernelMapLimitCounters, err)
	}
	var sum kernelCounters
	for i := range cpus {
		sum.add(&cpus[i])
	}
	return sum, nil
}

func (s *kernelCounters) add(o *kernelCounters) {
	for i := range s.Admitted {
		for j := range s.Admitted[i] {
			s.Admitted[i][j] += o.Admitted[i][j]
		}
	}
	for i := range s.Refused {
		s.Refused[i] += o.Refused[i]
		s.MemoryFull[i] += o.MemoryFull[i]
	}
	for i := range s.DelayHist {
		s.DelayHist[i] += o.DelayHist[i]
	}
	s.DelaySum += o.DelaySum
	s.Marked += o.Marked
	for i := range s.ConnsAdmitted {
		s.ConnsAdmitted[i] += o.ConnsAdmitted[i]
	}
	s.ConnsOverCap += o.ConnsOverCap
	s.ConnsOverRate += o.ConnsOverRate
	s.ConnsMemoryFull += o.ConnsMemoryFull
	s.ConnsAdopted += o.ConnsAdopted
	s.InFlight += o.InFlight
	for i := range s.ConnDelayHist {
		s.ConnDelayHist[i] += o.ConnDelayHist[i]
	}
	s.ConnDelaySum += o.ConnDelaySum
}

// syncCounters adds the programs' counts since the last call to the counters of the limits, which
// metrics and logs show.
func (p *Plane) syncCounters() error {
	if p.policy == nil {
		return nil
	}
	for i := range p.policy.Len() {
		l := p.policy.Limit(i)
		if !l.InPacketPlane() {
			continue
		}
		number := p.numbers.limits[l.Name]
		now, err := p.kernel.readCounters(number)
		if err != nil {
			return err
		}
		was := p.lastCounters[number]
		p.lastCounters[number] = now
		refused := shaper.QueueFull
		if l.Block {
			refused = shaper.Blocked
		}
		addCounts(p.policy.State(i), &was.kernelCounters, &now.kernelCounters, refused)
		p.kernel.addConformance(&p.policy.State(i).Conformance, number, now.violations-was.violations)
	}
	return nil
}

// addCounts adds the difference of two readings to a limit's counters. refused is the reason
// for which the limit refuses packets.
func addCounts(to *shaper.LimitState, was, now *kernelCounters, refused shaper.Reason) {
	for i, counts := range []*shaper.Counters{&to.Bytes, &to.Packets} {
		counts.Add(shaper.Pass, shaper.None, now.Admitted[0][i]-was.Admitted[0][i])
		counts.Add(shaper.Delay, shaper.ByRate, now.Admitted[1][i]-was.Admitted[1][i])
		counts.Add(shaper.Refuse, refused, now.Refused[i]-was.Refused[i])
		counts.Add(shaper.Refuse, shaper.MemoryFull, now.MemoryFull[i]-was.MemoryFull[i])
	}
	for i := range now.DelayHist {
		to.QueueDelay.Counts[i].Add(now.DelayHist[i] - was.DelayHist[i])
	}
	to.QueueDelay.Sum.Add(now.DelaySum - was.DelaySum)
	to.Marked.Add(now.Marked - was.Marked)
	to.Connections.Add(shaper.Pass, shaper.None, now.ConnsAdmitted[0]-was.ConnsAdmitted[0])
	to.Connections.Add(shaper.Delay, shaper.ByNewConnections, now.ConnsAdmitted[1]-was.ConnsAdmitted[1])
	to.Connections.Add(shaper.Refuse, shaper.ByConnections, now.ConnsOverCap-was.ConnsOverCap)
	to.Connections.Add(shaper.Refuse, shaper.ByNewConnections, now.ConnsOverRate-was.ConnsOverRate)
	to.Connections.Add(shaper.Refuse, shaper.MemoryFull, now.ConnsMemoryFull-was.ConnsMemoryFull)
	to.InFlight.Store(int64(now.InFlight))
	to.SlotWait.Counts[0].Add(now.ConnsAdmitted[0] - was.ConnsAdmitted[0])
	for i := range now.ConnDelayHist {
		to.SlotWait.Counts[i].Add(now.ConnDelayHist[i] - was.ConnDelayHist[i])
	}
	to.SlotWait.Sum.Add(now.ConnDelaySum - was.ConnDelaySum)
}
