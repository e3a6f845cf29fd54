package conn

import "shaperd.dev/shaperd/shaper"

// idle checks that no state is left.
func (r *admissionRig) idle() {
	r.t.Helper()
	if n := len(r.admission.byKey) + len(r.admission.queues) + len(r.admission.sources) + len(r.admission.outcomes); n != 0 {
		r.t.Errorf("%d gates, %d queues, %d sources and %d outcomes are left",
			len(r.admission.byKey), len(r.admission.queues), len(r.admission.sources), len(r.admission.outcomes))
	}
	if r.listener != nil && (len(r.listener.pools) != 0 || r.listener.poolQuota.waiting != 0 || r.listener.poolState.Waiting.Load() != 0) {
		r.t.Errorf("%d pools and %d waiters for them are left", len(r.listener.pools), r.listener.poolQuota.waiting)
	}
	for state, quota := range r.admission.quotas {
		if quota.waiting != 0 || len(quota.classes)+len(quota.sources) != 0 || state.InFlight.Load() != 0 || state.Waiting.Load() != 0 {
			r.t.Errorf("%s: %d waiting, %d in flight", state.Name, quota.waiting, state.InFlight.Load())
		}
	}
	if n := r.wheel.Len(); n != 0 {
		r.t.Errorf("%d events are left", n)
	}
}

// consistent checks that nothing waits for a free slot, and that queues, quotas and counts agree.
func (r *admissionRig) consistent() {
	waiting := map[*waitQuota]int{}
	for _, gt := range r.admission.byKey {
		if q := gt.nextQueue(); q != nil && (gt.limit.Observe || gt.exhausted(r.now) == shaper.None && !gt.reservedAgainst(q, q.precedence, false)) {
			r.t.Fatalf("%s: a connection waits for a free slot", gt.state.Name)
		}
		if gt.first() != nil && gt.exhausted(r.now) == shaper.ByNewConnections && !gt.timer.Scheduled() {
			r.t.Fatalf("%s: no timer is set for when the rate allows the next one", gt.state.Name)
		}
		here := 0
		for src := range gt.waiters() {
			n := 0
			for _, q := range queuesBelow(src) {
				if q.current().top() != src || q.gates[q.pos] != gt || q.len == 0 || !q.timeout.Scheduled() {
					r.t.Fatal("a queue is not where it should be")
				}
				for w := range q.waiters.All() {
					if w.queue != q || len(w.held) > 0 {
						r.t.Fatal("a waiter is in a queue other than its own, or holds slots while it waits")
					}
					n++
				}
			}
			if n == 0 || n != src.waiting || gt.sources[src.key] != src {
				r.t.Fatalf("a source with %d waiters has %d", src.waiting, n)
			}
			here += n
		}
		waiting[gt.quota] += here
		if gt.waiting != here {
			r.t.Fatalf("%d wait, of %d", here, gt.waiting)
		}
	}
	for state, quota := range r.admission.quotas {
		if quota.waiting != waiting[quota] || int(state.Waiting.Load()) != quota.waiting {
			r.t.Fatalf("%s: %d wait, %d are counted, %d shown", state.Name, waiting[quota], quota.waiting, state.Waiting.Load())
		}
		if i := r.admission.policy.IndexOf(state); quota.waiting > r.admission.policy.Limit(i).MaxQueue {
			r.t.Fatalf("%s: %d wait, more than may", state.Name, quota.waiting)
		}
	}
}

// queuesBelow returns the queues that wait at a gate, of a member there, after a check of what the members count.
func queuesBelow(src *gateSource) []*waitQueue {
	all := append([]*waitQueue{}, src.queues...)
	sum := 0
	for _, c := range src.below {
		if c.parent != src || c.waiting == 0 || c.gate != src.gate || c.lastServed > src.lastServed {
			panic("a member is where it does not belong")
		}
		sum += c.waiting
		all = append(all, queuesBelow(c)...)
	}
	if len(src.below) != len(src.crowds) || len(src.below) > 0 && (len(src.queues) > 0 || sum != src.waiting || src.crowds[0].waiting*len(src.below) < sum) {
		panic("members count wrong")
	}
	return all
}
