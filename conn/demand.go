// Owner: the loop's thread, except for the methods of Proxy.

package conn

import (
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

const (
	// shortAfter is how long units of a shared bucket must have waited without a break before it counts
	// as short. Two packets that come together wait as well, at any share.
	shortAfter = leaky.Second / 200

	// maxListed bounds the buckets whose use is to be reported. If there are more, what they use is not
	// counted, and they keep the parts of a cold one.
	maxListed = 1 << 16

	// reportBatch is how many buckets the loop looks at before bytes have their turn: 0.1 ms.
	reportBatch = 1000
)

// Demands appends to all what has left of shared limits since the last call, and what waits: of
// buckets that are hot, and of cold ones of which units wait, or of whose part more than 80 % were
// used. Of a hot bucket that it leaves out, nothing has left and nothing waits, unless there are too
// many: see [shaper.HeaviestDemands].
//
// Then come the pools of slots: all that are hot, all of which more is used than a host may have of a
// cold one, and of the others 10,000 at most of which connections wait or were refused, or more than
// 80 % of the slots are used.
func (p *Proxy) Demands(all []shaper.Demand) []shaper.Demand {
	p.demandMu.Lock()
	defer p.demandMu.Unlock()
	sg, own := p.home.loop.sharing, len(all)
	var span leaky.Time
	p.home.loop.call(func(leaky.Time) { span = sg.beginReport() })
	for more := true; more; {
		p.home.loop.call(func(now leaky.Time) {
			all, more = sg.report(all, span, now)
			for end := now + followSlice; p.shaper.Migrate() && now < end; now = p.home.loop.clock.Now() {
			}
		})
	}
	all = all[:own+len(shaper.HeaviestDemands(all[own:]))]
	p.home.loop.call(func(leaky.Time) { sg.lending.beginReport() })
	for more := true; more; {
		p.home.loop.call(func(now leaky.Time) { all, more = sg.lending.report(all, now) })
	}
	return all
}

// beginReport begins a report, and returns the time since the last one.
func (sg *sharing) beginReport() leaky.Time {
	now := sg.clock()
	span := now.Sub(sg.reportedAt)
	sg.reportedAt = now
	sg.reporting, sg.listed, sg.reported = sg.listed, sg.reporting[:0], 0
	return span
}

// report appends what is to be reported of the next buckets, and reports whether there are more.
func (sg *sharing) report(all []shaper.Demand, span, now leaky.Time) (_ []shaper.Demand, more bool) {
	end := min(sg.reported+reportBatch, len(sg.reporting))
	for ; sg.reported < end; sg.reported++ {
		sh := sg.reporting[sg.reported]
		sg.reporting[sg.reported] = nil
		if !sh.listed { // its limit is gone
			continue
		}
		sh.listed = false
		used := max(sh.whole.Cost(sh.bytes, sh.packets))
		d := shaper.Demand{Key: sh.key, Used: used}
		sh.bytes, sh.packets = 0, 0
		if sh.short = sh.isShort(now); sh.short {
			d.Waiting = max(sh.waiting(), 1)
			sg.list(sh) // to report when that ends
		}
		if sh.gate != nil {
			sh.gate.demandTickets(&d, now)
		}
		if sh.hot || d.Waiting > 0 || float64(used) > 0.8*float64(span)*float64(sh.Parts)/shaper.Whole {
			all = append(all, d)
		}
		sg.dropUnused(sh, now)
	}
	return all, end < len(sg.reporting)
}

// list makes the next report look at sh.
func (sg *sharing) list(sh *share) {
	if !sh.listed && len(sg.listed) < maxListed {
		sh.listed = true
		sg.listed = append(sg.listed, sh)
	}
}

// use counts what has left.
func (sg *sharing) use(sh *share, bytes, packets uint64) {
	sh.bytes += bytes
	sh.packets += packets
	sg.list(sh)
}

// wait records that a unit has to wait until due.
func (sg *sharing) wait(sh *share, due, now leaky.Time) {
	if sh.waitsSince == 0 {
		sh.waitsSince = now
	}
	sg.list(sh)
	if due.Sub(sh.waitsSince) >= shortAfter {
		sg.beShort(sh)
	}
}

func (sg *sharing) beShort(sh *share) {
	if !sh.short && sg.onShort != nil {
		sg.onShort()
	}
	sh.short = true
}

// isShort reports whether units have been waiting for long. If the limit only observes, they wait while
// its bucket would let none leave.
func (sh *share) isShort(now leaky.Time) bool {
	observes := sh.queue != nil && sh.queue.observes || sh.gate != nil && sh.gate.limit.Observe
	if observes && sh.depart(now) <= now {
		sh.waitsSince = 0
	}
	return sh.waitsSince != 0 && sh.depart(now).Sub(sh.waitsSince) >= shortAfter
}

// waiting is how many sources wait for the bucket, as far as the limit enforces.
func (sh *share) waiting() int {
	if sh.gate != nil {
		return sh.gate.waitingSources()
	}
	n := sh.queue.root.Active()
	for _, b := range sh.queue.bookings {
		if b.unit.path[b.unit.bottleneck].queue == sh.queue {
			n++
		}
	}
	return n
}
