package conn

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// Connection is how a TCP connection or UDP flow is doing.
type Connection struct {
	ID             uint64
	Protocol       shaper.Protocol
	Source         netip.AddrPort
	Listener       string
	Port           uint16 // that it asked for
	Downstream     string // "" while it has none
	Stage          string // "announcing", "waiting", "connecting", "open" or "ending"
	Age, Idle      time.Duration
	ToDownstream   uint64 // bytes
	FromDownstream uint64
	Waited         time.Duration // in queues and for slots
	HeldBy         string        // the limit it waits for now
	HeldMost       string        // the limit it has waited for longest
}

// inspectTurn is how many connections are looked at before bytes have their turn.
const inspectTurn = 256

// Connections calls f for every TCP connection and UDP flow, on the caller's goroutine. They
// are looked at a few at a time, so that what they move is not held up: some may have
// ended by then.
func (p *Proxy) Connections(f func(*Connection)) {
	var sessions []*session
	var flows []*udpFlow
	p.loop.call(func(leaky.Time) {
		sessions = make([]*session, 0, len(p.sessions))
		for s := range p.sessions {
			sessions = append(sessions, s)
		}
		flows = make([]*udpFlow, 0, len(p.flows))
		for _, f := range p.flows {
			flows = append(flows, f)
		}
	})
	inspect(p.loop, sessions, (*session).inspect, f)
	inspect(p.loop, flows, (*udpFlow).inspect, f)
}

func inspect[T any](l *loop, all []T, look func(T, *Connection, leaky.Time) bool, f func(*Connection)) {
	var buffer [inspectTurn]Connection
	for chunk := range slices.Chunk(all, inspectTurn) {
		n := 0
		l.call(func(now leaky.Time) {
			for _, one := range chunk {
				buffer[n] = Connection{}
				if look(one, &buffer[n], now) {
					n++
				}
			}
		})
		for i := range n {
			f(&buffer[i])
		}
	}
}

// inspect fills in c, unless s has ended.
func (s *session) inspect(c *Connection, now leaky.Time) bool {
	if s.stage == ended {
		return false
	}
	*c = Connection{
		ID: s.flow.Connection, Protocol: shaper.TCP, Source: s.from, Listener: s.name, Port: s.flow.Port,
		Age:          now.Sub(s.begun).Duration(),
		ToDownstream: s.up.moved, FromDownstream: s.down.moved,
		Stage: [...]string{"waiting", "announcing", "connecting", "open", "ending"}[s.stage],
	}
	if s.to != nil {
		c.Downstream = s.to.String()
	}
	c.Idle = now.Sub(max(s.pace.active, s.begun)).Duration()
	c.held(s.account.total(s.up.unit.path, s.down.unit.path))
	switch {
	case s.source != nil:
		c.HeldBy = s.source.gate.state.Name
		c.Waited += now.Sub(s.joined).Duration()
	default:
		c.waits(now, &s.up.unit, &s.down.unit)
	}
	return true
}

func (f *udpFlow) inspect(c *Connection, now leaky.Time) bool {
	if f.proxy.flows[f.key] != f {
		return false
	}
	*c = Connection{
		ID: f.flow.Connection, Protocol: shaper.UDP, Source: f.key.client, Listener: f.site.name, Port: f.flow.Port,
		Downstream: f.downstream.String(), Stage: "open",
		Age: now.Sub(f.begun).Duration(), Idle: now.Sub(f.seen).Duration(),
		ToDownstream: f.up.moved, FromDownstream: f.down.moved,
	}
	c.held(f.account.total(f.up.path, f.down.path))
	if f.queued != nil {
		c.waits(now, &f.queued.unit)
	}
	return true
}

func (c *Connection) held(a account) {
	c.Waited = a.waited.Duration()
	if a.most != nil {
		c.HeldMost = a.most.Name
	}
}

// waits says which line holds one of units, if one does.
func (c *Connection) waits(now leaky.Time, units ...*unit) {
	for _, u := range units {
		if u.queued && len(u.path) > 0 && u.waited&(1<<u.pos) != 0 {
			c.HeldBy = u.path[u.pos].state.Name
			c.Waited += now.Sub(u.joined).Duration()
			return
		}
	}
}

// Kill ends a TCP connection, with a reset, or a UDP flow. It reports whether there was one
// of that ID.
func (p *Proxy) Kill(id uint64) (found bool) {
	p.loop.call(func(now leaky.Time) {
		for s := range p.sessions {
			if s.flow.Connection == id {
				found = true
				s.kill(now)
				return
			}
		}
		for _, f := range p.flows {
			if f.flow.Connection == id {
				found = true
				f.close(now)
				return
			}
		}
	})
	return found
}

// kill is abort for one who waits too.
func (s *session) kill(now leaky.Time) {
	if s.stage == entering {
		s.gates.withdraw(&s.entrant, now)
		s.stage = leaving
	}
	s.abort(shaper.Killed, now)
}

// BucketState is how a bucket is doing.
type BucketState struct {
	BacklogBytes, BacklogPackets uint64        // charged and not drained
	Queued                       int           // units that wait in its line
	QueuedBytes                  uint64        // of datagrams
	NextIn                       time.Duration // when what joins the queue now would leave
	InFlight, Waiting            int           // connections of its key
}

// Bucket returns how the bucket of k, a key of limit i of the policy in force, is doing.
func (p *Proxy) Bucket(i int, k shaper.Key) (b BucketState) {
	p.loop.call(func(now leaky.Time) {
		policy := p.shaper.Policy()
		if i >= policy.Len() {
			return
		}
		shape := policy.Shape(i)
		bucket := p.shaper.Peek(k)
		if l := p.loop.lines.byKey[k]; l != nil {
			bucket = l.bucket
			b.Queued, b.QueuedBytes = l.streams+int(l.queuedPackets), l.queuedBytes
			bucket.Charge(shape, l.queuedBytes, l.queuedPackets, now)
		}
		b.NextIn = bucket.Depart(shape, now).Sub(now).Duration()
		b.BacklogBytes, b.BacklogPackets = bucket.Backlog(shape, now)
		k.Limit++
		if gt := p.gates.byKey[k]; gt != nil {
			b.InFlight, b.Waiting = gt.inFlight, gt.waiting
		}
	})
	return b
}

// Waits returns how long a new connection under limit i of the policy in force would wait
// for its turn in new_connections, if it is that of k.
func (p *Proxy) Waits(i int, k shaper.Key) (wait time.Duration) {
	p.loop.call(func(now leaky.Time) {
		policy := p.shaper.Policy()
		k.Limit++
		if i >= policy.Len() {
			return
		}
		shape := policy.NewConnections(i)
		bucket := p.shaper.Peek(k)
		if gt := p.gates.byKey[k]; gt != nil {
			bucket = gt.bucket
			bucket.Charge(shape, 0, uint64(gt.waiting), now)
		}
		wait = bucket.Depart(shape, now).Sub(now).Duration()
	})
	return wait
}

// logAccess writes the access log's line of a connection, before what it holds is freed.
func (s *session) logAccess(how shaper.Ending, now leaky.Time) {
	if !s.config.Load().AccessLog {
		return
	}
	var c Connection
	if s.inspect(&c, now) {
		s.proxy.logAccess(&c, how)
	}
}

func (f *udpFlow) logAccess(now leaky.Time) {
	if !f.site.config.Load().AccessLog {
		return
	}
	var c Connection
	if f.inspect(&c, now) {
		f.proxy.logAccess(&c, shaper.Closed)
	}
}

func (p *Proxy) logAccess(c *Connection, how shaper.Ending) {
	p.traffic.Info("access", "listener", c.Listener, "protocol", c.Protocol.String(), "source", c.Source,
		"asn", p.shaper.Policy().ASN(c.Source.Addr()), "port", c.Port, "downstream", cmp.Or(c.Downstream, "none"),
		"to_downstream", c.ToDownstream, "from_downstream", c.FromDownstream,
		"seconds", c.Age.Seconds(), "waited", c.Waited.Seconds(), "held_most", cmp.Or(c.HeldMost, "none"), "ended", how.String())
}
