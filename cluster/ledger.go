package cluster

import (
	"maps"
	"slices"
	"strings"
)

// Ledger gives hosts their parts of buckets. Its rules are those of the script in package redis,
// statement for statement. The zero Ledger is ready to use. It is not safe for concurrent use.
//
// What it relies on is little: it may be restarted, lose its state or return to an old one, stand
// still, and have its clock set. Each of these begins a new epoch, in which all that was given before
// is unknown, and is treated as in use until the hosts have said what they use, or their leases must
// have ended.
type Ledger struct {
	// Run identifies the process that keeps the state: another one may have an old state.
	Run string

	state *state
}

// Constants of the rules.
const (
	backStep     = 20 * Millisecond // the largest step of the clock backwards that is ignored
	slowReply    = 50 * Millisecond // by which a host's age of a call may exceed the ledger's, besides the timeout
	spare        = Whole / 32       // kept for hosts that have nothing of a bucket yet
	eventPage    = 256              // maximum number of events in a reply
	maxBuckets   = 100_000          // hot ones
	knowledgeLag = 100 * Millisecond
)

// demoteAfter is how long no host wants more than its floor of a bucket before that is cold again.
func (p *Params) demoteAfter() Time { return 30 * p.Lease }

// Timeout is how long a host waits for a reply.
func (p *Params) Timeout() Time { return min(p.Lease/4, Second) }

// state is all that a ledger remembers.
type state struct {
	params     Params
	epoch      int64
	run        string
	born       Time // when the epoch began
	last       Time // of the last call
	settleAt   Time // from then on nothing is in use that the ledger does not know of
	version    int64
	generation int64
	members    map[string]*member
	buckets    map[string]*bucket
	log        eventLog
	gone       map[string]Gone // hosts that use nothing, by name: at most params.Hosts, and as many that are replaced
}

// member is a host that has called in this epoch.
type member struct {
	start, n   int64 // of its last call
	at         Time  // of its last call
	lag        Time  // see stoodStill, as of at
	born       Time  // of its first call
	gotAt      Time  // of the last call whose reply it is known to have taken; 0 is none
	gotN       int64
	gotLag     Time  // lag as of gotAt
	good       Time  // of the last of these that renewed its lease; 0 is none
	known      Time  // until then hosts may count it, and what it knows of buckets matters
	generation int64 // what it had with another one is void
	version    int64 // it knows all events up to this one

	counted   bool // it uses what it was given, and others count on that, while its lease lasts
	joined    bool // it has called with this epoch
	heard     bool // all that were counted when it joined have called since
	returning bool // it was gone, and others may count its part as their own
	claimed   bool // it came with leases of the epoch before
	claiming  bool // it has not told all of them yet
	over      bool // it came without any
	renewed   bool // its last call renewed the lease
	resync    bool // what it had is void, and it may not know
	told      bool // it has told all slots that it has

	digest uint64
	info   string
	marked map[string]struct{} // buckets of which it must give something back
}

// bucket is a hot bucket.
type bucket struct {
	slots   bool
	tickets bool

	// Of tickets.
	last    Time  // when the last unit that was sold leaves; 0 while some may not know that it is hot
	every   Time  // from one unit to the next, when it was sold
	turn    int64 // of the host that it was sold to
	version int64 // of its event
	wanted  Time  // when a host last wanted or had more than its floor
	holders map[string]*holder
}

// holder is what a host has of a bucket, and wants.
type holder struct {
	parts, want, weight int64

	// Of tickets.
	turn       int64 // who has the least is next
	at, every  Time  // of the last call that asked for some, and the time from one unit to the next there
	generation int64
}

// Call processes a call that arrives at now, by the ledger's clock.
func (l *Ledger) Call(now Time, q *Request) *Reply {
	lag := l.beginEpochIfNeeded(now, q)
	s := l.state
	s.run, s.last = l.Run, max(s.last, now)
	if reply := s.refuse(now, q); reply != nil {
		return reply
	}
	if q.Leave {
		return s.leave(q)
	}
	c := call{state: s, now: now, q: q, lag: lag, same: q.Epoch == s.epoch}
	c.meet()
	c.read()
	c.count()
	return c.reply()
}

// beginEpochIfNeeded forgets everything if the state may not be what was told to hosts: another
// process has it, or time has passed that the clock does not show. It returns the lag of stoodStill.
func (l *Ledger) beginEpochIfNeeded(now Time, q *Request) (lag Time) {
	s := l.state
	if s == nil {
		l.begin(now, q.Params, 0)
		return 0
	}
	lag, stood := s.stoodStill(now, q)
	if s.run != l.Run && !mutant("no-epoch") || now < s.last-backStep || now > s.last+s.params.Step && !mutant("clock-ahead") || stood {
		l.begin(now, s.params, s.epoch)
		lag = 0
	}
	// Hosts with other parameters are alone until the last one with these has gone.
	if s := l.state; q.Params != s.params && now >= s.born+s.params.expiry() && !s.hasMembers(now) {
		l.begin(now, q.Params, s.epoch)
		lag = 0
	}
	return lag
}

// stoodStill returns how much more time has passed for the caller than for the ledger, over its calls, and whether that
// is too much: both the ledger and its clock stood still, once or many times. What the calls take on their way adds up
// to no more than one of them takes. What comes of a clock of the caller that is some percent fast is forgotten in time.
func (s *state) stoodStill(now Time, q *Request) (lag Time, stood bool) {
	m := s.members[q.Host]
	if m == nil || m.start != q.Start || q.N <= m.n || q.Epoch != s.epoch || q.Got == 0 || mutant("stood-still") {
		return 0, false
	}
	at := m.at
	lag = m.lag
	if q.Got != m.n {
		if q.Got != m.gotN {
			return 0, false
		}
		at, lag = m.gotAt, m.gotLag
	}
	lag = max(0, max(0, lag-q.GotAge/12)+q.GotAge*98/100-(now-at))
	return lag, lag > s.params.Timeout()+slowReply
}

func (s *state) hasMembers(now Time) bool {
	for _, m := range s.members {
		if !s.expired(m, now) && !mutant("params-at-once") {
			return true
		}
	}
	return false
}

// runSalt spreads the numbers of epochs where the clock is behind: several processes may go on from the same old state.
func runSalt(run string) (salt int64) {
	for _, b := range []byte(run) {
		salt = (salt*31 + int64(b)) % (1 << 20)
	}
	return salt
}

// begin begins an epoch. It must not have the number of one that the state does not remember.
func (l *Ledger) begin(now Time, p Params, last int64) {
	l.state = &state{
		params: p, epoch: max(int64(now), last+1+runSalt(l.Run)), born: now, last: now, settleAt: now + p.quarantine(),
		log:     newEventLog(),
		members: map[string]*member{}, buckets: map[string]*bucket{}, gone: map[string]Gone{},
	}
	switch {
	case mutant("no-quarantine"):
		l.state.settleAt = now
	case mutant("quarantine-without-step"):
		l.state.settleAt -= 2 * p.Step
	case mutant("quarantine-without-drain"):
		l.state.settleAt -= p.Step
	case mutant("repeated-epoch"):
		l.state.epoch = last + 1
	}
}

// refuse returns the reply to a call that must not be processed, or nil.
func (s *state) refuse(now Time, q *Request) *Reply {
	reply := &Reply{N: q.N, Start: q.Start, Epoch: s.epoch}
	m := s.members[q.Host]
	last, known := s.gone[q.Host]
	known = known && !last.Replaced()
	last.Start = last.lastStart()
	if m != nil {
		last.Start, last.N, known = m.start, m.n, true
	}
	switch {
	case q.Params != s.params && !mutant("any-params"):
		reply.Refused, reply.Params = RefusedParams, s.params
	case (q.Start < last.Start || q.Start == last.Start && q.N <= last.N) && !mutant("old-calls"):
		reply.Refused, reply.Latest = RefusedOld, last.Start
	case m != nil && q.Epoch != s.epoch && !s.expired(m, now) && (m.joined && q.Start == m.start || q.Epoch != 0 && q.Start != m.start):
		reply.Refused = RefusedMoved
	case q.Leave && q.Epoch != s.epoch: // a call of long ago, perhaps: the host may have joined elsewhere since
		reply.Refused = RefusedMoved
	case known || q.Left && q.Leave:
		return nil
	case q.Left && now < s.settleAt:
		reply.Refused = RefusedUnsettled
	case s.places(now) >= s.params.Hosts && (q.Leave || s.countGone() == 0):
		reply.Refused = RefusedTooMany
	default:
		return nil
	}
	return reply
}

// expired reports whether what m had is given to others.
func (s *state) expired(m *member, now Time) bool {
	if mutant("short-regrant") {
		return now >= m.at+s.params.Lease/2
	}
	return now >= m.at+s.params.expiry()
}

// live reports whether hosts count m at now.
func (s *state) live(m *member, now Time) bool {
	if mutant("good-from-request") {
		return m.counted && m.good != 0 && now < m.at+s.params.Lease
	}
	return m.counted && m.good != 0 && now < m.good+s.params.Lease
}

// heardByAll is the version up to which all hosts know the events that will not have to learn all of them again.
func (s *state) heardByAll(now Time) int64 {
	version := s.version
	for _, m := range s.members {
		if !s.expired(m, now) {
			version = min(version, m.version)
		}
	}
	return version
}

// knownByAll is the version up to which all hosts but one know the events that are or were counted: they
// do not use the floor of such a hot bucket.
func (s *state) knownByAll(but string, now Time) int64 {
	version := s.version
	for name, m := range s.members {
		if name != but && now < m.known {
			version = min(version, m.version)
		}
	}
	return version
}

// leave makes the caller one that is gone: it uses nothing since before it called.
func (s *state) leave(q *Request) *Reply {
	if s.members[q.Host] != nil || !q.Left && !s.gone[q.Host].Replaced() { // otherwise it had no place
		s.gone[q.Host] = Gone{q.Host, q.Start, q.N}
	}
	delete(s.members, q.Host)
	return &Reply{N: q.N, Start: q.Start, Epoch: s.epoch, Live: s.countLive(s.last)}
}

// Forget makes a host one that is gone, as an operator says that it does not exist, nor another one
// in its place. It reports false if the host has called recently, or may have called the ledger of
// the epoch before, or there are Params.Hosts others.
func (l *Ledger) Forget(now Time, host string) bool {
	s := l.state
	if s == nil || s.run != l.Run || now < s.last-backStep || now > s.last+s.params.Step || now < s.settleAt && !mutant("forget-unsettled") {
		return false
	}
	m := s.members[host]
	switch {
	case m != nil && (!s.expired(m, now) || now < m.known) && !mutant("forget-counted"):
		return false
	case m != nil:
		delete(s.members, host)
		s.gone[host] = Gone{host, m.start, m.n}
	case s.gone[host] != Gone{}:
	case s.places(now) >= s.params.Hosts:
		return false
	default:
		s.gone[host] = Gone{Host: host}
	}
	return true
}

// places is the number of hosts that have a place: the members, and those that are gone. Whoever called
// once and has never heard of this epoch is no member for longer than its call might be on its way: it
// may have left since.
func (s *state) places(now Time) int {
	maps.DeleteFunc(s.members, func(_ string, m *member) bool { return !m.joined && s.expired(m, now) })
	return len(s.members) + s.countGone()
}

func (s *state) isGone(host string) bool {
	g, gone := s.gone[host]
	return gone && !g.Replaced()
}

// countGone returns the number of hosts that are gone and have a place.
func (s *state) countGone() (n int) {
	for _, g := range s.gone {
		if !g.Replaced() {
			n++
		}
	}
	return n
}

// countLive returns the number of hosts that are counted, and of those that are gone. If another ledger
// may be alive, a host that is gone may have joined that.
func (s *state) countLive(now Time) int {
	live := 0
	if !s.params.Strict || mutant("gone-in-strict") {
		live = s.countGone()
	}
	for _, m := range s.members {
		if s.live(m, now) {
			live++
		}
	}
	return min(live, s.params.Hosts)
}

// goneList returns the hosts that are gone, and those that are replaced, by name.
func (s *state) goneList() []Gone {
	return slices.SortedFunc(maps.Values(s.gone), func(a, b Gone) int { return strings.Compare(a.Host, b.Host) })
}

// demote makes a bucket cold if no host has more than its floor, or wants it.
func (s *state) demote(key string, b *bucket, now Time) {
	if now < s.settleAt || now < b.wanted+s.params.demoteAfter() || b.slots && !s.allTold(now) {
		return
	}
	for _, h := range b.holders {
		if floor := s.params.Floor(); h.parts > floor || h.want > floor {
			return
		}
	}
	delete(s.buckets, key)
	s.version++
	s.log.addCold(key, s.version, s.heardByAll(now))
}
