// Owner: Plane.mu.

package bpf

import (
	"errors"
	"time"
)

// capacityAlarm is raised when an overflow counter rises.
type capacityAlarm struct {
	count uint64
	until time.Time // end of the alarm
}

// alarmHold is how long an alarm stays raised after the last overflow.
const alarmHold = time.Minute

// checkCapacity raises alarms for tables and queues that overflow.
func (p *Plane) checkCapacity() {
	counts, err := p.kernel.tableCounts()
	p.report("bucket table", err)
	if err == nil {
		p.updateAlarm("bucket capacity", counts.EvictedBacklogged+counts.InsertFailed,
			`too many keys have a backlog: new keys inherit the backlog of those that they evict; raise "max_buckets" under [daemon]`)
	}
	p.updateAlarm("shared bucket capacity", p.lacking, "too many keys of shared limits are hot: all others have no more than these")
	var refused uint64
	for _, s := range p.lastCounters {
		refused += s.ConnsMemoryFull
	}
	p.updateAlarm("connection capacity", refused, "the connection table is full: counted connections are refused")
	for _, pt := range p.points {
		if !pt.Shapes() {
			continue
		}
		if q, err := pt.queueStatus(); err == nil {
			p.updateAlarm("queue of "+pt.String(), q.Drops, `the interface is slower than the traffic: its queue drops packets that have been charged`)
		}
		if w, err := p.kernel.waiting(pt.key()); err == nil {
			p.updateAlarm("queue capacity of "+pt.String(), w.Refused,
				`too many packets wait: packets of the keys with the most are refused; raise "queue" of the attachment, or add "packets" to limits by bytes`)
		}
	}
}

// updateAlarm takes in an overflow counter. problem is the text of the alarm.
func (p *Plane) updateAlarm(what string, times uint64, problem string) {
	now := time.Now()
	pr := p.alarms[what]
	if pr == nil {
		pr = &capacityAlarm{count: times}
		p.alarms[what] = pr
	}
	if times > pr.count {
		pr.until = now.Add(alarmHold)
	}
	pr.count = times
	if now.Before(pr.until) {
		p.report(what, errors.New(problem))
	} else {
		p.report(what, nil)
	}
}
