// Owner: the loop's thread.

package conn

import (
	"math/rand/v2"
	"slices"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/quota"
)

// ration is what a unit holds of the quota of a queue, from its turn there until it has left. So it counts as of that instant: what
// leaves later, from other queues, needs no more of it.
type ration struct {
	budget       *budget // the queue may have another one, or none, after a reload
	amount, turn uint64
}

// rationing is the result of ration.
type rationing uint8

const (
	rationTaken   rationing = iota
	rationPending           // a claim must be written first
	rationDenied            // the quota is used up
)

// ration takes what u, whose turn it is at h, needs of the quota there; a grant is made smaller if that is not there.
func (sc *scheduler) ration(h *hop, u *unit, now leaky.Time) rationing {
	b := h.budget
	need := u.bytes
	if b.Quota().Unit == quota.Packets {
		need = u.packets
	} else if u.most > 0 && !u.droppable { // a datagram leaves as a whole, whatever it holds of the queues before
		need = u.most
	}
	left := b.Left()
	switch {
	case h.slow != nil:
		return rationTaken
	case u.droppable && left > 0 && left < need && sc.slows(h.queue):
		need = left // the last of it: it may be the smaller part of a datagram
	case u.droppable && left < need || left == 0:
		return rationDenied
	case !u.droppable:
		need = min(need, left)
	}
	ready := b.Ready()
	if !u.droppable && ready >= min(need, minGrant) {
		need = min(need, ready)
	}
	if ready < need {
		if !u.droppable {
			need = min(need, minGrant)
		}
		b.Need(need)
		sc.quotas.want(b)
		if !slices.Contains(b.queues, h.queue) {
			b.queues = append(b.queues, h.queue)
		}
		until := leaky.Never
		if u.droppable {
			until = u.deadline(h.queue) + 1
		}
		sc.armTimer(h.queue, until) // booked units do not wait for the file
		u.delayedAt |= 1 << u.pos
		return rationPending
	}
	if u.rations == nil {
		u.rations = make([]ration, len(u.path))
	}
	u.rations[u.pos] = ration{b, need, b.Use(need)}
	if b.Quota().Unit == quota.Bytes {
		u.most = need
	}
	sc.quotas.want(b)
	return rationTaken
}

// settle returns what a unit did not need of its rations when so much of it has left.
func settle(rations []ration, bytes, packets uint64) {
	for _, r := range rations {
		b := r.budget
		if r.amount == 0 || b == nil {
			continue
		}
		used := bytes
		if b.Quota().Unit == quota.Packets {
			used = packets
		}
		if used < r.amount {
			b.Return(r.amount-used, r.turn)
		}
	}
}

// slows reports whether units of q pass slowly when its quota is used up.
func (sc *scheduler) slows(q *queue) bool {
	i := q.policy.IndexOf(q.state)
	return i >= 0 && q.policy.Limit(i).QuotaSlow > 0
}

// slowDown makes q slow while its quota is used up, if that is what its limit says.
func (sc *scheduler) slowDown(q *queue, now leaky.Time) {
	i := q.policy.IndexOf(q.state)
	if i < 0 {
		return
	}
	l := q.policy.Limit(i)
	sc.quotas.follow(q.budget, l, now)
	if isSlow := l.QuotaSlow > 0 && q.budget.Left() == 0; isSlow != (q.slow != nil) {
		sc.setSlow(q, l, isSlow, now)
	}
}

// setSlow makes q slow, or ends that. Its bucket keeps its backlog at a rate.
func (sc *scheduler) setSlow(q *queue, l *shaper.Limit, slow bool, now leaky.Time) {
	was := q.shape
	q.shape, q.slow = q.whole, nil
	if slow {
		shape := l.SlowShape(q.whole)
		q.shape, q.slow = &shape, &shape
	}
	if q.bucket.Rescale(was, q.shape, now); slow && l.Rate == 0 && l.Packets.N == 0 {
		q.bucket = leaky.Bucket{} // there was no rate
	}
	sc.reshaped(q, now)
}

// followQuota updates q to the quota of its limit, the i-th of its policy, which may have none now.
func (sc *scheduler) followQuota(q *queue, l *shaper.Limit, i int, now leaky.Time) {
	switch {
	case l.HasUnitQuota() && q.budget == nil:
		q.budget = sc.quotas.open(q.policy, i, q.key, now)
	case !l.HasUnitQuota() && q.budget != nil:
		sc.quotas.leave(q)
	}
	if q.slow != nil { // or reshape would see another shape than that of the limit
		sc.setSlow(q, l, false, now)
	}
}

// leave ends the use of its budget by q.
func (qs *quotas) leave(q *queue) {
	b := q.budget
	b.queues = slices.DeleteFunc(b.queues, func(o *queue) bool { return o == q })
	q.budget = nil
	qs.close(b)
}

// awaitsClaim reports whether connections wait at gt for a claim of its quota of them, or because that is used up. gt is
// dispatched when there is a claim.
func (gt *gate) awaitsClaim(now leaky.Time) bool {
	b := gt.budget
	if b == nil {
		return false
	}
	b.quotas.follow(b, gt.limit, now)
	b.quotas.want(b)
	if b.Ready() > 0 {
		return false
	}
	if !slices.Contains(b.gates, gt) {
		b.gates = append(b.gates, gt)
	}
	return true
}

// followQuota updates gt to the quota of its limit, the i-th of the policy, which may have none.
func (a *admission) followQuota(gt *gate, i int, now leaky.Time) {
	switch has := gt.limit.HasConnectionQuota(); {
	case has && gt.budget == nil:
		gt.budget = a.budgets.open(a.policy, i, gt.limitKey(), now)
	case !has:
		a.leaveQuota(gt)
	}
}

// leaveQuota ends the use of its budget by gt.
func (a *admission) leaveQuota(gt *gate) {
	if b := gt.budget; b != nil {
		b.gates = slices.DeleteFunc(b.gates, func(o *gate) bool { return o == gt })
		gt.budget = nil
		a.budgets.close(b)
	}
}

// returnTime is the time over which clients are told to come back when a quota can be used again.
const returnTime = 10 * time.Minute

// checkQuotas counts a connection under the limits whose quota is used up for it, and returns an enforced one of them which lets nothing
// pass then, and when it does again; or nil.
func (a *admission) checkQuotas(f *shaper.Flow, r shaper.Route, now leaky.Time) (_ *shaper.Limit, ends time.Duration) {
	for i := range (r.Limits() & a.policy.Quotas()).All {
		l := a.policy.Limit(i)
		if l.QuotaSlow > 0 || l.Observe {
			continue
		}
		key := a.policy.Key(i, f, r)
		if b := a.budgets.find(a.policy, i, key, now); b != nil && b.Left() == 0 {
			a.policy.State(i).Connections.Add(shaper.Refuse, shaper.QuotaUsed, 1)
			recordRefusal(a.shaper, a.policy.State(i), key, f.Source, now)
			return l, b.returnIn()
		}
	}
	return nil, 0
}

// returnIn is when a client of b, which is used up, is told to come back.
func (b *budget) returnIn() time.Duration {
	period := b.Quota().Period
	left := max(b.End().Sub(b.quotas.now(&period)), time.Second)
	return left + rand.N(min(left, returnTime))
}

// refuseUsedUp refuses the connections that wait at gt for a claim, when others have used the last of its quota.
func (a *admission) refuseUsedUp(gt *gate, now leaky.Time) {
	for q := gt.nextQueue(); q != nil && !q.paid; q = gt.nextQueue() {
		w := q.waiters.First()
		a.countRefusal(gt, w.precedence.class, shaper.QuotaUsed, w.flow.Source, now)
		a.outcomes = append(a.outcomes, outcome{w, refusal{limit: gt.limit, reason: shaper.QuotaUsed, retryAfter: gt.budget.returnIn()}})
		a.dequeue(w, now)
	}
}
