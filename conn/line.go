package conn

import (
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
// what first-in-first-out means, and limits whose keys nest are not affected.
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
	queued  bool
	next    *unit
}

// sender puts a unit on the wire. It returns what really left, and whether it
// wants to be submitted again.
type sender interface {
	send(now leaky.Time) (bytes, packets uint64, again bool)

	// resubmit is called for a unit that clear took out of its lines, when its
	// path may have changed.
	resubmit(now leaky.Time)
}

// line is the queue in front of one bucket, for as long as a flow needs it.
type line struct {
	key    shaper.Key
	limit  int
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
		l.limit, l.shape, l.state = i, shape, p.State(i)
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

// full returns the first line of path whose queue has no room for another unit
// at now, or nil.
func full(path []*line, now leaky.Time) *line {
	for _, l := range path {
		b := l.bucket
		b.Charge(l.shape, l.queuedBytes, l.queuedPackets, now)
		if b.Depart(l.shape, now)-now > l.shape.MaxDelay {
			return l
		}
	}
	return nil
}

// submit queues u, which must have a path. It may leave before submit returns.
func (ls *lines) submit(u *unit, now leaky.Time) {
	u.arrived, u.ready = now, now
	ls.enqueue(u)
	ls.run(now)
}

func (ls *lines) enqueue(u *unit) {
	u.pos, u.waited, u.queued = 0, 0, true
	for _, l := range u.path {
		l.queuedBytes += u.bytes
		l.queuedPackets += u.packets
	}
	ls.join(u)
}

// join puts u at the end of the line it has come to.
func (ls *lines) join(u *unit) {
	l := u.path[u.pos]
	u.next = nil
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
	if l.head = u.next; l.head == nil {
		l.tail = nil
	}
	l.holder = u
	if u.pos+1 < len(u.path) {
		u.pos++
		ls.join(u)
		return
	}
	ls.depart(u, now)
}

func (ls *lines) depart(u *unit, now leaky.Time) {
	for _, l := range u.path {
		l.holder = nil
		l.queuedBytes -= u.bytes
		l.queuedPackets -= u.packets
	}
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
			slack := max(l.shape.Bytes.Cost(bytes), l.shape.Packets.Cost(packets))
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
		ls.consider(l)
	}
	if again {
		// It was there all the time, so what is left of the lateness is its own.
		u.arrived, u.ready = now, last
		ls.enqueue(u)
	}
}

// withdraw takes u out of the lines it is in.
func (ls *lines) withdraw(u *unit, now leaky.Time) {
	if !u.queued {
		return
	}
	u.queued = false
	for i, l := range u.path {
		l.queuedBytes -= u.bytes
		l.queuedPackets -= u.packets
		switch {
		case i < u.pos:
			l.holder = nil
		case i == u.pos:
			l.remove(u)
		}
		ls.consider(l)
	}
	ls.run(now)
}

func (l *line) remove(u *unit) {
	var before *unit
	for at := l.head; at != u; at = at.next {
		before = at
	}
	if before == nil {
		l.head = u.next
	} else {
		before.next = u.next
	}
	if l.tail == u {
		l.tail = before
	}
	u.next = nil
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
		if a.arrived < b.arrived {
			return -1
		}
		return 1
	})
	for _, u := range units {
		u.next, u.queued = nil, false
	}
	return units
}

// swap puts policy in force at now. The lines must be empty; their buckets keep
// their backlogs.
func (ls *lines) swap(policy *shaper.Policy, now leaky.Time) {
	for _, l := range ls.byKey {
		if i := policy.Index(l.state); i >= 0 && policy.Shape(i) != l.shape {
			l.bucket.Rescale(l.shape, policy.Shape(i), now)
			l.limit, l.shape = i, policy.Shape(i)
		}
	}
	ls.shaper.Swap(policy, now)
}
