package shaper

import (
	"fmt"
	"sync"
	"sync/atomic"

	"shaperd/leaky"
)

// Shaper holds the policy in force, and the buckets and counts that outlive
// policies, and knows who is heavy over all limits. It is safe for concurrent use: every decision is one step, so
// concurrent ones admit exactly what sequential ones would.
type Shaper struct {
	policy atomic.Pointer[Policy]
	who    who

	mu        sync.Mutex
	table     *table
	states    map[string]*State
	listeners map[string]*ListenerState
	attached  map[string]uint16 // IDs of attachments
	booked    [MaxLimits][2]leaky.Booking
}

// New returns a shaper with an empty policy and room for the buckets of so many
// keys at once, at 80 bytes each.
func New(keys int) *Shaper {
	s := &Shaper{
		table:     newTable(keys),
		states:    map[string]*State{},
		listeners: map[string]*ListenerState{},
		attached:  map[string]uint16{},
	}
	empty, _ := s.Compile(nil, nil, nil, nil, false) // nothing in it can be wrong
	s.policy.Store(empty)
	return s
}

// Policy returns the policy in force.
func (s *Shaper) Policy() *Policy { return s.policy.Load() }

// Swap puts next in force at now. The buckets of a limit that stays, by name, or
// that comes back, stay too; where its rate changed they keep their backlog in
// bytes and packets. A limit that only observed until now owes no more than its burst.
//
// It takes time by the number of limits, not of buckets: each follows when it is next used,
// or in [Shaper.Settle].
func (s *Shaper) Swap(next *Policy, now leaky.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	changes := map[uint32]reshape{}
	changed := func(id uint32, last **leaky.Shape, shape *leaky.Shape, enforce bool) {
		if *last != nil && (**last != *shape || enforce) {
			changes[id] = reshape{*last, shape, enforce}
		}
		*last = shape
		s.table.hold(id, shape)
	}
	for i, state := range next.states {
		if state.shape != nil && *state.shape != next.shapes[i] {
			state.Promise.restart()
		}
		observe := next.limits[i].Observe
		changed(state.ID, &state.shape, &next.shapes[i], state.observed && !observe)
		changed(state.ID+1, &state.newConns, &next.newConns[i], false)
		state.observed = observe
	}
	if len(changes) > 0 {
		s.table.reshape(changes, now)
	}
	for i, state := range next.states {
		s.swapCalendars(next, i, state, now)
	}
	s.policy.Store(next)
}

// Settle has some buckets, a thousand at most, follow what Swap changed, in some 10 us. It
// reports whether there are more. A Swap that comes before has to do all of them.
func (s *Shaper) Settle() (more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.table.settle()
}

// Index returns which limit of p has counted into state, or -1.
func (p *Policy) Index(state *State) int {
	for i, st := range p.states {
		if st == state {
			return i
		}
	}
	return -1
}

// Watch is [Shaper.Decide] for bytes of a stream that have left, under limits that only
// observe. A stream is held and not refused, so none of them refuses it, but for a block.
func (s *Shaper) Watch(p *Policy, f *Flow, r Route, set Set, bytes uint64, now leaky.Time) Decision {
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
			if depart := s.table.get(&key, s.table.place(&key), now).bucket.Watch(&p.shapes[i], bytes, 0, now); depart > now {
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

func (s *State) count(v Verdict, r Reason, bytes, packets uint64) {
	s.Bytes.Add(v, r, bytes)
	s.Packets.Add(v, r, packets)
}

// CheckOut takes the bucket of k out of the table at now and gives it to the caller,
// who is its only owner until CheckIn.
func (s *Shaper) CheckOut(k Key, now leaky.Time) leaky.Bucket {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.table.remove(&k, s.table.place(&k), now)
}

// Peek returns the bucket of k as it is in the table at now; one that is checked out is
// not.
func (s *Shaper) Peek(k Key, now leaky.Time) leaky.Bucket {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.table.place(&k)
	if slot := s.table.find(&k, at); slot != nil {
		return slot.bucket
	}
	return s.table.newcomer(&k, at, now)
}

// CheckIn gives a bucket back. One that has drained at now needs no place.
func (s *Shaper) CheckIn(k Key, b leaky.Bucket, now leaky.Time) {
	if b.Drained(now) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.table.place(&k)
	if slot := s.table.find(&k, at); slot != nil {
		slot.bucket.Merge(b)
		return
	}
	s.table.get(&k, at, now).bucket = b // it is known what it owes, so it inherits nothing
}

// Buckets tells how full the table of buckets is.
type Buckets struct {
	Entries, Capacity               int
	EvictedDrained, EvictedIndebted uint64
}

// Buckets returns how full the table of buckets is.
func (s *Shaper) Buckets() Buckets {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Buckets{
		Entries: s.table.entries, Capacity: len(s.table.slots),
		EvictedDrained: s.table.evictedDrained, EvictedIndebted: s.table.evictedIndebted,
	}
}

// state returns the state of the limit named name, the same for ever.
func (s *Shaper) state(name string) *State {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := s.states[name]
	if st == nil {
		st = &State{Name: name, ID: uint32(2 * len(s.states))}
		s.states[name] = st
	}
	return st
}

// maxPlaces is how many listeners and attachments can be told apart: their IDs, and those for
// neither, fit in the 16 bits of a key. Names that have gone count, as connections of theirs
// may be there.
const maxPlaces = 1<<16 - 8

// room reports whether there are IDs for those of listeners and attachments that are new.
func (s *Shaper) room(listeners []Listener, attachments []Attachment) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.listeners) + len(s.attached)
	for _, l := range listeners {
		if s.listeners[l.Name] == nil {
			n++
		}
	}
	for _, a := range attachments {
		if _, known := s.attached[a.Name]; !known {
			n++
		}
	}
	if n > maxPlaces {
		return fmt.Errorf("with these there have been %d names of listeners and attachments since the start, more than the %d that are told apart: it takes a restart", n, maxPlaces)
	}
	return nil
}

// Listener returns the state of the listener named name, the same for ever.
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

// Attachment returns what marks the attachment named name in keys, the same for
// ever.
func (s *Shaper) Attachment(name string) (id uint16) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, ok := s.attached[name]
	if !ok {
		id = uint16(len(s.attached) + 1)
		s.attached[name] = id
	}
	return id
}
