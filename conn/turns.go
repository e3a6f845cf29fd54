package conn

import (
	"container/heap"
	"encoding/binary"
	"net/netip"
	"slices"

	"shaperd/leaky"
	"shaperd/shaper"
)

// queue is the connections of one source that need the same gates, in the order they
// came. What shuts out one of them shuts out all, so they wait at one gate and move to
// another one together, in constant time however many they are.
//
// Turns at a gate go to the source that it let through longest ago, or that has waited
// longest if it let none through since: of two that wait, none goes twice while the other
// could go. Turns are numbered over all gates, so a queue that moves neither loses
// seniority nor gains any.
//
// What a release costs: in the order of turns it tries those who wait at the gates that it
// has freed a slot of, until they are full or nobody is left there. Who is tried goes on, or
// moves to the gate that shuts him out. Each move is to a later turn, so a queue makes at
// most as many as it has gates, and a later release finds it where it waits now.
type queue struct {
	key        string
	paid       bool      // all of it
	gates      []*gate   // all that it needs
	party      *party    // whose it is,
	sources    []*source // and at each of them
	stays      []stay    // likewise
	pos        int       // it waits at gates[pos],
	came       leaky.Time
	turn       uint64 // when it began to wait, or was served last
	head, tail *entrant
	len        int
	place      int         // in sources[pos].queues
	timeout    leaky.Event // of its head
	missed     leaky.Time  // when it was first its turn in vain, since it was served last, or 0
	claimed    uint64      // when it claimed a reservation, or 0
	reserved   leaky.Time  // since when it has one, or 0
	lapse      leaky.Event // of that
}

// stay is what a queue has to do with one of its gates.
type stay struct {
	queue  *queue
	waited leaky.Time    // for how long it has there,
	why    shaper.Reason // and why it did last
	missed bool          // it was its turn there in vain, since it was served last
	claim  uint64        // of the queue, or an earlier one,
	rank   int           // and where that is in gate.reserved.claims
	turn   uint64        // of the queue there, when what it has reserved was
}

// source is one source at one gate. It has one turn, however many queues it has: several
// ports may have several gates beside this one.
type source struct {
	addr   netip.Addr
	gate   *gate
	needed int                         // queues that need the gate, wherever they wait
	queues ranking[queue, byQueueTurn] // those that wait here
	served uint64                      // turn at which one was let through this gate
	len    int                         // connections that wait here
	place  int                         // in gate.turns,
	tenant *tenant                     // whose these are,
	index  int                         // and in its sources, when some do
}

// enqueue has e wait for the gates of list, of which list[i] is shut. When there is no room
// it takes the place of the newest waiter of the source with the most, unless that is its
// own.
func (g *gates) enqueue(e *entrant, list []*gate, i int, why shaper.Reason, now leaky.Time) {
	q := g.queue(e.takesTurnAs(), list, e.paid)
	if q.len > 0 {
		i = q.pos
	}
	if gt := list[i]; gt.room.waiting >= gt.rule.MaxWaiting {
		if longest := gt.room.longest; len(longest) == 0 || longest[0].len <= gt.room.has(q.sources[i].addr)+1 {
			g.refuse(e, gt, shaper.WaitingFull, now)
			if q.len == 0 {
				g.forget(q, now)
			}
			return
		}
		g.evict(gt.room, now)
	}
	if q.len == 0 {
		g.link(q, i, why, now)
	}
	e.waitsIn, e.prev, e.next = q, q.tail, nil
	e.before = make([]leaky.Time, len(list))
	for i := range e.before {
		e.before[i] = q.waited(i, now)
	}
	if q.tail = e; e.prev == nil {
		q.head = e
		g.arm(q)
	} else {
		e.prev.next = e
	}
	q.len++
	q.at().count(1)
}

// queue returns the queue of those of addr that need list, made if need be. Those that have paid
// have one of their own.
func (g *gates) queue(addr netip.Addr, list []*gate, paid bool) *queue {
	g.name = queueKey(g.name[:0], addr, list, paid)
	q := g.queues[string(g.name)]
	if q != nil {
		return q
	}
	g.turn++
	q = &queue{key: string(g.name), paid: paid, gates: list, party: g.parties[addr], stays: make([]stay, len(list)), turn: g.turn}
	if q.party == nil {
		q.party = &party{}
		g.parties[addr] = q.party
	}
	q.party.queues++
	q.timeout.Fire = func(now leaky.Time) { g.expire(q, now) }
	g.queues[q.key] = q
	for i, gt := range list {
		q.stays[i].queue = q
		src := gt.sources[addr]
		if src == nil {
			src = &source{addr: addr, gate: gt}
			if gt.sources == nil {
				gt.sources = map[netip.Addr]*source{}
			}
			gt.sources[addr] = src
		}
		src.needed++
		q.sources = append(q.sources, src)
	}
	return q
}

// forget ends q, which is empty.
func (g *gates) forget(q *queue, now leaky.Time) {
	g.renounce(q, now)
	delete(g.queues, q.key)
	if q.party.queues--; q.party.queues == 0 {
		delete(g.parties, q.at().addr)
	}
	for _, src := range q.sources {
		if src.needed--; src.needed == 0 {
			delete(src.gate.sources, src.addr)
		}
	}
	g.drop(q.gates, now)
}

// at is the source of q at the gate where it waits.
func (q *queue) at() *source { return q.sources[q.pos] }

// queueKey appends to b what tells the queue of a source that needs list.
func queueKey(b []byte, addr netip.Addr, list []*gate, paid bool) []byte {
	a := addr.As16()
	b = append(b, a[:]...)
	if paid {
		b = append(b, 'p') // the only key of an odd length
	}
	for _, gt := range list {
		b = binary.LittleEndian.AppendUint64(b, gt.id)
	}
	return b
}

// expire refuses those of q that have waited for longer than they may.
func (g *gates) expire(q *queue, now leaky.Time) {
	for q.len > 0 && q.deadline() <= now {
		g.refuse(q.head, q.at().gate, shaper.WaitTimeout, now)
	}
	g.run(now)
}

// deadline is when the head of q has waited for long enough. At limits it is counted from
// when it came, wherever it waited; for a downstream what it waits there.
func (q *queue) deadline() leaky.Time {
	from := q.head.since
	if gt := q.gates[q.pos]; gt.pool != nil {
		from = q.came - q.stays[q.pos].waited + q.head.before[q.pos]
	}
	return from + leaky.FromDuration(q.at().gate.rule.MaxWait)
}

func (g *gates) arm(q *queue) { g.wheel.Schedule(&q.timeout, q.deadline()) }

// waited is for how long q has waited at its i-th gate.
func (q *queue) waited(i int, now leaky.Time) leaky.Time {
	w := q.stays[i].waited
	if i == q.pos {
		w += now.Sub(q.came)
	}
	return w
}

// waiting is for how long e has waited in its queue.
func (e *entrant) waiting(now leaky.Time) (sum leaky.Time) {
	for i, before := range e.before {
		sum += e.waitsIn.waited(i, now) - before
	}
	return sum
}

// dequeue takes e out of its queue, and tells for how long it waited at which gates.
func (g *gates) dequeue(e *entrant, now leaky.Time) {
	q := e.waitsIn
	if w := e.waiting(now); w > 0 {
		g.shaper.Note(e.flow.Source, shaper.Tally{Waited: w.Duration()}, now)
	}
	for i, gt := range q.gates {
		if w := q.waited(i, now) - e.before[i]; w > 0 {
			e.wait(gt.state, w)
			gt.state.Keys.TryAdd(gt.ranked(), shaper.Tally{Waited: w.Duration()}, now)
		}
	}
	if e.next == nil {
		q.tail = e.prev
	} else {
		e.next.prev = e.prev
	}
	if e.prev != nil {
		e.prev.next = e.next
	} else if q.head = e.next; q.head != nil {
		g.arm(q)
	}
	e.waitsIn, e.next, e.prev, e.before = nil, nil, nil, nil
	q.len--
	q.at().count(-1)
	if q.len > 0 {
		return
	}
	g.unlink(q, now)
	g.wheel.Cancel(&q.timeout)
	g.forget(q, now)
}

// link has q wait at its i-th gate.
func (g *gates) link(q *queue, i int, why shaper.Reason, now leaky.Time) {
	gt, src := q.gates[i], q.sources[i]
	q.pos, q.came, q.stays[i].why = i, now, why
	heap.Push(&src.queues, q)
	if len(src.queues) == 1 {
		heap.Push(&gt.turns, src)
		gt.room.enter(src)
	} else {
		heap.Fix(&gt.turns, src.place)
	}
	src.count(q.len)
	if gt.full(now) == shaper.ByNew {
		g.await(gt, now)
	}
	if !gt.relief.Scheduled() && (gt.pool != nil || gt.flows != roster{}) {
		gt.relief.Fire = func(now leaky.Time) { g.relieve(gt, now) }
		g.wheel.Schedule(&gt.relief, now)
	}
}

// unlink ends the stay of q where it waits.
func (g *gates) unlink(q *queue, now leaky.Time) {
	gt, src := q.gates[q.pos], q.at()
	q.stays[q.pos].waited = q.waited(q.pos, now)
	q.came = now
	src.count(-q.len)
	heap.Remove(&src.queues, q.place)
	if len(src.queues) > 0 {
		heap.Fix(&gt.turns, src.place)
		return
	}
	heap.Remove(&gt.turns, src.place)
	gt.room.leave(src)
	if len(gt.turns) == 0 {
		g.wheel.Cancel(&gt.timer)
		g.wheel.Cancel(&gt.relief)
		gt.due = 0
	}
}

// count adds to the connections of s that wait.
func (s *source) count(n int) {
	s.len += n
	s.tenant.len += n
	s.gate.room.waiting += n
	s.gate.waiting += n
	s.gate.state.Waiting.Add(int64(n))
	heap.Fix(&s.tenant.sources, s.index)
	heap.Fix(&s.gate.room.longest, s.tenant.place)
}

// await has those at gt try again when its pace allows another connection.
func (g *gates) await(gt *gate, now leaky.Time) {
	gt.due = gt.bucket.Depart(gt.shape, now)
	g.wheel.Schedule(&gt.timer, gt.due)
}

// dispatchFreed is dispatch for what was reserved, and is not any more.
func (g *gates) dispatchFreed(now leaky.Time) {
	for len(g.freed) > 0 {
		list := g.freed
		g.freed = nil
		g.dispatch(list, now)
	}
}

// dispatch lets go on who waits at the gates of list and can, in the order of their turns.
func (g *gates) dispatch(list []*gate, now leaky.Time) {
	for {
		for _, gt := range list {
			g.reserve(gt, now)
		}
		var next *queue
		for _, gt := range list {
			if len(gt.turns) == 0 {
				continue
			}
			first, why := gt.first(), gt.full(now)
			if gt.rule.Observe || why == shaper.ByNew && first.paid {
				why = shaper.None
			}
			switch {
			case why == shaper.ByNew:
				g.await(gt, now)
			case why != shaper.None || gt.keeps(first, first.paid):
				gt.due = 0 // what waits for a slot is not late
			case next == nil || first.turnAt(first.pos) < next.turnAt(next.pos):
				next = first
			}
		}
		if next == nil {
			return
		}
		if i, why := next.shut(now); why != shaper.None {
			g.missed(next, now)
			g.move(next, i, why, now)
		} else {
			now = g.serve(next, now)
		}
	}
}

// shut returns which of its gates keeps q waiting, or None. One where others wait whose turn
// is earlier is shut as well: they are yet to be tried.
func (q *queue) shut(now leaky.Time) (int, shaper.Reason) {
	i, why := shut(q.gates, q, q.paid, now)
	if why != shaper.None {
		return i, why
	}
	for i, src := range q.sources {
		if turns := src.gate.turns; i != q.pos && len(turns) > 0 && turns[0].turn() < q.turnAt(i) {
			return i, shaper.ByConnections
		}
	}
	return 0, shaper.None
}

// move has q, whose turn it is, wait at its i-th gate from now on.
func (g *gates) move(q *queue, i int, why shaper.Reason, now leaky.Time) {
	g.unlink(q, now)
	g.link(q, i, why, now)
	g.arm(q)
	gt := q.gates[i]
	for gt.room.waiting > gt.rule.MaxWaiting {
		g.evict(gt.room, now)
	}
}

// serve lets the first connection of q through all its gates. It returns the time at which
// it did so.
func (g *gates) serve(q *queue, now leaky.Time) leaky.Time {
	if slices.ContainsFunc(q.gates, func(gt *gate) bool { return !gt.shape.Packets.Unlimited() }) {
		now = g.clock() // who leaves later than it is charged for is followed too soon
	}
	e := q.head
	for i, gt := range q.gates {
		why, ready, waited := shaper.None, now, q.waited(i, now)-e.before[i]
		if i == q.pos || waited > 0 {
			why = q.stays[i].why
		}
		if gt.due > 0 {
			ready = gt.due
		}
		gt.take(e.paid, why, waited, ready, now)
		if gt.reserved.queue != nil { // others may wait though it was free
			g.freed = append(g.freed, gt)
		}
	}
	g.turn++
	q.turn = g.turn
	heap.Fix(&q.at().queues, q.place)
	for _, src := range q.sources {
		src.served = g.turn
		if len(src.queues) > 0 {
			heap.Fix(&src.gate.turns, src.place)
		}
	}
	list := q.gates
	g.renounce(q, now)
	g.dequeue(e, now)
	g.pass(e, list, now)
	return now
}

// takesTurnAs is the source of which e is one.
func (e *entrant) takesTurnAs() netip.Addr {
	if e.stranger {
		return strangers
	}
	return turnAddr(e.flow.Source)
}

// turnAddr is the source that takes turns: an address, or what one IPv6
// subscriber has at least.
func turnAddr(a netip.Addr) netip.Addr {
	if a.Is4() {
		return a
	}
	return netip.PrefixFrom(a, 64).Masked().Addr()
}

// turn is when it is the turn of s.
func (s *source) turn() uint64 { return max(s.served, s.queues[0].turn) }

// byTurn has the source first whose turn it is.
type byTurn struct{}

func (byTurn) before(a, b *source) bool { return a.turn() < b.turn() }
func (byTurn) place(s *source) *int     { return &s.place }

// byQueueTurn is the same for the queues of a source.
type byQueueTurn struct{}

func (byQueueTurn) before(a, b *queue) bool { return a.turn < b.turn }
func (byQueueTurn) place(q *queue) *int     { return &q.place }
