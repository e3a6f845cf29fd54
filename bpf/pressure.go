package bpf

import (
	"errors"
	"time"
)

// pressure is how often something had no room.
type pressure struct {
	times uint64
	until time.Time // it is said to have none
}

// pressureHold is how long something is said to have no room after it last had none.
const pressureHold = time.Minute

// checkRoom finds what has no room for what it has to hold.
func (p *Plane) checkRoom() {
	counts, err := p.kernel.tableCounts()
	p.fault("table of buckets", err)
	if err == nil {
		p.press("room for buckets", counts.EvictedIndebted+counts.Lost,
			`too many keys owe something: new ones inherit what those owe that they replace; raise "max_buckets" under [daemon]`)
	}
	var refused uint64
	for _, s := range p.counted {
		refused += s.ConnectionsMemoryFull
	}
	p.press("room for connections", refused, "there is none: connections that limits count are refused")
	for _, pt := range p.points {
		if pt.Mode != Shape {
			continue
		}
		if q, err := pt.queueStatus(); err == nil {
			p.press("queue of "+pt.String(), q.Drops, `the interface is slower than what is sent there: its queue drops packets that have been charged`)
		}
		if w, err := p.kernel.waiting(pt.key()); err == nil {
			p.press("room in the queue of "+pt.String(), w.Refused,
				`too many packets wait: limits refuse those of keys that have most there; raise "queue" of the attachment, or give limits by bytes "packets" too`)
		}
	}
}

// press notes how often something has had no room since it is there.
func (p *Plane) press(what string, times uint64, problem string) {
	now := time.Now()
	pr := p.pressures[what]
	if pr == nil {
		pr = &pressure{times: times}
		p.pressures[what] = pr
	}
	if times > pr.times {
		pr.until = now.Add(pressureHold)
	}
	pr.times = times
	if now.Before(pr.until) {
		p.fault(what, errors.New(problem))
	} else {
		p.fault(what, nil)
	}
}
