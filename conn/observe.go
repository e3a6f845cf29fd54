// Owner: the loop's thread.

package conn

import (
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/topk"
)

// observe charges a datagram, or bytes of a stream if packets is 0, to the limits of set, which only
// observe. It ranks the key under each limit by what would have happened.
func (p *worker) observe(f *shaper.Flow, r shaper.Route, set shaper.Set, bytes, packets uint64, now leaky.Time) {
	policy := p.shaper.Policy()
	var would shaper.Decision
	if shared := set & policy.Shared(); shared != 0 {
		would = p.observeShared(policy, f, r, set, shared, bytes, packets, now)
	} else {
		would = p.decide(policy, f, r, set, bytes, packets, now)
	}
	for i := range (set & policy.Quotas()).All {
		p.loop.quotas.observe(policy, i, policy.Key(i, f, r), bytes, packets, now)
	}
	for i := range set.All {
		did := topk.Usage{Bytes: bytes}
		if i == would.Limit {
			did.Waited = would.Depart.Sub(now).Duration()
		}
		if would.Verdict == shaper.Refuse {
			did.Bytes, did.Waited = 0, 0
			if i == would.Limit {
				did.Dropped = max(packets, 1)
			}
		}
		if did != (topk.Usage{}) {
			policy.State(i).Keys.TryAdd(policy.Key(i, f, r), did, now)
		}
	}
}

// decide charges limits that hosts do not share.
func (p *worker) decide(policy *shaper.Policy, f *shaper.Flow, r shaper.Route, set shaper.Set, bytes, packets uint64, now leaky.Time) shaper.Decision {
	if packets == 0 {
		return p.shaper.Observe(policy, f, r, set, bytes, now)
	}
	return p.shaper.Decide(policy, f, r, set, bytes, packets, now)
}

// observeShared is decide for a set of which hosts share some. Their buckets are in queues without
// units, as long as they are used or hot.
func (p *worker) observeShared(policy *shaper.Policy, f *shaper.Flow, r shaper.Route, set, shared shaper.Set, bytes, packets uint64, now leaky.Time) shaper.Decision {
	sg := p.loop.sharing
	sg.follow(sg.clock())
	var queues [shaper.MaxLimits]*queue
	defer func() {
		for i := range shared.All {
			if queues[i] != nil {
				sg.scheduler.dropUnused(queues[i], now) // if too many are listed
			}
		}
	}()
	for i := range shared.All {
		q := sg.scheduler.queueFor(policy, i, policy.Key(i, f, r), now)
		queues[i] = q
		depart := q.depart(now)
		if depart > now {
			sg.wait(q.share, depart, now)
		} else {
			q.share.waitsSince = 0
		}
		if packets > 0 && depart-now > q.shape.MaxDelay {
			q.state.Bytes.Add(shaper.Refuse, shaper.QueueFull, bytes)
			q.state.Packets.Add(shaper.Refuse, shaper.QueueFull, packets)
			return shaper.Decision{Verdict: shaper.Refuse, Reason: shaper.QueueFull, Depart: depart, Limit: i}
		}
	}
	would := p.decide(policy, f, r, set&^shared, bytes, packets, now)
	if would.Verdict == shaper.Refuse {
		return would
	}
	for i := range shared.All {
		q := queues[i]
		depart := q.depart(now)
		if packets > 0 {
			q.bucket.Charge(q.shape, bytes, packets, now)
		} else {
			q.bucket.Observe(q.shape, bytes, 0, now)
		}
		sg.use(q.share, bytes, packets)
		verdict, reason := shaper.Pass, shaper.None
		if depart > now {
			verdict, reason = shaper.Delay, shaper.ByRate
			if depart > would.Depart {
				would = shaper.Decision{Verdict: verdict, Reason: reason, Depart: depart, Limit: i}
			}
		}
		q.state.Bytes.Add(verdict, reason, bytes)
		q.state.Packets.Add(verdict, reason, packets)
	}
	return would
}
