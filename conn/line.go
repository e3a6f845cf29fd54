package conn

import (
	"cmp"
	"slices"

	"shaperd/leaky"
	"shaperd/shaper"
)

// unit is something that leaves in one piece: a datagram, or the next grant of a
// TCP direction.
//
// It passes the lines of its path in order, the most specific first. In each it
// queues; at the head, when the bucket lets it go, it holds the line and queues
// in the next. From the last it leaves, and all buckets are charged with what
// really left, at that instant. So every bucket's output keeps to its own
// envelope whatever the others do, and a unit waits in one place. As all units
// pass lines in the same order, holding cannot deadlock.
//
// The price is that a line stands still while its head waits in a later one:
// traffic of the same key that would not have met that line waits too. It is
// what first-in-first-out means. Limits of which one matches no more and splits no
// less than the other are not affected.
type unit struct {
	owner   sender
	path    []*line
	pos     int
	waited  shaper.Set // positions in path at which it had to wait
	arrived leaky.Time
	ready   leaky.Time // since when lateness counts; before arrived for one that comes again
	bytes   uint64     // expected; a TCP grant may move less
	packets uint64
	credit  uint64 // units of lateness that are given back

	droppable  bool // refused by a line whose queue is full
	queued     bool
	next, prev *unit // in the line at pos
}

// sender puts a unit on the wire. It returns what really left, and whether it
// wants to be submitted again.
type sender interface {
	send(now leaky.Time) (bytes, packets uint64, again bool)

	// resubmit is called for a unit that clear took out of its lines, when its
	// path may have changed.
	resubmit(now leaky.Time)

	// refused is called for a droppable unit that has no place in a line.
	refused(by *line)
}

// line is the queue in front of one bucket, for as long as a flow needs it.
type line struct {
	key    shaper.Key
	shape  *leaky.Shape
	state  *shaper.State
	bucket leaky.Bucket
	refs   int

	head, tail    *unit
	holder        *unit // past the head of this line, waiting in a later one
	queuedBytes   uint64
	queuedPackets uint64
	event         leaky.Event
	pending       bool // in lines.work
}

// lines are the queues in use. They belong to the loop's thread.
type lines struct {
	shaper *shaper.Shaper
	wheel  *leaky.Wheel
	clock  func() leaky.Time
	byKey  map[shaper.Key]*line
	work   []*line // whose heads may be able to move
	busy   bool    // run is at work
}

func newLines(s *shaper.Shaper, w *leaky.Wheel, clock func() leaky.Time) *lines {
	return &lines{shaper: s, wheel: w, clock: clock, byKey: map[shaper.Key]*line{}}
}

// path returns the lines that a flow's units pass under set, in order. Limits
// without a rate, and those that only observe, have none.
func (ls *lines) path(p *shaper.Policy, f *shaper.Flow, r shaper.Route, set shaper.Set) []*line {
	var path []*line
	for i := range set.All {
		shape := p.Shape(i)
		if p.Limit(i).Observe || shape.Bytes.Unlimited() && shape.Packets.Unlimited() {
			continue
		}
		key := p.Key(i, f, r)
		l := ls.byKey[key]
		if l == nil {
			l = &line{key: key, bucket: ls.shaper.CheckOut(key)}
			l.event.Fire = func(now leaky.Time) { ls.consider(l); ls.run(now) }
			ls.byKey[key] = l
		}
		l.shape, l.state = shape, p.State(i)
		l.refs++
		path = append(path, l)
	}
	return path
}

// release gives back a path.
func (ls *lines) release(path []*line, now leaky.Time) {
	for _, l := range path {
		if l.refs--; l.refs == 0 {
			ls.wheel.Cancel(&l.event)
			delete(ls.byKey, l.key)
			ls.shaper.CheckIn(l.key, l.bucket, now)
		}
	}
}

// full reports whether the queue of l has no room for another unit at now.
func (l *line) full(now leaky.Time) bool {
	b := l.bucket
	b.Charge(l.shape, l.queuedBytes, l.queuedPackets, now)
	return b.Depart(l.shape, now)-now > l.shape.MaxDelay
}

// submit queues u, which must have a path. It may leave, or be refused, before
// submit returns.
func (ls *lines) submit(u *unit, now leaky.Time) {
	u.arrived, u.ready = now, now
	ls.enqueue(u, now)
	ls.run(now)
}

func (ls *lines) enqueue(u *unit, now leaky.Time) {
	u.pos, u.waited, u.queued = 0, 0, true
	ls.join(u, now)
}

// join puts u at the end of the line it has come to. It counts there, and not in
// the later ones: what is held up here takes no room from others there.
func (ls *lines) join(u *unit, now leaky.Time) {
	l := u.path[u.pos]
	if u.droppable && l.full(now) {
		u.queued = false
		ls.leave(u, u.pos)
		u.owner.refused(l)
		return
	}
	l.queuedBytes += u.bytes
	l.queuedPackets += u.packets
	u.prev, u.next = l.tail, nil
	if l.head == nil {
		l.head = u
	} else {
		l.tail.next = u
	}
	l.tail = u
	if l.head != u || l.holder != nil {
		u.waited |= 1 << u.pos
	}
	ls.consider(l)
}

// leave lets the next ones have the first n lines of u, which u held.
func (ls *lines) leave(u *unit, n int) {
	for _, l := range u.path[:n] {
		l.holder = nil
		l.queuedBytes -= u.bytes
		l.queuedPackets -= u.packets
		ls.consider(l)
	}
}

func (ls *lines) consider(l *line) {
	if !l.pending {
		l.pending = true
		ls.work = append(ls.work, l)
	}
}

// run moves heads until none can.
func (ls *lines) run(now leaky.Time) {
	if ls.busy {
		return
	}
	ls.busy = true
	for len(ls.work) > 0 {
		l := ls.work[len(ls.work)-1]
		ls.work = ls.work[:len(ls.work)-1]
		l.pending = false
		ls.serve(l, now)
	}
	ls.busy = false
}

// serve moves the head of l as far as it may go at now.
func (ls *lines) serve(l *line, now leaky.Time) {
	u := l.head
	if u == nil || l.holder != nil {
		return
	}
	if at := l.bucket.Depart(l.shape, now); at > now {
		u.waited |= 1 << u.pos
		ls.wheel.Schedule(&l.event, at)
		return
	}
	l.remove(u)
	l.holder = u
	if u.pos+1 < len(u.path) {
		u.pos++
		ls.join(u, now)
		return
	}
	ls.depart(u, now)
}

func (ls *lines) depart(u *unit, now leaky.Time) {
	ls.leave(u, len(u.path))
	u.queued = false
	path, arrived, ready, waited, credit := u.path, u.arrived, u.ready, u.waited, u.credit
	bytes, packets, again := u.owner.send(now)
	if bytes|packets != 0 {
		// The thread may have been held up since now was read, and the unit left
		// later than that: charged to the earlier instant, more would follow it
		// than the rate allows.
		now = ls.clock()
	}
	var last leaky.Time
	for i, l := range path {
		if bytes|packets != 0 {
			ofBytes, ofPackets := l.shape.Cost(bytes, packets)
			slack := max(ofBytes, ofPackets)
			charged := leaky.Late(ready, now, leaky.Time(credit)*slack)
			l.bucket.Charge(l.shape, bytes, packets, charged)
			last = max(last, charged)
			verdict, reason := shaper.Pass, shaper.None
			if waited&(1<<i) != 0 {
				verdict, reason = shaper.Delay, shaper.ByRate
				l.state.Queue.Observe((now - arrived).Duration())
			}
			l.state.Bytes.Add(verdict, reason, bytes)
			l.state.Packets.Add(verdict, reason, packets)
		}
	}
	if again {
		// It was there all the time, so what is left of the lateness is its own.
		u.arrived, u.ready = now, last
		ls.enqueue(u, now)
	}
}

// withdraw takes units out of the lines they are in, and only then lets others
// move.
func (ls *lines) withdraw(now leaky.Time, units ...*unit) {
	for _, u := range units {
		if !u.queued {
			continue
		}
		u.queued = false
		l := u.path[u.pos]
		l.remove(u)
		l.queuedBytes -= u.bytes
		l.queuedPackets -= u.packets
		ls.consider(l)
		ls.leave(u, u.pos)
	}
	ls.run(now)
}

// remove unlinks u, which stands in l.
func (l *line) remove(u *unit) {
	if u.prev == nil {
		l.head = u.next
	} else {
		u.prev.next = u.next
	}
	if u.next == nil {
		l.tail = u.prev
	} else {
		u.next.prev = u.prev
	}
	u.next, u.prev = nil, nil
}

// clear empties all lines and returns their units, the longest waiting first.
func (ls *lines) clear() []*unit {
	var units []*unit
	for _, l := range ls.byKey {
		for u := l.head; u != nil; u = u.next {
			units = append(units, u)
		}
		l.head, l.tail, l.holder, l.queuedBytes, l.queuedPackets = nil, nil, nil, 0, 0
		ls.wheel.Cancel(&l.event)
	}
	slices.SortStableFunc(units, func(a, b *unit) int {
		// Of those that came together, one that has got further is ahead.
		return cmp.Or(cmp.Compare(a.arrived, b.arrived), cmp.Compare(b.pos, a.pos))
	})
	for _, u := range units {
		u.next, u.prev, u.queued = nil, nil, false
	}
	return units
}

// swap puts policy in force at now. The lines must be empty; their buckets keep
// their backlogs.
func (ls *lines) swap(policy *shaper.Policy, now leaky.Time) {
	for _, l := range ls.byKey {
		if i := policy.Index(l.state); i >= 0 && policy.Shape(i) != l.shape {
			l.bucket.Rescale(l.shape, policy.Shape(i), now)
			l.shape = policy.Shape(i)
		}
	}
	ls.shaper.Swap(policy, now)
}
