// Owner: the loop's thread, except for the methods of Proxy.

package conn

import (
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// sharing enforces what this host may use of shared limits. All buckets of them that are in use have
// a share; the idle ones are in the table of the shaper, where all are cold. So the bucket of a hot
// key stays in use while it is hot.
//
// Parts change when they are given, and when the lease ends, of which nobody tells. The loop wakes up
// for that, and also reads the clock of the lease after each unit: when a process was stopped, or its
// machine suspended, at most one unit leaves before that is known.
type sharing struct {
	shaper    *shaper.Shaper
	wheel     *pacer.Wheel
	clock     func() leaky.Time
	boot      func() leaky.Time // the clock of leases: goes on while the machine is suspended
	scheduler *scheduler
	admission *admission
	lending   *lending
	onShort   func() // or nil

	lease     shaper.Lease
	at        leaky.Time            // by the clock of leases: parts are those of that instant
	changedAt leaky.Time            // by the loop's clock: when parts last changed
	cold      uint32                // parts of a cold bucket
	given     map[shaper.Key]uint32 // parts of hot buckets, until the lease ends
	shares    []*share              // of the buckets in use
	end       pacer.Event           // when the lease changes parts
	wake      pacer.Event           // runs the scheduler and the admission

	listed     []*share // that were used or waited for since the last report; at most maxListed
	reporting  []*share // those of the report that is being made
	reported   int      // how many of them it has looked at
	reportedAt leaky.Time
}

func newSharing(s *shaper.Shaper, w *pacer.Wheel, clock, boot func() leaky.Time) *sharing {
	sg := &sharing{shaper: s, wheel: w, clock: clock, boot: boot, given: map[shaper.Key]uint32{}}
	sg.scheduler, sg.admission = newScheduler(sg), newAdmission(sg)
	sg.lending = &lending{sharing: sg, admission: sg.admission, given: map[shaper.Key]uint32{}}
	sg.end.Fire = func(now leaky.Time) {
		sg.follow(now)
		sg.arm(now)
	}
	sg.wake.Fire = func(now leaky.Time) {
		sg.scheduler.run(now)
		sg.admission.run(now)
	}
	return sg
}

// beHome makes w the worker that has what hosts share, and quotas.
func (w *worker) beHome(onShort func()) {
	l := w.loop
	l.sharing.onShort = onShort
	l.quotas = newQuotas(l)
	l.scheduler.quotas, w.admission.budgets = l.quotas, l.quotas
}

// SetShares changes what p may use of shared limits. When it returns, nothing leaves and no connection is
// admitted any more that needs more than that. Before the first call nothing is that is under a shared limit.
func (p *Proxy) SetShares(s shaper.Shares) {
	p.sharesMu.Lock()
	defer p.sharesMu.Unlock()
	sg, given, slots := p.home.loop.sharing, s.Given, s.Slots
	if s.Reset { // all buckets change at one instant
		given, slots = nil, nil
	} else {
		s.Given, s.Slots = nil, nil
	}
	p.home.loop.call(func(leaky.Time) { sg.set(&s) })
	for batch := range slices.Chunk(given, givenBatch) {
		p.home.loop.call(func(leaky.Time) { sg.give(batch, sg.clock()) })
	}
	if len(s.Tickets) > 0 {
		p.home.loop.call(func(leaky.Time) { sg.giveTickets(s.Tickets) })
	}
	for batch := range slices.Chunk(slots, givenBatch) {
		p.home.loop.call(func(now leaky.Time) {
			sg.lending.give(batch)
			sg.admission.run(now)
		})
	}
}

// givenBatch is how many buckets get their parts before bytes have their turn: 0.2 ms.
const givenBatch = 500

// set puts s into effect.
func (sg *sharing) set(s *shaper.Shares) {
	now := sg.clock() // the start of the round is earlier: parts that grow would have had them then
	sg.follow(now)
	leased := sg.leased()
	sg.lease, sg.at, sg.changedAt = s.Lease, max(sg.at, sg.boot()), now
	old := sg.given
	if s.Reset {
		sg.given = make(map[shaper.Key]uint32, len(s.Given))
	}
	for _, k := range s.Cold {
		delete(sg.given, k)
	}
	changed := sg.setCold(now) // before buckets return to the table
	sg.give(s.Given, now)
	for _, k := range s.Cold {
		sg.cool(k, now)
	}
	if s.Reset {
		for k := range old {
			if _, hot := sg.given[k]; !hot {
				sg.cool(k, now)
			}
		}
	}
	if changed || !leased || !sg.leased() {
		sg.updateAll(now)
	}
	sg.lending.set(s, now)
	sg.arm(now)
	sg.admission.run(now)
}

// give makes buckets hot, or changes the parts of hot ones.
func (sg *sharing) give(given []shaper.KeyParts, now leaky.Time) {
	policy := sg.shaper.Policy()
	for _, g := range given {
		sg.given[g.Key] = g.Parts
		if sh := sg.open(policy, g.Key, now); sh != nil {
			sh.hot = true
			sh.dropTickets()
			sg.setParts(sh, sg.lease.Parts(g.Parts, sg.at), now)
		}
	}
}

// follow changes parts if the lease has changed them, as of the instants at which it did.
func (sg *sharing) follow(now leaky.Time) {
	next := sg.next()
	if next == leaky.Never {
		return
	}
	boot := sg.boot()
	if next > boot {
		return
	}
	for ; next <= boot; next = sg.next() {
		sg.at, sg.changedAt = next, max(sg.changedAt, now.Sub(boot-next))
		sg.setCold(sg.changedAt)
		sg.updateAll(sg.changedAt)
		sg.lending.setTerms()
	}
	sg.arm(now)
	sg.wheel.Schedule(&sg.wake, now)
}

// next is when the lease changes parts next.
func (sg *sharing) next() leaky.Time {
	switch {
	case sg.leased():
		return sg.lease.End
	case sg.at < sg.lease.AloneAt:
		return sg.lease.AloneAt
	}
	return leaky.Never
}

// leased reports whether hot buckets have the parts that they were given.
func (sg *sharing) leased() bool { return sg.at < sg.lease.End }

// arm makes the loop wake up when the lease changes parts.
func (sg *sharing) arm(now leaky.Time) {
	if next := sg.next(); next < leaky.Never {
		sg.wheel.Schedule(&sg.end, now.Add(next.Sub(sg.boot())))
	} else {
		sg.wheel.Cancel(&sg.end)
	}
}

// setCold changes the parts of cold buckets, also of those in the table. It reports whether they have
// changed.
func (sg *sharing) setCold(now leaky.Time) bool {
	cold := sg.lease.ColdParts(sg.at)
	if cold == sg.cold {
		return false
	}
	sg.cold = cold
	sg.shaper.SetCold(cold, now)
	return true
}

// parts returns what this host may use of a bucket, and whether that is hot.
func (sg *sharing) parts(k shaper.Key) (parts uint32, hot bool) {
	given, hot := sg.given[k]
	if !hot {
		return sg.cold, false
	}
	return sg.lease.Parts(given, sg.at), true
}

func (sg *sharing) updateAll(now leaky.Time) {
	for _, sh := range sg.shares {
		if !sg.leased() {
			sh.dropTickets()
		}
		sg.update(sh, now)
	}
}

// update gives sh the parts that it has now.
func (sg *sharing) update(sh *share, now leaky.Time) {
	var parts uint32
	parts, sh.hot = sg.parts(sh.key)
	sg.setParts(sh, parts, now)
}

func (sg *sharing) setParts(sh *share, parts uint32, now leaky.Time) {
	if parts == sh.Parts {
		return
	}
	sh.reshare(sh.whole, parts, now)
	if sh.gate != nil {
		sg.admission.rearm(sh.gate, now)
		return
	}
	sg.scheduler.reshaped(sh.queue, now)
	if !sg.scheduler.running && !sg.wake.Scheduled() {
		sg.wheel.Schedule(&sg.wake, now)
	}
}

// open returns the share of a bucket that is hot. If there is no queue or gate for it, it makes one.
// It returns nil if the current policy has no such bucket here.
func (sg *sharing) open(policy *shaper.Policy, k shaper.Key, now leaky.Time) *share {
	if sh := sg.find(k); sh != nil {
		return sh
	}
	for i := range policy.Shared().All {
		switch l := policy.Limit(i); {
		case l.InPacketPlane() || policy.State(i).ID != k.Limit&^1:
		case k.Limit&1 != 0 && l.NewConnections.N > 0:
			return sg.admission.gateFor(i, l, k).share
		case k.Limit&1 == 0 && policy.Paced()&(1<<i) != 0:
			return sg.scheduler.queueFor(policy, i, k, now).share
		}
	}
	return nil
}

// find returns the share of a bucket, or nil if that is not in use.
func (sg *sharing) find(k shaper.Key) *share {
	if q := sg.scheduler.byKey[k]; q != nil {
		return q.share
	}
	if gt := sg.admission.byKey[k]; gt != nil {
		return gt.share
	}
	return nil
}

// cool updates a bucket that was hot.
func (sg *sharing) cool(k shaper.Key, now leaky.Time) {
	if sh := sg.find(k); sh != nil {
		sh.dropTickets()
		sg.update(sh, now)
		sg.dropUnused(sh, now)
	}
}

// dropUnused removes the queue or the gate of a share if nothing needs it.
func (sg *sharing) dropUnused(sh *share, now leaky.Time) {
	if sh.queue != nil {
		sg.scheduler.dropUnused(sh.queue, now)
	} else {
		sg.admission.dropUnused([]*gate{sh.gate}, now)
	}
}

// reload updates all buckets in use to the current policy, if it or the one before has shared limits:
// at once, as other hosts count on it.
func (sg *sharing) reload(now leaky.Time) {
	policy := sg.shaper.Policy()
	if policy.Shared() == 0 && len(sg.shares) == 0 {
		return
	}
	for _, q := range sg.scheduler.byKey {
		sg.scheduler.refresh(q, now)
		sg.scheduler.dropUnused(q, now) // if it was held for a limit that is not shared any more
	}
	for _, gt := range sg.admission.byKey {
		sg.admission.refresh(gt)
		sg.admission.dropUnused([]*gate{gt}, now)
	}
	for k := range sg.given {
		sg.open(policy, k, now)
	}
	sg.lending.reload()
	sg.wheel.Schedule(&sg.wake, now)
}

// close returns the buckets to the table that are only held.
func (sg *sharing) close(now leaky.Time) {
	sg.lending.close(now)
	clear(sg.given)
	for _, sh := range slices.Clone(sg.shares) {
		sh.listed = false
		sg.update(sh, now)
		sg.dropUnused(sh, now)
	}
}
