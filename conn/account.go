package conn

import (
	"net/netip"

	"shaperd/leaky"
	"shaperd/shaper"
)

// tally is shaper.Tally in the loop's time.
type tally struct {
	bytes   uint64
	waited  leaky.Time
	dropped uint64
}

func (t tally) told() shaper.Tally {
	return shaper.Tally{Bytes: t.bytes, Waited: t.waited.Duration(), Dropped: t.dropped}
}

// account is what a flow has done that its paths do not know.
type account struct {
	begun   leaky.Time
	settled leaky.Time // when rankings were told last
	bytes   uint64     // that they were told of
	waited  leaky.Time // at gates, and in paths that were given back

	most     *shaper.State // at whose gate, or in whose line, it waited for longest
	mostTime leaky.Time
}

// tellEvery is how often a flow that moves tells the rankings what it did. Telling them
// of each unit would cost more than the unit.
const tellEvery = leaky.Second

// wait adds time spent in a line.
func (at *stop) wait(d leaky.Time) {
	at.did.waited += d
	at.waited += d
}

// wait adds time spent at a gate, or in a line.
func (a *account) wait(at *shaper.State, d leaky.Time) {
	a.waited += d
	if d > a.mostTime {
		a.most, a.mostTime = at, d
	}
}

// settle tells the rankings what a flow of source did since it last told them. bytes is
// what it moved so far.
func (a *account) settle(s *shaper.Shaper, source netip.Addr, bytes uint64, now leaky.Time, paths ...[]stop) {
	a.settled = now
	sum := tally{bytes: bytes - a.bytes}
	a.bytes = bytes
	for _, path := range paths {
		for i := range path {
			at := &path[i]
			if at.did == (tally{}) {
				continue
			}
			if !at.state.Keys.TryAdd(at.key, at.did.told(), now) {
				continue // the next time
			}
			sum.waited += at.did.waited
			sum.dropped += at.did.dropped
			at.did = tally{}
		}
	}
	if sum != (tally{}) {
		s.Note(source, sum.told(), now)
	}
}

// fold keeps what a path knows that is about to be given back.
func (a *account) fold(path []stop) {
	for i := range path {
		a.wait(path[i].state, path[i].waited)
	}
}

// total returns for how long the flow has waited altogether, and where for longest.
func (a *account) total(paths ...[]stop) account {
	all := *a
	for _, path := range paths {
		all.fold(path)
	}
	return all
}

// settle tells what s did, before its paths change or end.
func (s *session) settle(now leaky.Time) {
	s.account.settle(s.proxy.shaper, s.flow.Source, s.up.moved+s.down.moved, now, s.up.unit.path, s.down.unit.path)
}

// settle tells what f did, likewise.
func (f *udpFlow) settle(now leaky.Time) {
	f.account.settle(f.proxy.shaper, f.flow.Source, f.up.moved+f.down.moved, now, f.up.path, f.down.path)
}

// noteRefused tells that a connection of source was refused by a limit.
func noteRefused(s *shaper.Shaper, at *shaper.State, key shaper.Key, source netip.Addr, now leaky.Time) {
	did := shaper.Tally{Dropped: 1}
	at.Keys.TryAdd(key, did, now)
	s.Note(source, did, now)
}

// observe has the limits of set, which only observe, count a datagram, or bytes of a stream
// where packets is 0, and ranks its key under each by what would have become of it.
func (p *Proxy) observe(f *shaper.Flow, r shaper.Route, set shaper.Set, bytes, packets uint64, now leaky.Time) {
	policy := p.shaper.Policy()
	var would shaper.Decision
	if packets == 0 {
		would = p.shaper.Watch(policy, f, r, set, bytes, now)
	} else {
		would = p.shaper.Decide(policy, f, r, set, bytes, packets, now)
	}
	for i := range set.All {
		did := shaper.Tally{Bytes: bytes}
		if i == would.Limit {
			did.Waited = would.Depart.Sub(now).Duration()
		}
		if would.Verdict == shaper.Refuse {
			did.Bytes, did.Waited = 0, 0
			if i == would.Limit {
				did.Dropped = max(packets, 1)
			}
		}
		if did != (shaper.Tally{}) {
			policy.State(i).Keys.TryAdd(policy.Key(i, f, r), did, now)
		}
	}
}
