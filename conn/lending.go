// Owner: the loop's thread, except for the methods of Proxy.

package conn

import (
	"maps"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// lending enforces how many slots this host may use of shared caps. Like the bucket of a hot key, the gate
// of a pool that is hot stays while it is.
type lending struct {
	sharing   *sharing
	admission *admission
	terms     shaper.Lease          // what matters of the lease to slots
	given     map[shaper.Key]uint32 // parts of hot pools, by the key of the gate
	policy    *shaper.Policy        // of the last reset
	fresh     bool                  // the current one has other pools: which of them are hot is not known

	listed    []*poolShare // to be looked at by the next report
	reporting []*poolShare // by the report that is being made
	reported  int          // how many of them it has looked at
	cold      int          // how many cold ones it has reported
}

// poolShare is what this host uses of the pool of a shared cap.
type poolShare struct {
	gate     *gate
	name     string     // of the pool, once its listener is gone: the policy does not have that any more
	hot      bool       // parts were given
	listed   bool       // in lending.listed or lending.reporting
	short    bool       // connections have waited, since the last report or when it was made
	missed   int        // connections refused at the cap since the last report
	missedAt leaky.Time // when some of a report were
	peak     peak       // of slots that are used, or were missed
}

// rename keeps the name that the pool has in was, if the policy p has none for it.
func (sh *poolShare) rename(was, p *shaper.Policy) {
	switch {
	case sh.gate.limit.Key&shaper.KeyListen == 0:
	case p.ShareName(sh.gate.limitKey()) != "":
		sh.name = ""
	case sh.name == "":
		sh.name = was.ShareName(sh.gate.limitKey())
	}
}

// orphaned reports whether connections of a listener that is gone use the pool. They are always reported: the
// ledger may make it hot, and this host cannot be told.
func (sh *poolShare) orphaned() bool { return sh.name != "" && sh.gate.inFlight > 0 }

// held reports whether the gate is kept although no connection needs it.
func (sh *poolShare) held() bool { return sh != nil && (sh.hot || sh.listed) }

// pool returns the slots of which sh has a share.
func (sh *poolShare) pool(hosts int) shaper.SlotPool {
	return sh.gate.limit.Pool(sh.gate.state, hosts)
}

// waiting is how many connections wait for a slot.
func (sh *poolShare) waiting() int {
	if gt := sh.gate; gt.inFlight >= gt.slots {
		return gt.waiting
	}
	return 0
}

// nearlyUsed reports whether more than 80 % of the slots are used, and not just the only one.
func (sh *poolShare) nearlyUsed() bool {
	return sh.gate.inFlight > 1 && 10*sh.gate.inFlight > 8*sh.gate.slots
}

// overused reports whether more slots are used than a host may have of a cold pool. Connections were in
// flight before the limit was shared, or had its present values.
func (sh *poolShare) overused(hosts int) bool {
	return hosts > 0 && sh.gate.inFlight > sh.pool(hosts).Slots(uint32((shaper.Whole+hosts-1)/hosts))
}

// attach gives gt, of a shared cap, a share of its pool, or takes that away if the cap is not shared any more.
func (ld *lending) attach(gt *gate) {
	switch has := gt.limit.HasPool(); {
	case !has && gt.lent != nil:
		gt.lent.listed = false
		gt.lent = nil
	case has && gt.lent == nil:
		_, hot := ld.given[gt.key]
		gt.lent = &poolShare{gate: gt, hot: hot}
	}
}

// slotsOf returns how many connections may be in flight at the gate of key, whose cap l hosts share.
func (ld *lending) slotsOf(l *shaper.Limit, state *shaper.LimitState, key shaper.Key) int {
	parts, hot := ld.given[key]
	if !hot && !ld.fresh {
		parts = ld.terms.SlotsCold
	}
	return ld.terms.Slots(l.Pool(state, ld.terms.Hosts), parts, 0)
}

// setTerms takes in the lease as it is now.
func (ld *lending) setTerms() {
	lease := &ld.sharing.lease
	terms := shaper.Lease{AloneAt: leaky.Never, Hosts: lease.Hosts, SlotsCold: lease.SlotsCold}
	if ld.sharing.at >= lease.AloneAt && (lease.Alone == 0 || lease.Alone == shaper.Whole) {
		terms.AloneAt, terms.Alone = 0, lease.Alone
	}
	if terms == ld.terms {
		return
	}
	ld.terms = terms
	ld.updateAll()
}

func (ld *lending) updateAll() {
	for _, gt := range ld.admission.byKey {
		ld.update(gt)
	}
}

// update gives gt the slots that it has now.
func (ld *lending) update(gt *gate) {
	ld.admission.refresh(gt)
	if gt.lent == nil {
		return
	}
	_, gt.lent.hot = ld.given[gt.key]
	if n := ld.slotsOf(gt.limit, gt.state, gt.key); n != gt.slots {
		gt.slots = n
		ld.admission.freed = append(ld.admission.freed, gt)
	}
	ld.list(gt.lent)
}

// set puts s into effect. Gates that have other slots are dispatched by the next run.
func (ld *lending) set(s *shaper.Shares, now leaky.Time) {
	var cold []shaper.Key
	for _, k := range s.ColdSlots {
		cold = append(cold, gateKeyOf(k))
	}
	if s.Reset {
		cold = slices.AppendSeq(cold, maps.Keys(ld.given))
	}
	for _, k := range cold {
		delete(ld.given, k)
	}
	if s.Reset && (s.Policy == nil || s.Policy == ld.admission.policy) {
		ld.policy = ld.admission.policy
		if ld.fresh {
			ld.fresh = false
			ld.updateAll()
		}
	}
	ld.setTerms()
	ld.give(s.Slots)
	for _, k := range cold {
		if gt := ld.admission.byKey[k]; gt != nil {
			ld.update(gt)
			ld.admission.dropUnused([]*gate{gt}, now)
		}
	}
}

// give makes pools hot, or changes the parts of hot ones.
func (ld *lending) give(given []shaper.KeyParts) {
	for _, g := range given {
		k := gateKeyOf(g.Key)
		ld.given[k] = g.Parts
		ld.open(k)
	}
}

// open updates the gate of a pool that is hot. If there is none, it makes one, unless the current policy has no
// such gate here.
func (ld *lending) open(k shaper.Key) {
	gt, policy := ld.admission.byKey[k], ld.admission.policy
	if gt == nil {
		for i := range policy.Shared().All {
			if l := policy.Limit(i); l.HasPool() && policy.State(i).ID+1 == k.Limit {
				gt = ld.admission.gateFor(i, l, k)
			}
		}
	}
	if gt != nil {
		ld.update(gt)
	}
}

// use records that a connection has taken a slot of gt.
func (ld *lending) use(gt *gate, now leaky.Time) {
	if sh := gt.lent; sh != nil {
		sh.peak.add(gt.inFlight, now)
		ld.list(sh)
	}
}

// wait records that connections wait at gt.
func (ld *lending) wait(gt *gate) {
	if sh := gt.lent; sh != nil {
		ld.list(sh)
		if sh.waiting() > 0 {
			ld.beShort(sh)
		}
	}
}

// miss records that a connection was refused at gt.
func (ld *lending) miss(gt *gate) {
	if sh := gt.lent; sh != nil && gt.inFlight >= gt.slots {
		sh.missed++
		ld.list(sh)
		ld.beShort(sh)
	}
}

func (ld *lending) beShort(sh *poolShare) {
	if !sh.short && ld.sharing.onShort != nil {
		ld.sharing.onShort()
	}
	sh.short = true
}

// list makes the next report look at sh, if it may have to be reported. sh may be nil.
func (ld *lending) list(sh *poolShare) {
	switch {
	case sh == nil || sh.listed:
	case sh.hot || sh.orphaned() || sh.overused(ld.terms.Hosts), len(ld.listed) < maxListed && (sh.nearlyUsed() || sh.gate.waiting > 0 || sh.missed > 0 || sh.short):
		sh.listed = true
		ld.listed = append(ld.listed, sh)
	}
}

// beginReport begins a report.
func (ld *lending) beginReport() {
	ld.reporting, ld.listed, ld.reported, ld.cold = ld.listed, ld.reporting[:0], 0, 0
}

// report appends what is to be reported of the next pools, and reports whether there are more.
func (ld *lending) report(all []shaper.Demand, now leaky.Time) (_ []shaper.Demand, more bool) {
	end := min(ld.reported+reportBatch, len(ld.reporting))
	for ; ld.reported < end; ld.reported++ {
		sh := ld.reporting[ld.reported]
		ld.reporting[ld.reported] = nil
		if !sh.listed { // its limit is gone
			continue
		}
		sh.listed = false
		missed, over := sh.missed > 0 || sh.missedOfLate(now), sh.overused(ld.terms.Hosts)
		waits, nearly := missed || sh.waiting() > 0, sh.nearlyUsed()
		d := sh.demand(ld, now)
		sh.short = waits
		switch {
		case sh.hot || over || d.Name != "":
			all = append(all, d)
		case (waits || nearly) && ld.cold < shaper.MaxDemands:
			ld.cold++
			all = append(all, d)
		}
		ld.list(sh) // to report when that ends
		ld.admission.dropUnused([]*gate{sh.gate}, now)
	}
	return all, end < len(ld.reporting)
}

// demand returns what is needed of the pool.
func (sh *poolShare) demand(ld *lending, now leaky.Time) shaper.Demand {
	gt, pool := sh.gate, sh.pool(ld.terms.Hosts)
	sh.peak.add(gt.inFlight+sh.missed, now)
	d := shaper.Demand{
		Key: gt.limitKey(), Slots: true, Held: sh.heldParts(ld, pool), Fit: pool.Parts(gt.slots), Next: pool.Parts(gt.slots + 1),
	}
	switch {
	case gt.limit.Observe: // and keeps nobody from a slot
		d.Held = pool.Parts(min(gt.inFlight, gt.slots))
	case sh.waiting() > 0:
		d.Waiting = gt.waitingSources()
	case sh.missed > 0 || sh.missedOfLate(now):
		d.Waiting = 1
	}
	if sh.missed > 0 {
		sh.missed, sh.missedAt = 0, now
	}
	most := sh.peak.all()
	d.Want = pool.Parts(sh.peak.recent() + sh.waiting())
	d.Spare = pool.Parts(most+max(1, most/8)+sh.waiting()) - d.Want
	if sh.orphaned() { // none will come
		d.Name, d.Want, d.Spare = sh.name, d.Held, 0
	}
	return d
}

// heldParts returns the parts that are in use. When the maximum of an adaptive limit falls, those in flight need more of them
// than were given; but to say so would get this host more slots when it rises again. What they need at the operator's
// maximum is what must be told.
func (sh *poolShare) heldParts(ld *lending, pool shaper.SlotPool) uint32 {
	gt, most := sh.gate, pool
	if !pool.Lent {
		return pool.Parts(gt.inFlight)
	}
	given, hot := ld.given[gt.key]
	if !hot {
		given = ld.terms.SlotsCold
	}
	most.Most = gt.limit.MaxConnections
	return min(pool.Parts(gt.inFlight), max(given, most.Parts(gt.inFlight)))
}

// missedOfLate reports whether connections were refused in the last second before the current report: who is refused
// comes again, and would never get a slot that several hosts want if it stopped waiting in between.
func (sh *poolShare) missedOfLate(now leaky.Time) bool {
	return sh.missedAt != 0 && now < sh.missedAt+leaky.Second
}

// reload makes gates for the hot pools of the current policy. Until the next reset, new pools have only the slots
// that are never lent.
func (ld *lending) reload() {
	if fresh := !hasPools(ld.policy, ld.admission.policy); fresh != ld.fresh {
		ld.fresh = fresh
		ld.updateAll()
	}
	for k := range ld.given {
		ld.open(k)
	}
}

// hasPools reports whether all pools of p are also pools of was, which may be nil.
func hasPools(was, p *shaper.Policy) bool {
	for i := range p.Shared().All {
		if !p.Limit(i).HasPool() {
			continue
		}
		if was == nil || !was.CountsSameKeys(p) {
			return false
		}
		if j := was.IndexOf(p.State(i)); j < 0 || !was.Limit(j).HasPool() {
			return false
		}
	}
	return true
}

// close drops the gates that are only held.
func (ld *lending) close(now leaky.Time) {
	clear(ld.given)
	for _, gt := range ld.admission.byKey {
		if gt.lent != nil {
			gt.lent.hot, gt.lent.listed = false, false
			ld.admission.dropUnused([]*gate{gt}, now)
		}
	}
}

// SharesSlots reports whether connections or UDP flows are in flight that count for a shared limit.
func (p *Proxy) SharesSlots() (used bool) {
	p.home.loop.call(func(leaky.Time) {
		for _, gt := range p.home.admission.byKey {
			used = used || gt.lent != nil && gt.inFlight > 0
		}
	})
	return used
}

// gateKeyOf returns the key of the gate of a pool.
func gateKeyOf(k shaper.Key) shaper.Key {
	k.Limit++
	return k
}
