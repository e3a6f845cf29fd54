package conn

import (
	"cmp"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// inspectBatch is how many connections are inspected before bytes have their turn.
const inspectBatch = 256

// Connections calls f for every TCP connection and UDP flow, on the caller's goroutine. It inspects
// them in batches, so as not to delay traffic: some may have ended by then, and new ones are not
// included.
func (p *Proxy) Connections(f func(*shaper.ConnectionStatus)) {
	p.listMu.Lock()
	defer p.listMu.Unlock()
	p.lastListing++
	for merged := true; merged; { // what a merge has moved may not have been listed
		p.moving.RLock()
		workers := slices.Clone(p.workers)
		p.moving.RUnlock()
		for _, w := range workers {
			inspect(w, &w.sessions, p.lastListing, (*session).inspect, f)
			inspect(w, &w.flowList, p.lastListing, (*udpFlow).inspect, f)
			inspect(w, &w.pendingFlows, p.lastListing, (*pendingFlow).inspect, f)
		}
		p.moving.RLock()
		merged = slices.ContainsFunc(workers, func(w *worker) bool { return !slices.Contains(p.workers, w) })
		p.moving.RUnlock()
	}
}

func inspect[T registered](w *worker, r *registry[T], listing uint64, inspect1 func(T, *shaper.ConnectionStatus, leaky.Time) bool, f func(*shaper.ConnectionStatus)) {
	var buffer [inspectBatch]shaper.ConnectionStatus
	at := fromEnd
	for n := len(buffer); n == len(buffer); {
		n = 0
		w.call(func(now leaky.Time) {
			for n < len(buffer) {
				x, ok := r.prev(&at)
				if !ok {
					return
				}
				if e := x.entry(); e.listing != listing {
					e.listing = listing
					buffer[n] = shaper.ConnectionStatus{}
					if inspect1(x, &buffer[n], now) {
						n++
					}
				}
			}
		})
		for i := range n {
			f(&buffer[i])
		}
	}
}

// inspect fills in c, unless s has ended.
func (s *session) inspect(c *shaper.ConnectionStatus, now leaky.Time) bool {
	if s.stage == stageEnded {
		return false
	}
	*c = shaper.ConnectionStatus{
		ID: s.flow.Connection, Protocol: shaper.TCP, Source: s.clientAddr, Listen: s.name, Port: s.flow.Port,
		Age:          now.Sub(s.started).Duration(),
		ToDownstream: s.up.moved, FromDownstream: s.down.moved,
		Stage: [...]string{"waiting", "waiting", "proxy_header", "connecting", "open", "closing", "closing"}[s.stage],
	}
	c.Class = s.precedence.name()
	s.turns.fill(c)
	if s.downstream != nil {
		c.Downstream = s.downstream.address(s.flow.Port, s.samePort)
	}
	c.Idle = now.Sub(max(s.activity.lastActive, s.started)).Duration()
	setWaited(c, s.account.total(s.up.unit.path, s.down.unit.path))
	switch {
	case s.turn != nil && s.turn.queue != nil:
		c.ThrottledBy = s.turn.queue.current().gate.state.Name
		c.Waited += s.turn.waitTime(now).Duration()
	case s.queue != nil:
		c.ThrottledBy = s.queue.current().gate.state.Name
		c.Waited += s.waitTime(now).Duration()
	default:
		setThrottledBy(c, now, &s.up.unit, &s.down.unit)
	}
	return true
}

func (f *udpFlow) inspect(c *shaper.ConnectionStatus, now leaky.Time) bool {
	if f.proxy.flows[f.key] != f {
		return false
	}
	*c = shaper.ConnectionStatus{
		ID: f.flow.Connection, Protocol: shaper.UDP, Source: f.key.client, Listen: f.listener.name, Port: f.flow.Port,
		Downstream: f.downstream.address(f.flow.Port, f.key.port.binding.samePort), Stage: "open",
		Age: now.Sub(f.started).Duration(), Idle: now.Sub(f.lastActive).Duration(),
		ToDownstream: f.up.moved, FromDownstream: f.down.moved,
	}
	c.Class = f.slots.precedence.name()
	f.turns.fill(c)
	setWaited(c, f.account.total(f.up.path, f.down.path))
	if newest := f.queued.Last(); newest != nil {
		setThrottledBy(c, now, &newest.unit)
	}
	return true
}

// inspect fills in c, unless w was admitted or refused.
func (w *pendingFlow) inspect(c *shaper.ConnectionStatus, now leaky.Time) bool {
	if w.queue == nil {
		return false
	}
	*c = shaper.ConnectionStatus{
		ID: w.udp.flow.Connection, Protocol: shaper.UDP, Source: w.udp.key.client, Listen: w.udp.listener.name, Port: w.udp.flow.Port,
		Stage: "waiting", Age: now.Sub(w.started).Duration(), Idle: now.Sub(w.started).Duration(),
		ThrottledBy: w.queue.current().gate.state.Name, Class: w.precedence.name(),
	}
	setWaited(c, w.account)
	c.Waited += w.waitTime(now).Duration()
	return true
}

// setWaited sets the total wait, and the limit waited for the longest.
func setWaited(c *shaper.ConnectionStatus, a account) {
	c.Waited = a.waited.Duration()
	if a.longestAt != nil {
		c.MostlyThrottledBy = a.longestAt.Name
	}
}

// setThrottledBy sets the limit that delays one of units, if there is one.
func setThrottledBy(c *shaper.ConnectionStatus, now leaky.Time, units ...*unit) {
	for _, u := range units {
		if u.queued && len(u.path) > 0 && (u.booked || u.delayedAt&(1<<u.pos) != 0) {
			c.ThrottledBy = u.throttledBy().Name
			c.Waited += now.Sub(u.enqueuedAt).Duration()
			return
		}
	}
}

// Buckets returns the state of the buckets of keys under limit i of the current policy.
func (p *Proxy) Buckets(i int, keys ...shaper.Key) []shaper.BucketState {
	all := make([]shaper.BucketState, len(keys))
	p.eachWorker(func(w *worker, now leaky.Time) {
		policy := p.shaper.Policy()
		if i >= policy.Len() {
			return
		}
		w.loop.sharing.follow(now)
		for n, k := range keys {
			if w == p.home || w.uses(k) {
				all[n] = w.bucket(policy, i, k, now)
			}
		}
	})
	return all
}

// uses reports whether w has the queue or the gate of a bucket.
func (w *worker) uses(k shaper.Key) bool {
	_, queued := w.loop.scheduler.byKey[k]
	k.Limit++
	_, gated := w.admission.byKey[k]
	return queued || gated
}

func (p *worker) bucket(policy *shaper.Policy, i int, k shaper.Key, now leaky.Time) (b shaper.BucketState) {
	bucket, share := p.shaper.Peek(k, now)
	if q := p.loop.scheduler.byKey[k]; q != nil {
		p.loop.scheduler.refresh(q, now)
		bucket, share = q.current(now)
		b.Queued, b.QueuedBytes = q.grants+int(q.queuedPackets), q.queuedBytes
		bucket.Charge(&share.Shape, q.queuedBytes, q.queuedPackets, now)
	}
	b.Parts = share.Parts
	b.NextDeparture = share.Depart(&bucket, now).Sub(now).Duration()
	b.BacklogBytes, b.BacklogPackets = bucket.Backlog(&share.Shape, now)
	k.Limit++
	l := policy.Limit(i)
	if l.HasPool() {
		b.Slots = p.loop.sharing.lending.slotsOf(l, policy.State(i), k)
	} else if ad := p.admission.adapters[policy.State(i)]; ad != nil && ad.controller != nil {
		b.Slots = ad.controller.Limit()
	}
	bucket, share = p.shaper.Peek(k, now)
	nextAdmission := p.shaper.NextAdmission(policy, i, k, bucket, &share.Shape, now)
	if gt := p.admission.byKey[k]; gt != nil {
		p.admission.refresh(gt)
		b.InFlight, b.Waiting, b.Reserved = gt.inFlight, gt.waiting, gt.reservedAgainst(nil, precedence{}, false)
		_, share = gt.current(now)
		nextAdmission = gt.nextAdmission(gt.waiting, now)
	}
	b.NewParts = share.Parts
	if l.Quota.Amount > 0 {
		k.Limit--
		if budget := p.loop.quotas.find(policy, i, k, now); budget != nil {
			st := budget.status(l)
			b.Quota = &st
		}
	}
	if l.NewConnections.N > 0 {
		b.NextAdmission = nextAdmission.Sub(now).Duration()
	}
	return b
}

// current returns the bucket of b and its share.
func (b *pacing) current(now leaky.Time) (leaky.Bucket, leaky.Share) {
	if b.share != nil {
		return b.bucket, b.share.Share
	}
	return b.bucket, leaky.NewShare(b.shape, shaper.Whole, shaper.Whole, now)
}

// logAccess writes the access log record of a connection, before its state is freed.
func (s *session) logAccess(how shaper.Ending, now leaky.Time) {
	if !s.config.Load().AccessLog {
		return
	}
	var c shaper.ConnectionStatus
	if s.inspect(&c, now) {
		s.proxy.logAccess(&c, how)
	}
}

func (f *udpFlow) logAccess(now leaky.Time) {
	if !f.listener.config.Load().AccessLog {
		return
	}
	var c shaper.ConnectionStatus
	if f.inspect(&c, now) {
		f.proxy.logAccess(&c, shaper.Closed)
	}
}

func (p *Proxy) logAccess(c *shaper.ConnectionStatus, how shaper.Ending) {
	p.accessLog.Info("access", "listener", c.Listen, "protocol", c.Protocol.String(), "source", c.Source,
		"asn", p.shaper.Policy().ASN(c.Addr()), "port", c.Port, "downstream", cmp.Or(c.Downstream, "none"),
		"to_downstream", c.ToDownstream, "from_downstream", c.FromDownstream,
		"connect_seconds", c.Connect.Seconds(), "first_byte_seconds", c.FirstByte.Seconds(),
		"turns", c.Turns, "answering_seconds", c.Answering.Seconds(),
		"duration_seconds", c.Age.Seconds(), "waited_seconds", c.Waited.Seconds(), "mostly_throttled_by", cmp.Or(c.MostlyThrottledBy, "none"), "ended", how.String())
}
