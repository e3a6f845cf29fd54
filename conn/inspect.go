package conn

import (
	"cmp"

	"shaperd/leaky"
	"shaperd/shaper"
)

// inspectTurn is how many connections are looked at before bytes have their turn.
const inspectTurn = 256

// Connections calls f for every TCP connection and UDP flow, on the caller's goroutine. They
// are looked at a few at a time, so that what they move is not held up: some may have
// ended by then, and those that come meanwhile are left out.
func (p *Proxy) Connections(f func(*shaper.ConnectionStatus)) {
	p.lists.Lock()
	defer p.lists.Unlock()
	p.listing++
	inspect(p.loop, &p.sessions, p.listing, (*session).inspect, f)
	inspect(p.loop, &p.flowList, p.listing, (*udpFlow).inspect, f)
	inspect(p.loop, &p.arrivals, p.listing, (*arrival).inspect, f)
}

func inspect[T enroller](l *loop, r *registry[T], listing uint64, look func(T, *shaper.ConnectionStatus, leaky.Time) bool, f func(*shaper.ConnectionStatus)) {
	var buffer [inspectTurn]shaper.ConnectionStatus
	at := toAll
	for n := len(buffer); n == len(buffer); {
		n = 0
		l.call(func(now leaky.Time) {
			for n < len(buffer) {
				x, ok := r.before(&at)
				if !ok {
					return
				}
				if e := x.enrolment(); e.shown != listing {
					e.shown = listing
					buffer[n] = shaper.ConnectionStatus{}
					if look(x, &buffer[n], now) {
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
	if s.stage == ended {
		return false
	}
	*c = shaper.ConnectionStatus{
		ID: s.flow.Connection, Protocol: shaper.TCP, Source: s.from, Listen: s.name, Port: s.flow.Port,
		Age:          now.Sub(s.begun).Duration(),
		ToDownstream: s.up.moved, FromDownstream: s.down.moved,
		Stage: [...]string{"waiting", "announcing", "connecting", "open", "ending"}[s.stage],
	}
	if s.to != nil {
		c.Downstream = s.to.address(s.flow.Port, s.samePort)
	}
	c.Idle = now.Sub(max(s.pace.active, s.begun)).Duration()
	held(c, s.account.total(s.up.unit.path, s.down.unit.path))
	switch {
	case s.waitsIn != nil:
		c.HeldBy = s.waitsIn.at().gate.state.Name
		c.Waited += s.waiting(now).Duration()
	default:
		waits(c, now, &s.up.unit, &s.down.unit)
	}
	return true
}

func (f *udpFlow) inspect(c *shaper.ConnectionStatus, now leaky.Time) bool {
	if f.proxy.flows[f.key] != f {
		return false
	}
	*c = shaper.ConnectionStatus{
		ID: f.flow.Connection, Protocol: shaper.UDP, Source: f.key.client, Listen: f.site.name, Port: f.flow.Port,
		Downstream: f.downstream.address(f.flow.Port, f.key.port.service.samePort), Stage: "open",
		Age: now.Sub(f.begun).Duration(), Idle: now.Sub(f.seen).Duration(),
		ToDownstream: f.up.moved, FromDownstream: f.down.moved,
	}
	held(c, f.account.total(f.up.path, f.down.path))
	if f.queued != nil {
		waits(c, now, &f.queued.unit)
	}
	return true
}

// held says for how long it has waited, and where for longest.
func held(c *shaper.ConnectionStatus, a account) {
	c.Waited = a.waited.Duration()
	if a.most != nil {
		c.HeldMost = a.most.Name
	}
}

// waits says which line holds one of units, if one does.
func waits(c *shaper.ConnectionStatus, now leaky.Time, units ...*unit) {
	for _, u := range units {
		if u.queued && len(u.path) > 0 && (u.booked || u.waited&(1<<u.pos) != 0) {
			c.HeldBy = u.heldBy().Name
			c.Waited += now.Sub(u.joined).Duration()
			return
		}
	}
}

// Kill ends a TCP connection, with a reset, or a UDP flow. It reports whether there was one
// of that ID.
func (p *Proxy) Kill(id uint64) (found bool) {
	p.loop.call(func(now leaky.Time) {
		s, isSession := p.sessions.byID[id]
		f, isFlow := p.flowList.byID[id]
		w, isArrival := p.arrivals.byID[id]
		switch found = isSession || isFlow || isArrival; {
		case isSession:
			s.cut(shaper.Killed, now)
		case isFlow:
			f.close(now)
		case isArrival:
			w.close(now)
		}
	})
	return found
}

// cut is abort for one who waits too.
func (s *session) cut(how shaper.Ending, now leaky.Time) {
	if s.stage == entering {
		s.gates.withdraw(&s.entrant, now)
		s.stage = leaving
	}
	s.abort(how, now)
}

// Buckets returns how the buckets of keys of limit i of the policy in force are doing.
func (p *Proxy) Buckets(i int, keys ...shaper.Key) []shaper.BucketState {
	all := make([]shaper.BucketState, len(keys))
	p.loop.call(func(now leaky.Time) {
		policy := p.shaper.Policy()
		if i >= policy.Len() {
			return
		}
		for n, k := range keys {
			all[n] = p.bucket(policy, i, k, now)
		}
	})
	return all
}

func (p *Proxy) bucket(policy *shaper.Policy, i int, k shaper.Key, now leaky.Time) (b shaper.BucketState) {
	shape, bucket := policy.Shape(i), p.shaper.Peek(k, now)
	if l := p.loop.lines.byKey[k]; l != nil {
		bucket = l.bucket
		b.Queued, b.QueuedBytes = l.streams+int(l.queuedPackets), l.queuedBytes
		bucket.Charge(shape, l.queuedBytes, l.queuedPackets, now)
	}
	b.NextIn = bucket.Depart(shape, now).Sub(now).Duration()
	b.BacklogBytes, b.BacklogPackets = bucket.Backlog(shape, now)
	k.Limit++
	shape, bucket = policy.NewConnections(i), p.shaper.Peek(k, now)
	if gt := p.gates.byKey[k]; gt != nil {
		p.gates.follow(gt)
		b.InFlight, b.Waiting, b.Reserved = gt.inFlight, gt.waiting, gt.keeps(nil, false)
		bucket = gt.bucket
		bucket.Charge(shape, 0, uint64(gt.waiting), now)
	}
	b.NewIn = bucket.Depart(shape, now).Sub(now).Duration()
	return b
}

// logAccess writes the access log's line of a connection, before what it holds is freed.
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
	if !f.site.config.Load().AccessLog {
		return
	}
	var c shaper.ConnectionStatus
	if f.inspect(&c, now) {
		f.proxy.logAccess(&c, shaper.Closed)
	}
}

func (p *Proxy) logAccess(c *shaper.ConnectionStatus, how shaper.Ending) {
	p.traffic.Info("access", "listener", c.Listen, "protocol", c.Protocol.String(), "source", c.Source,
		"asn", p.shaper.Policy().ASN(c.Addr()), "port", c.Port, "downstream", cmp.Or(c.Downstream, "none"),
		"to_downstream", c.ToDownstream, "from_downstream", c.FromDownstream,
		"seconds", c.Age.Seconds(), "waited", c.Waited.Seconds(), "held_most", cmp.Or(c.HeldMost, "none"), "ended", how.String())
}
