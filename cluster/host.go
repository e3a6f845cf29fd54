package cluster

import "math"

// Host is what one host knows: what it may use of each bucket, and what to tell the ledger. It is in
// the group while it is leased; otherwise it is out, and uses what it had until its lease ends, then
// at most its floor, and when the others must know that it is away its floor.
//
// It is not safe for concurrent use. Its clock must not be set, and must count the time for which the
// machine is suspended: CLOCK_BOOTTIME.
type Host struct {
	HostOptions

	n          int64  // of the last call
	calling    bool   // its reply is awaited
	sentAt     Time   // of the last call
	claimSent  bool   // the last call claimed leases
	moreClaims bool   // and did not have room for all
	turn       string // up to this key buckets had their turn to be told
	reminded   string // up to this key the ledger was reminded of buckets
	remindAt   Time   // of which it is reminded again from then on

	got       int64 // number of the last call whose reply was taken
	gotSentAt Time  // when it was sent
	renewedAt Time  // when the call was sent that renewed the lease

	epoch, known int64
	told         int64 // what the last call told of known
	confirmed    int64 // what the last call told whose reply was taken
	leased       bool
	claim        bool // the epoch has changed, and leases of the one before are to be claimed
	counted      bool
	live         int // hosts that are counted, this one included, and those that are gone
	gone         []Gone
	hot          map[string]*share // buckets that are hot
	asked        map[string]*share // buckets that were asked for, and are not known to be hot

	// While the host is out.
	leaseEnd   Time
	floorAt    Time
	frozen     map[string]int64 // what it used of buckets that were hot,
	frozenLive int              // when so many hosts were live
	joined     bool             // it has been in the group since it started
	joinedAt   Time             // when it joined last
	rivalAt    Time             // when another host with its name was last seen; 0 is never
	roomy      bool             // it may have its floor of buckets of slots that are cold: it knows all hot ones
	absent     bool             // it uses nothing until it has joined: it had left, or there is no place for it
	leaving    bool             // it tells the ledger that it uses nothing any more

	problem   Refusal
	others    Params // of the ledger that refused ours
	infoOld   bool   // Info is to be told again
	infoSent  bool   // with the last call, as it is now
	differ    int
	tickets   []Ticket            // bought since TakeTickets
	changed   map[string]struct{} // buckets whose parts have changed since TakeChanges
	changeAll bool
}

// HostOptions are the settings of a host.
type HostOptions struct {
	Params Params
	Name   string // unique in the group
	Start  int64  // unique, and greater than that of the last start if that is known
	Salt   int64  // random, 0 to MaxSalt: processes that the ledger refuses as old go on with different starts
	Alone  Alone
	Left   bool // it has left, and uses nothing until it has joined
	Away   Time // [Params.Away] of the process before, if the host had a longer lease then

	Digest uint64 // see Request
	Info   string

	// InUse reports whether a bucket that was cold is in use. Then its floor becomes parts of a hot
	// one, and is not taken away before others are asked.
	InUse func(key string) bool
}

// MaxSalt is the maximum of [HostOptions.Salt].
const MaxSalt = 1<<20 - 1

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
	told    int64 // what that call said is in use, or may be

	every, burst Time // of tickets
	short, tight bool // of the last grant
}

// NewHost returns a host that starts at now.
func NewHost(o HostOptions, now Time) *Host {
	h := &Host{
		HostOptions: o, hot: map[string]*share{}, asked: map[string]*share{}, changed: map[string]struct{}{},
		absent: o.Left, changeAll: true, infoOld: true, roomy: mutant("slots-fresh-floor"),
	}
	h.leaseEnd, h.floorAt = now, now+max(h.lease()+h.grace(), o.Away)
	if mutant("fresh-floor") {
		h.floorAt = now
	}
	return h
}

// Joined reports whether the host is in the group.
func (h *Host) Joined() bool { return h.leased }

// SetInfo replaces [HostOptions.Digest] and Info, as the configuration has changed. Information that does not
// fit into a call is not told. [Host.TakeChanges] returns all buckets.
func (h *Host) SetInfo(digest uint64, info string) {
	h.Digest, h.Info, h.infoOld, h.infoSent, h.changeAll = digest, info, true, false, true
}

// Tell replaces Info alone.
func (h *Host) Tell(info string) { h.Info, h.infoOld, h.infoSent = info, true, false }

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

// maxAsked is the maximum number of buckets that are not hot yet which the ledger is asked for, besides those of
// [Host.WantInUse]. They are told by and by: a bucket that there is no room for is to be wanted again.
const maxAsked = 10_000

// Want says which parts of a bucket the host would use, and its weight beside others that want more. It reports
// false if there is no room for that now. A bucket with a key that no call may have stays cold.
func (h *Host) Want(key string, want, weight int64) bool { return h.want(key, want, weight, maxAsked) }

// WantInUse is Want for a bucket of slots of which more are in use than the host's floor: the ledger must know.
func (h *Host) WantInUse(key string, want, weight int64) { h.want(key, want, weight, math.MaxInt) }

func (h *Host) want(key string, want, weight int64, most int) bool {
	if !validKey(key) {
		return true
	}
	b := h.hot[key]
	if b == nil {
		if b = h.asked[key]; b == nil {
			if want == 0 {
				return true // the ledger was not asked
			}
			if len(h.asked) >= most {
				return false
			}
			b = &share{}
			h.asked[key] = b
		}
	}
	b.want, b.weight, b.toldIn = want, min(weight, MaxWeight), 0
	return true
}

// Lower gives back what the host has of a bucket beyond parts.
func (h *Host) Lower(key string, parts int64) {
	if b := h.hot[key]; (h.leased || IsSlots(key)) && b != nil && parts < b.parts {
		b.parts, b.toldIn = parts, 0
		h.changed[key] = struct{}{}
	}
}

// endLease puts the host out if its lease is over.
func (h *Host) endLease(now Time) {
	end := h.renewedAt + h.lease()
	if h.leased && (now >= end+h.grace() || h.claim && now >= end) {
		h.leave()
	}
}

// stayAway makes the host use nothing until it has joined.
func (h *Host) stayAway() {
	h.absent, h.changeAll = true, true
	h.giveSlots()
}

// leave puts the host out: it uses what it had until the lease ends.
func (h *Host) leave() {
	if !h.leased {
		return
	}
	h.leased, h.claim = false, false
	h.dropTickets()
	h.leaseEnd = h.renewedAt + h.lease()
	h.floorAt = h.leaseEnd + h.grace()
	h.frozen, h.frozenLive = map[string]int64{}, h.live
	for key, b := range h.hot {
		if !IsSlots(key) {
			h.frozen[key] = h.scale(b.parts)
			b.parts, b.toldIn = 0, 0
		}
	}
	h.changeAll = true
}

// forgetHot makes all buckets of rates cold, and asks again for what the host wants.
func (h *Host) forgetHot() {
	for key, b := range h.hot {
		if IsSlots(key) {
			b.version, b.toldIn = 0, 0
			continue
		}
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
