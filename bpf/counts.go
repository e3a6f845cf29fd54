package bpf

import (
	"fmt"

	"shaperd/shaper"
)

// counted is what of the programs' counters has been added to package shaper's, by
// the number of the limit.
type counted map[uint32]tally

// tally is what programs have counted for a limit.
type tally struct {
	kernelState
	violations uint64 // of the promise
}

// start takes what is counted already, before this daemon, as added.
func (c counted) start(k *kernel) {
	for _, known := range k.Limits {
		if t, err := k.tally(known.Number); err == nil {
			c[known.Number] = t
		}
	}
}

// tally returns what there is for a limit.
func (k *kernel) tally(number uint32) (t tally, err error) {
	t.violations = k.violations(number)
	t.kernelState, err = k.state(number)
	return t, err
}

// state sums up what all CPUs have counted for a limit.
func (k *kernel) state(number uint32) (kernelState, error) {
	var cpus []kernelState
	if err := k.States.Lookup(number, &cpus); err != nil {
		return kernelState{}, fmt.Errorf("read %s: %w", kernelMapStates, err)
	}
	var sum kernelState
	for i := range cpus {
		sum.add(&cpus[i])
	}
	return sum, nil
}

func (s *kernelState) add(o *kernelState) {
	for i := range s.Taken {
		for j := range s.Taken[i] {
			s.Taken[i][j] += o.Taken[i][j]
		}
	}
	for i := range s.Refused {
		s.Refused[i] += o.Refused[i]
		s.MemoryFull[i] += o.MemoryFull[i]
	}
	for i := range s.Wait {
		s.Wait[i] += o.Wait[i]
	}
	s.Waited += o.Waited
	s.Marked += o.Marked
	for i := range s.Connections {
		s.Connections[i] += o.Connections[i]
	}
	s.OverConnections += o.OverConnections
	s.OverNew += o.OverNew
	s.ConnectionsMemoryFull += o.ConnectionsMemoryFull
	s.Adopted += o.Adopted
	s.InFlight += o.InFlight
	for i := range s.Opening {
		s.Opening[i] += o.Opening[i]
	}
	s.Opened += o.Opened
}

// sync adds what the programs have counted since the last time to the counts of
// the limits, which metrics and logs show.
func (p *Plane) sync() error {
	if p.policy == nil {
		return nil
	}
	for i := range p.policy.Len() {
		l := p.policy.Limit(i)
		if !l.OfAttachments() {
			continue
		}
		number := p.numbers.limits[l.Name]
		now, err := p.kernel.tally(number)
		if err != nil {
			return err
		}
		was := p.counted[number]
		p.counted[number] = now
		refused := shaper.QueueFull
		if l.Block {
			refused = shaper.Blocked
		}
		addCounts(p.policy.State(i), &was.kernelState, &now.kernelState, refused)
		p.kernel.addPromise(&p.policy.State(i).Promise, number, now.violations-was.violations)
	}
	return nil
}

// addCounts adds the difference of two readings to a limit's counts. refused is why the
// limit refuses packets.
func addCounts(to *shaper.State, was, now *kernelState, refused shaper.Reason) {
	for i, counts := range []*shaper.Counts{&to.Bytes, &to.Packets} {
		counts.Add(shaper.Pass, shaper.None, now.Taken[0][i]-was.Taken[0][i])
		counts.Add(shaper.Delay, shaper.ByRate, now.Taken[1][i]-was.Taken[1][i])
		counts.Add(shaper.Refuse, refused, now.Refused[i]-was.Refused[i])
		counts.Add(shaper.Refuse, shaper.MemoryFull, now.MemoryFull[i]-was.MemoryFull[i])
	}
	for i := range now.Wait {
		to.Queue.Counts[i].Add(now.Wait[i] - was.Wait[i])
	}
	to.Queue.Sum.Add(now.Waited - was.Waited)
	to.Marked.Add(now.Marked - was.Marked)
	to.Connections.Add(shaper.Pass, shaper.None, now.Connections[0]-was.Connections[0])
	to.Connections.Add(shaper.Delay, shaper.ByNew, now.Connections[1]-was.Connections[1])
	to.Connections.Add(shaper.Refuse, shaper.ByConnections, now.OverConnections-was.OverConnections)
	to.Connections.Add(shaper.Refuse, shaper.ByNew, now.OverNew-was.OverNew)
	to.Connections.Add(shaper.Refuse, shaper.MemoryFull, now.ConnectionsMemoryFull-was.ConnectionsMemoryFull)
	to.InFlight.Store(int64(now.InFlight))
	to.Wait.Counts[0].Add(now.Connections[0] - was.Connections[0])
	for i := range now.Opening {
		to.Wait.Counts[i].Add(now.Opening[i] - was.Opening[i])
	}
	to.Wait.Sum.Add(now.Opened - was.Opened)
}
