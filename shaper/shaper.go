package shaper

import (
	"fmt"
	"sync"
	"sync/atomic"

	"shaperd.dev/shaperd/leaky"
)

// Shaper holds the current policy, the buckets and counters that outlive policies, and
// the rankings of talkers over all limits. It is safe for concurrent use: every decision
// is atomic, so concurrent ones admit exactly what sequential ones would.
type Shaper struct {
	policy      atomic.Pointer[Policy]
	talkers     talkers
	downstreams *names
	tlvNames    *tlvNames

	mu            sync.Mutex // protects all below
	table         *table
	states        map[string]*LimitState    // by name
	listeners     map[string]*ListenerState // by name
	attachmentIDs map[string]uint16         // by name
	classes       map[string]*ClassState    // by name
	bookings      [MaxLimits][2]leaky.Booking
	coldParts     uint32     // of shared limits, see SetCold
	coldSince     leaky.Time // when coldParts last changed
}

// New returns a shaper with an empty policy and capacity for the buckets of this many
// keys at once, at 80 bytes each.
func New(keys int) *Shaper {
	s := &Shaper{
		table:         newTable(keys),
		states:        map[string]*LimitState{},
		listeners:     map[string]*ListenerState{},
		attachmentIDs: map[string]uint16{},
		classes:       map[string]*ClassState{},
		downstreams:   &names{byName: map[string]uint16{}},
		tlvNames:      new(tlvNames),
	}
	empty, _ := s.Compile(nil, nil, nil, nil, false) // an empty policy is valid
	s.policy.Store(empty)
	return s
}

// Policy returns the current policy.
func (s *Shaper) Policy() *Policy { return s.policy.Load() }

// Swap makes next the current policy at now. Buckets of a limit persist by its name, even
// if it was absent for some policies; if its rate changed they keep their backlog in bytes
// and packets, and if it is shared also their credit. If a limit that only observed is
// enforced now, its backlogs are capped at its burst.
//
// It takes time proportional to the number of limits, not of buckets: each bucket is
// migrated when it is next used, or by [Shaper.Migrate].
func (s *Shaper) Swap(next *Policy, now leaky.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	changes := map[uint32]shareChange{}
	for i, state := range next.states {
		if last := s.table.limit(state.ID).whole; last != nil && *last != next.shapes[i] {
			state.Conformance.reset()
		}
		if state.histories != nil && next.limits[i].Algorithm.HasHistory() { // others convert what is left
			state.histories.follow(next.largestCount(i), now)
		}
		observe := next.limits[i].Observe
		s.planChange(changes, next, i, state.wasObserving && !observe, now)
		state.wasObserving = observe
	}
	s.table.startMigration(changes, now)
	for i, state := range next.states {
		s.migrateCalendars(next, i, state, now)
	}
	s.policy.Store(next)
}

// Migrate migrates up to a thousand buckets to the shapes of the current policy, which
// takes some 10 us. It reports whether there are more. The next Swap migrates all that
// remain.
func (s *Shaper) Migrate() (more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.table.migrateSome()
}

// IndexOf returns the index of the limit of p with a state, or -1.
func (p *Policy) IndexOf(state *LimitState) int {
	for i, st := range p.states {
		if st == state {
			return i
		}
	}
	return -1
}

// Observe is [Shaper.Decide] for bytes of a stream that have left, under limits that only
// observe. A stream is delayed and never refused, except by a limit that blocks.
func (s *Shaper) Observe(p *Policy, f *Flow, r Route, set Set, bytes uint64, now leaky.Time) Decision {
	if set&p.blocks != 0 {
		return s.Decide(p, f, r, set, bytes, 0, now)
	}
	d := Decision{Depart: now, Limit: -1}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range set.All {
		verdict, reason := Pass, None
		if p.paced&(1<<i) != 0 {
			key := p.Key(i, f, r)
			if depart := s.table.lookupOrInsert(&key, s.table.probe(&key), now).bucket.Observe(p.shapeAt(i, &key, r), bytes, 0, now); depart > now {
				verdict, reason = Delay, ByRate
				if depart > d.Depart {
					d = Decision{Verdict: Delay, Reason: ByRate, Depart: depart, Limit: i}
				}
			}
		}
		p.states[i].count(verdict, reason, bytes, 0)
	}
	return d
}

func (s *LimitState) count(v Verdict, r Reason, bytes, packets uint64) {
	s.Bytes.Add(v, r, bytes)
	s.Packets.Add(v, r, packets)
}

// CheckOut removes the bucket of k from the table at now and returns it to the caller,
// its only owner until CheckIn.
func (s *Shaper) CheckOut(k Key, now leaky.Time) leaky.Bucket {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.table.remove(&k, s.table.probe(&k), now)
}

// Peek returns the bucket of k at now, as in the table, and its share. It does not see a
// bucket that is checked out.
func (s *Shaper) Peek(k Key, now leaky.Time) (leaky.Bucket, leaky.Share) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.table.probe(&k)
	share := s.table.limit(k.Limit).shareOf(&k)
	if slot := s.table.lookup(&k, p); slot != nil {
		return slot.bucket, share
	}
	return s.table.newBucket(&k, p, now), share
}

// CheckIn returns a bucket to the table. One that has drained at now is dropped.
func (s *Shaper) CheckIn(k Key, b leaky.Bucket, now leaky.Time) {
	if b.Drained(now) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.table.add(&k, b, now)
}

// TableUsage is the fill level of the bucket table, and its evictions so far.
type TableUsage struct {
	Entries, Capacity                 int
	EvictedDrained, EvictedBacklogged uint64
}

// TableUsage returns the fill level of the bucket table.
func (s *Shaper) TableUsage() TableUsage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return TableUsage{
		Entries: s.table.entries, Capacity: len(s.table.slots),
		EvictedDrained: s.table.evictedDrained, EvictedBacklogged: s.table.evictedBacklogged,
	}
}

// state returns the state of the limit named name, which never changes.
func (s *Shaper) state(name string) *LimitState {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.states[name]
	if st == nil {
		st = &LimitState{Name: name, ID: uint32(2 * len(s.states))}
		s.states[name] = st
	}
	return st
}

// maxOrigins is the maximum number of names of listeners and attachments: their IDs, and
// those for neither, must fit in the 16 bits of a key. Names that are gone count, since
// they may still have connections.
const maxOrigins = 1<<16 - 8

// checkOrigins returns an error if there are not enough IDs for the listeners and attachments
// that are new.
func (s *Shaper) checkOrigins(listeners []Listener, attachments []Attachment) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.listeners) + len(s.attachmentIDs)
	for _, l := range listeners {
		if s.listeners[l.Name] == nil {
			n++
		}
	}
	for _, a := range attachments {
		if _, known := s.attachmentIDs[a.Name]; !known {
			n++
		}
	}
	if n > maxOrigins {
		return fmt.Errorf("too many names of listeners and attachments since the start: %d (maximum %d); restart the daemon", n, maxOrigins)
	}
	return nil
}

// Listener returns the state of the listener named name, which never changes.
func (s *Shaper) Listener(name string) *ListenerState {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.listeners[name]
	if st == nil {
		st = &ListenerState{Name: name, ID: uint16(len(s.listeners) + 1)}
		s.listeners[name] = st
	}
	return st
}

// AttachmentID returns the ID of the attachment named name in keys, which never changes.
func (s *Shaper) AttachmentID(name string) (id uint16) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, ok := s.attachmentIDs[name]
	if !ok {
		id = uint16(len(s.attachmentIDs) + 1)
		s.attachmentIDs[name] = id
	}
	return id
}
