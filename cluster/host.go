package cluster

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// Host is what one host knows: what it may use of each bucket, and what to tell the ledger. It is in
// the group while it is leased; otherwise it is out, and uses what it had until its lease ends, then
// at most its floor, and when the others must know that it is away its floor.
//
// It is not safe for concurrent use. Its clock must not be set, and must count the time for which the
// machine is suspended: CLOCK_BOOTTIME.
type Host struct {
	HostOptions

	n          int64 // of the last call
	calling    bool  // its reply is awaited
	sentAt     Time  // of the last call
	claimSent  bool  // the last call claimed leases
	moreClaims bool  // and did not have room for all

	got       int64 // number of the last call whose reply was taken
	gotSentAt Time  // when it was sent
	renewedAt Time  // when the call was sent that renewed the lease

	epoch, known int64
	confirmed    int64 // what the ledger was told of known
	leased       bool
	claim        bool // the epoch has changed, and leases of the one before are to be claimed
	counted      bool
	live         int // hosts that are counted, this one included, and those that are gone
	gone         []Gone
	hot          map[string]*share // buckets that are hot
	asked        map[string]*share // buckets that were asked for, and are not known to be hot

	// While the host is out.
	leaseEnd Time
	floorAt  Time
	frozen   map[string]int64 // what it used of buckets that were hot
	joined   bool             // it has been in the group since it started
	joinedAt Time             // when it joined last
	absent   bool             // it uses nothing until it has joined: it had left, or there is no place for it
	leaving  bool             // it tells the ledger that it uses nothing any more

	problem   Refusal
	others    Params // of the ledger that refused ours
	infoOld   bool   // Info is to be told again
	differ    int
	changed   map[string]struct{} // buckets whose parts have changed since TakeChanges
	changeAll bool
}

// HostOptions are the settings of a host.
type HostOptions struct {
	Params Params
	Name   string // unique in the group
	Start  int64  // greater than that of the last start
	Alone  Alone
	Left   bool // it has left, and uses nothing until it has joined

	Digest uint64 // see Request
	Info   string

	// InUse reports whether a bucket that was cold is in use. Then its floor becomes parts of a hot
	// one, and is not taken away before others are asked.
	InUse func(key string) bool
}

// Alone is what a host uses when no ledger has answered for a while.
type Alone uint8

// The choices.
const (
	AloneShare  Alone = iota // its floor
	AloneClosed              // nothing
	AloneOpen                // the whole: all hosts together exceed the limit
)

// share is what a host knows of one bucket.
type share struct {
	version int64 // of the event that made it hot in this epoch; 0 is none
	parts   int64 // what the ledger gave, before it is scaled by the hosts that are counted
	held    int64 // the most that may still be in use
	unsure  bool  // what is in use may be more than the ledger knows of
	want    int64
	weight  int64
	toldIn  int64 // number of the call that told; 0 if it must be told

	short, tight bool // of the last grant
}

// NewHost returns a host that starts at now.
func NewHost(o HostOptions, now Time) *Host {
	h := &Host{
		HostOptions: o, hot: map[string]*share{}, asked: map[string]*share{}, changed: map[string]struct{}{},
		absent: o.Left, changeAll: true, infoOld: true,
	}
	h.leaseEnd, h.floorAt = now, now+h.lease()+h.grace()
	if mutant("fresh-floor") {
		h.floorAt = now
	}
	return h
}

// Joined reports whether the host is in the group.
func (h *Host) Joined() bool { return h.leased }

// SetInfo replaces [HostOptions.Digest] and Info. Information that does not fit into a call is not told.
func (h *Host) SetInfo(digest uint64, info string) {
	h.Digest, h.Info, h.infoOld = digest, info, true
}

// lease and grace allow for clocks that are 1 % fast or slow.
func (h *Host) lease() Time { return h.Params.Lease * 98 / 100 }

func (h *Host) grace() Time {
	if mutant("no-grace") {
		return 0
	}
	return h.Params.grace() * 102 / 100
}

// floor is what this host may use alone. If the ledger knows of more hosts, there are more.
func (h *Host) floor() int64 { return Whole / int64(max(h.Params.Hosts, h.others.Hosts)) }

// Want says which parts of a bucket the host would use, and its weight beside others that want more. A
// bucket with a key that no call may have stays cold.
func (h *Host) Want(key string, want, weight int64) {
	if !validKey(key) {
		return
	}
	b := h.hot[key]
	if b == nil {
		if b = h.asked[key]; b == nil {
			b = &share{}
			h.asked[key] = b
		}
	}
	b.want, b.weight, b.toldIn = want, min(weight, MaxWeight), 0
}

// Lower gives back what the host has of a bucket beyond parts.
func (h *Host) Lower(key string, parts int64) {
	if b := h.hot[key]; h.leased && b != nil && parts < b.parts {
		b.parts, b.toldIn = parts, 0
		h.changed[key] = struct{}{}
	}
}

// Request returns the next call, which is sent at now, and gives up on the last one. Of buckets for
// which unsettled returns true, more than their current parts may still be in use. unsettled may be
// nil.
func (h *Host) Request(now Time, unsettled func(key string) bool) *Request {
	h.endLease(now)
	if h.calling {
		h.askAgain()
	}
	h.n++
	h.calling, h.sentAt, h.claimSent = true, now, h.claim
	q := &Request{
		Params: h.Params, Host: h.Name, Start: h.Start, N: h.n,
		Got: h.got, GotAge: now - h.gotSentAt, Epoch: h.epoch, Leased: h.leased, Claim: h.claim,
		Over: !h.leased && now >= h.leaseEnd, Left: h.absent && !h.leased, Known: h.known, Digest: h.Digest,
	}
	if unsettled != nil {
		h.holdBack(q, unsettled)
	}
	h.confirmed = max(h.confirmed, q.Known)
	q.Known = h.confirmed
	if h.claim {
		q.Gone = h.gone
	}
	if h.infoOld && len(h.Info) <= MaxInfo {
		q.Info = h.Info
	}
	var due []dueItem
	for _, all := range []map[string]*share{h.hot, h.asked} {
		for key, b := range all {
			over := h.leased || now >= h.leaseEnd
			if b.held > b.parts && over && (unsettled == nil || !unsettled(key)) {
				b.held, b.toldIn = b.parts, 0
			}
			if b.version <= q.Known && (b.toldIn == 0 || b.toldIn > h.got) {
				b.toldIn = 0 // the reply to a later call, which may have no room for it, does not confirm it
				due = append(due, dueItem{key, b})
			}
		}
	}
	q.More = h.claim && len(due) > MaxItems
	for _, d := range h.firstDue(due) {
		q.Items = append(q.Items, Item{Key: d.key, Has: d.held, Want: d.want, Weight: d.weight})
		d.toldIn = h.n
	}
	h.moreClaims = q.More
	return q
}

// holdBack says nothing yet that is not true of what was admitted before and is still to leave.
func (h *Host) holdBack(q *Request, unsettled func(key string) bool) {
	if q.Over {
		for key := range h.frozen {
			q.Over = q.Over && !unsettled(key)
		}
	}
	for key, b := range h.hot {
		switch {
		case !b.unsure:
		case !unsettled(key):
			b.unsure = false
		default:
			q.Leased = q.Leased && h.counted
			q.Known = min(q.Known, b.version-1)
		}
	}
}

// askAgain asks again for what the host wants more of: a reply that was lost may have had it.
func (h *Host) askAgain() {
	for _, b := range h.hot {
		if b.want > b.parts {
			b.toldIn = 0
		}
	}
}

// dueItem is a bucket of which something is to be told.
type dueItem struct {
	key string
	*share
}

// firstDue returns what fits into a call, by key: first what is in use or wanted most.
func (h *Host) firstDue(due []dueItem) []dueItem {
	if len(due) > MaxItems {
		slices.SortFunc(due, func(a, b dueItem) int {
			return cmp.Or(cmp.Compare(max(b.held, b.want), max(a.held, a.want)), strings.Compare(a.key, b.key))
		})
		due = due[:MaxItems]
	}
	slices.SortFunc(due, func(a, b dueItem) int { return strings.Compare(a.key, b.key) })
	return due
}

// Leave returns a call that tells the ledger that the host uses nothing from now on, until a host of
// a later start has joined. It is repeated until a reply was taken that [Host.Reply] returns false
// for.
func (h *Host) Leave(now Time) *Request {
	h.leave()
	h.leaving, h.changeAll = true, true
	h.n++
	h.calling, h.sentAt = true, now
	return &Request{Params: h.Params, Host: h.Name, Start: h.Start, N: h.n, Epoch: h.epoch, Left: h.absent, Leave: true}
}

// endLease puts the host out if its lease is over.
func (h *Host) endLease(now Time) {
	end := h.renewedAt + h.lease()
	if h.leased && (now >= end+h.grace() || h.claim && now >= end) {
		h.leave()
	}
}

// leave puts the host out: it uses what it had until the lease ends.
func (h *Host) leave() {
	if !h.leased {
		return
	}
	h.leased, h.claim = false, false
	h.leaseEnd = h.renewedAt + h.lease()
	h.floorAt = h.leaseEnd + h.grace()
	h.frozen = map[string]int64{}
	for key, b := range h.hot {
		h.frozen[key] = h.scale(b.parts)
		b.parts, b.toldIn = 0, 0
	}
	h.changeAll = true
}

// forgetHot makes all buckets cold, and asks again for what the host wants.
func (h *Host) forgetHot() {
	for key, b := range h.hot {
		if b.want > 0 {
			h.asked[key] = b
		}
		b.parts, b.held, b.toldIn = 0, 0, 0
		delete(h.hot, key)
	}
	h.changeAll = true
}

// scale is what the host may use of what the ledger gave it: an island of m of N hosts has m/N of
// every bucket.
func (h *Host) scale(parts int64) int64 {
	if mutant("no-islands") {
		return parts
	}
	return parts * int64(min(h.live, h.Params.Hosts)) / int64(h.Params.Hosts)
}

// Awaits reports whether the reply to the last call may still be taken.
func (h *Host) Awaits(now Time) bool { return h.calling && now <= h.sentAt+h.Params.Timeout() }

// Reply takes the reply to the last call, unless it is late. It returns whether another call should
// follow at once.
func (h *Host) Reply(now Time, r *Reply) (again bool) {
	if r.Start != h.Start || (!h.Awaits(now) || r.N != h.n) && !mutant("late-replies") {
		return false
	}
	h.calling = false
	h.problem = r.Refused
	if r.Refused != NotRefused {
		return h.refused(now, r)
	}
	h.endLease(now)
	h.got, h.gotSentAt = r.N, h.sentAt
	h.others = Params{}
	switch {
	case r.Epoch != h.epoch:
		h.changeEpoch(now, r)
		return true
	case r.Resync || h.leased && h.claimSent && !h.moreClaims && !r.Renew:
		h.leave()
		h.known, h.confirmed = 0, 0
		h.forgetHot()
		return true
	}
	if h.claimSent {
		h.claim, again = h.moreClaims, h.moreClaims
		h.beUnsure()
	}
	known := h.known
	fresh := h.learn(r.Events)
	again = again || h.known > known
	again = h.take(r, fresh) || again
	live := r.Live
	if !r.Counted {
		live++
	}
	if live != h.live {
		h.live, h.changeAll = live, true
	}
	h.counted, h.gone, h.differ = r.Counted, r.Gone, r.Differ
	h.infoOld = r.AskInfo
	if r.Settled && h.known >= r.Version && len(r.Events) == 0 {
		again = h.settle(now) || again
	}
	if r.Renew {
		h.renewedAt = h.sentAt
		if mutant("lease-from-reply") {
			h.renewedAt = now
		}
	}
	return again
}

// beUnsure notes that what was admitted until now may be more than the ledger knows of.
func (h *Host) beUnsure() {
	for _, b := range h.hot {
		b.unsure = true
	}
}

// refused takes a reply that says that the call was not processed.
func (h *Host) refused(now Time, r *Reply) (again bool) {
	switch r.Refused {
	case RefusedParams:
		h.leave()
		h.others = r.Params
		h.changeAll = true
	case RefusedTooMany:
		h.leave()
		h.absent, h.changeAll = true, true
	case RefusedMoved:
		if h.leaving {
			h.epoch = r.Epoch
			return true
		}
	case RefusedOld:
		if !h.joined && !h.leased && r.Latest >= h.Start {
			h.Start = r.Latest + 1 // the clock was set back since the last start
			return true
		}
		if r.Latest > h.Start { // another host has this name, or had it before the clock was set back
			h.leave()
			h.absent, h.changeAll = true, true
			if now >= h.floorAt {
				h.Start = r.Latest + 1
			}
		}
	}
	return false
}

// changeEpoch begins to speak to a ledger that knows nothing of this host.
func (h *Host) changeEpoch(now Time, r *Reply) {
	h.epoch, h.known, h.confirmed = r.Epoch, 0, 0
	if !h.leased || !h.counted || r.Settled || h.Params.Strict || now >= h.renewedAt+h.lease() {
		h.leave()
		h.forgetHot()
	} else {
		h.claim = true
	}
	for _, all := range []map[string]*share{h.hot, h.asked} {
		for _, b := range all {
			b.version, b.toldIn = 0, 0
		}
	}
}

// learn takes events, and returns the buckets that have just become hot: what the host uses of them
// is to be told before it is given anything.
func (h *Host) learn(events []Event) map[string]bool {
	fresh := map[string]bool{}
	for _, e := range events {
		if e.Version <= h.known {
			continue
		}
		h.known = e.Version
		h.changed[e.Key] = struct{}{}
		b := h.hot[e.Key]
		switch {
		case e.Cold && b != nil:
			delete(h.hot, e.Key)
			if b.want > 0 {
				h.asked[e.Key] = &share{want: b.want, weight: b.weight}
			}
			continue
		case e.Cold:
			continue
		case b == nil:
			b = &share{weight: 1}
			inUse := h.InUse == nil || h.InUse(e.Key)
			if a := h.asked[e.Key]; a != nil {
				b.want, b.weight, inUse = a.want, a.weight, true
				delete(h.asked, e.Key)
			}
			if inUse && h.leased {
				b.parts = h.Params.Floor()
			}
			b.held, b.unsure = b.parts, true
			h.hot[e.Key], fresh[e.Key] = b, true
		case b.version != 0 && b.version != e.Version: // it was cold in between
			b.parts, b.toldIn, b.unsure = min(b.parts, h.Params.Floor()), 0, true
			fresh[e.Key] = true
		}
		b.version = e.Version
	}
	return fresh
}

// take takes what the ledger gives. It returns whether there is something to confirm at once.
func (h *Host) take(r *Reply, fresh map[string]bool) (confirm bool) {
	for _, g := range r.Grants {
		b := h.hot[g.Key]
		if b == nil || fresh[g.Key] {
			continue
		}
		b.short, b.tight = g.Short, g.Tight
		if g.Parts < b.parts {
			b.toldIn, confirm = 0, true
		}
		b.unsure = b.unsure || g.Parts < b.held && !r.Counted
		if g.Parts != b.parts {
			b.parts, b.held = g.Parts, max(b.held, g.Parts)
			h.changed[g.Key] = struct{}{}
		}
	}
	return confirm
}

// settle puts a host in the group that knows all hot buckets. It returns whether it was out.
func (h *Host) settle(now Time) bool {
	for key, b := range h.hot {
		if b.version == 0 { // hot in the epoch before
			delete(h.hot, key)
			h.changed[key] = struct{}{}
		}
	}
	if h.leased {
		return false
	}
	h.beUnsure()
	h.leased, h.joined, h.absent, h.changeAll = true, true, false, true
	h.joinedAt = now
	return true
}

// Lease is what a host may use at one time, and then. See [shaper.Lease].
type Lease struct {
	End, AloneAt         Time // by the host's clock
	Cold, Between, Alone int64
}

// Lease returns the current lease, which changes with each reply.
func (h *Host) Lease() Lease {
	l := Lease{End: h.leaseEnd, AloneAt: h.floorAt, Cold: h.floor(), Between: h.floor(), Alone: h.floor()}
	switch {
	case h.leased:
		l.End = h.renewedAt + h.lease()
		l.AloneAt = l.End + h.grace()
	case !h.joined:
		l.Cold, l.Between = 0, 0
	}
	switch {
	case (h.absent || h.leaving) && !h.leased:
		l = Lease{}
	case h.Alone == AloneClosed:
		l.Between, l.Alone = 0, 0
	case h.Alone == AloneOpen:
		l.Between, l.Alone = Whole, Whole
	}
	return l
}

// Parts returns what the host uses of a bucket until its lease ends, and whether that is hot.
func (h *Host) Parts(key string) (parts int64, hot bool) {
	if h.leased {
		if b := h.hot[key]; b != nil {
			return h.scale(b.parts), true
		}
	} else if parts, hot := h.frozen[key]; hot {
		return parts, true
	}
	return h.Lease().Cold, false
}

// Use returns what the host may use of a bucket at now.
func (h *Host) Use(key string, now Time) int64 {
	l := h.Lease()
	parts, _ := h.Parts(key)
	return l.use(parts, now)
}

// use is what may be used at now of a bucket of which parts were given.
func (l *Lease) use(parts int64, now Time) int64 {
	switch {
	case now < l.End:
		return parts
	case now < l.AloneAt:
		return min(parts, l.Between)
	}
	return l.Alone
}

// TakeChanges returns the hot buckets that may have changed since the last call, and those that may
// have become cold. With all, buckets that are not among the first are cold.
func (h *Host) TakeChanges() (hot, cold []string, all bool) {
	all = h.changeAll
	switch {
	case all && h.leased:
		hot = slices.Sorted(maps.Keys(h.hot))
	case all:
		hot = slices.Sorted(maps.Keys(h.frozen))
	default:
		for _, key := range slices.Sorted(maps.Keys(h.changed)) {
			if _, is := h.Parts(key); is {
				hot = append(hot, key)
			} else {
				cold = append(cold, key)
			}
		}
	}
	h.changeAll = false
	clear(h.changed)
	return hot, cold, all
}
