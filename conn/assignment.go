package conn

import (
	"math"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// assignment says which listeners have to be on one worker: those that have something in common, directly or through others. It
// is a partition of subjects, which are the workers that there are, home first, and the listeners that have none yet. What a worker
// has stays together.
type assignment struct {
	parent []int // of each subject; that of a representative is itself
	first  map[stateKey]int
}

// stateKey is what only one worker may have: what belongs to a limit, for all listeners or for one of them.
type stateKey struct {
	limit  uint32 // shaper.LimitState.ID
	origin uint16 // ID of a listener, or that of none; or anyOrigin
}

const anyOrigin = math.MaxUint16

// homeKey is for what belongs to the first worker: limits that hosts share, quotas, and penalties.
var homeKey = stateKey{limit: math.MaxUint32}

// add adds a subject, and returns its number.
func (as *assignment) add() int {
	as.parent = append(as.parent, len(as.parent))
	return len(as.parent) - 1
}

// find returns the representative of a subject: that of the lowest number.
func (as *assignment) find(subject int) int {
	for as.parent[subject] != subject {
		as.parent[subject] = as.parent[as.parent[subject]]
		subject = as.parent[subject]
	}
	return subject
}

// join makes two subjects be on one worker.
func (as *assignment) join(a, b int) {
	a, b = as.find(a), as.find(b)
	as.parent[max(a, b)] = min(a, b)
}

// claim records that a subject needs what k is of.
func (as *assignment) claim(subject int, k stateKey) {
	if as.first == nil {
		as.first = map[stateKey]int{}
	}
	if other, ok := as.first[k]; ok {
		as.join(subject, other)
	} else {
		as.first[k] = subject
	}
}

// claimAll records what the connections of a listener need under p. It does not matter which of them there are: of the match of a
// limit only the listeners count, since a connection may be to a port that the listener does not have any more. p need not have
// the listener.
func (as *assignment) claimAll(subject int, p *shaper.Policy, name string) {
	if p.Penalties() != 0 { // they block sources everywhere
		as.claim(subject, homeKey)
	}
	limits, id := p.AtListener(name)
	for i := range limits.All {
		l := p.Limit(i)
		if l.Shared || l.Quota.Amount > 0 {
			as.claim(subject, homeKey)
		}
		switch origin, keeps := stateOf(l); {
		case !keeps:
		case origin:
			as.claim(subject, stateKey{p.State(i).ID, id})
		default:
			as.claim(subject, stateKey{p.State(i).ID, anyOrigin})
		}
	}
}

// stateOf reports whether connections have anything in common under l, besides counters, and whether only those of one listener
// have.
func stateOf(l *shaper.Limit) (byListener, any bool) {
	switch {
	case l.Block || l.Shed.Any():
		return false, false
	case l.CountsConnections() && l.MaxQueue > 0 || l.Adapt != shaper.AdaptOff: // those that wait share max_queue over all keys
		return false, true
	case l.Key&shaper.KeyConnection != 0:
		return false, false
	}
	return l.Key&shaper.KeyListen != 0, true
}

// remains are what connections of listeners that are gone have of limits, and refused clients of theirs.
type remains struct {
	names map[string]bool // of the listeners
	keys  map[stateKey]bool
}

// survey returns what remains at w, and how many connections and flows it has.
func (w *worker) survey() (r remains, size int) {
	r.names, r.keys = map[string]bool{}, map[stateKey]bool{}
	keep := func(ln *listener, gates []*gate, paths ...[]hop) {
		r.names[ln.name] = true
		for _, gt := range gates {
			r.add(gt.key)
		}
		for _, path := range paths {
			for i := range path {
				r.add(path[i].key)
			}
		}
	}
	inBatches(w.loop, &w.sessions, func(s *session, _ leaky.Time) {
		if size++; !s.removed {
			return
		}
		keep(s.listener, s.slots.held, s.up.unit.path, s.down.unit.path)
		if s.turn != nil {
			keep(s.listener, s.turn.held)
		}
	})
	inBatches(w.loop, &w.flowList, func(f *udpFlow, _ leaky.Time) {
		if size++; f.listener.removed {
			keep(f.listener, f.slots.held, f.up.path, f.down.path)
		}
	})
	w.loop.call(func(now leaky.Time) {
		for k, l := range w.admission.returns {
			if l.end > now {
				r.add(k)
			}
		}
	})
	return r, size
}

// add adds the state of a bucket. Without a listener in its key it may be that of all, or that of the listeners that are gone.
func (r *remains) add(k shaper.Key) {
	id := k.Limit &^ 1 // of its new connections, too
	if k.Origin != 0 {
		r.keys[stateKey{id, k.Origin}] = true
		return
	}
	r.keys[stateKey{id, 0}], r.keys[stateKey{id, anyOrigin}] = true, true
}

// assign gives the new listeners of c their workers, of which it starts more if there may be, and finds the workers that have to become
// one. While c is on its way into effect the limits of both policies apply. So the listeners of both count.
func (c *change) assign() error {
	p, as := c.Proxy, &assignment{}
	subjects := map[*worker]int{}
	sizes := make([]int, len(p.workers))
	for i, w := range p.workers {
		subjects[w] = as.add()
		if i == 0 {
			as.claim(0, homeKey)
		}
		if p.maxLoops == 1 {
			break
		}
		old := p.shaper.Policy()
		has, size := w.survey()
		sizes[i] = size
		for k := range has.keys {
			as.claim(i, k)
		}
		listens := false
		for ln := range w.ownListeners() {
			listens = true
			has.names[ln.name] = true
		}
		for name := range has.names { // the connections of one that comes again are under its limits
			as.claimAll(i, old, name)
			as.claimAll(i, c.policy, name)
		}
		if !listens && size == 0 { // it ends
			as.join(0, i)
		}
	}
	var fresh []*listener
	numbers := map[*listener]int{}
	for _, ln := range c.ordered {
		if ln.proxy != nil {
			numbers[ln] = subjects[ln.proxy]
			continue
		}
		fresh = append(fresh, ln)
		numbers[ln] = as.add()
		as.claimAll(numbers[ln], c.policy, ln.name)
	}
	for key, l := range p.ports { // its connections go with it
		if to, ok := c.bindings[key]; ok {
			as.join(subjects[l.bound().proxy], numbers[to.listener])
		}
	}
	into := map[int]*worker{} // by representative
	for i, w := range p.workers {
		r := as.find(i)
		if at := into[r]; at == nil || at != p.home && sizes[i] > sizes[subjects[at]] {
			into[r] = w
		}
	}
	for i, w := range p.workers {
		if at := into[as.find(i)]; at != w {
			c.merges = append(c.merges, merge{from: w, into: at})
		}
	}
	return c.place(fresh, func(ln *listener) int { return as.find(numbers[ln]) }, into)
}

// place gives new listeners workers, by the representative of each. Those that need none of the workers that there are get one of their own,
// or else that which has the fewest listeners.
func (c *change) place(fresh []*listener, representative func(*listener) int, into map[int]*worker) error {
	load := map[*worker]int{}
	for _, ln := range c.ordered {
		if ln.proxy != nil {
			load[c.heir(ln.proxy)]++
		}
	}
	for _, ln := range fresh {
		if w := into[representative(ln)]; w != nil {
			ln.proxy = w
			load[w]++
		}
	}
	for _, ln := range fresh {
		if ln.proxy != nil {
			continue
		}
		r := representative(ln)
		if into[r] == nil {
			var err error
			if into[r], err = c.roomiest(load); err != nil {
				return err
			}
		}
		ln.proxy = into[r]
		load[ln.proxy]++
	}
	return nil
}

// heir returns the worker that has what w has now when c is in effect.
func (c *change) heir(w *worker) *worker {
	for _, m := range c.merges {
		if m.from == w {
			return m.into
		}
	}
	return w
}

// roomiest returns a worker without listeners, or starts one. If there may be no more, it returns that with the fewest.
func (c *change) roomiest(load map[*worker]int) (*worker, error) {
	p := c.Proxy
	var best *worker
	for _, w := range p.workers {
		if c.heir(w) == w && (best == nil || load[w] < load[best]) {
			best = w
		}
	}
	if load[best] == 0 || len(p.workers)-len(c.merges) >= p.maxLoops {
		return best, nil
	}
	w, err := p.addWorker()
	if err != nil {
		return nil, err
	}
	c.started = append(c.started, w)
	return w, nil
}
