package shaper

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"sort"

	"shaperd.dev/shaperd/leaky"
)

// Whole is a shared bucket in parts: all hosts together use at most so many.
const Whole = 1 << 20

// Lease says which parts of shared buckets this host may use, and until when. A bucket of n
// parts has the rates and bursts of its limit times n / Whole; one of 0 parts lets nothing leave.
// All buckets of a host are under one lease, which is renewed several times in its life. A bucket
// that no one has asked parts for is cold: every host may use its Cold parts.
//
// The zero Lease is that of a host that may use nothing.
type Lease struct {
	// Until End a bucket has its parts, then until AloneAt at most Between, and then Alone. Until AloneAt a
	// bucket that is not cold has, besides, no more than its parts less Withheld / Whole of them.
	// Both are instants of the daemon's clock that goes on while the machine is suspended, see
	// Boot of the pacer's clock, and End is not later than AloneAt.
	End, AloneAt leaky.Time

	Cold, Between, Alone, Withheld uint32 // parts, at most Whole

	// Hosts is the number of hosts that may exist, and SlotsCold the parts of a pool of slots that
	// no one has asked parts for. See Slots.
	Hosts     int
	SlotsCold uint32
}

// Parts returns what a bucket that was given parts may use at now.
func (l *Lease) Parts(parts uint32, now leaky.Time) uint32 {
	if now >= l.End && now < l.AloneAt {
		parts = uint32(uint64(parts) * uint64(Whole-l.Withheld) / Whole)
	}
	return l.parts(parts, now)
}

// ColdParts returns what a cold bucket may use at now.
func (l *Lease) ColdParts(now leaky.Time) uint32 { return l.parts(l.Cold, now) }

func (l *Lease) parts(parts uint32, now leaky.Time) uint32 {
	switch {
	case now < l.End:
		return parts
	case now < l.AloneAt:
		return min(parts, l.Between)
	}
	return l.Alone
}

// Shares is an update of what a plane may use of shared limits.
type Shares struct {
	Lease Lease      // of all shared buckets, those that are not named here too
	Given []KeyParts // buckets that are not cold; others keep what they had
	Cold  []Key      // buckets that are cold again
	Reset bool       // all buckets and pools are cold but those in Given and Slots

	// Policy is that of which all keys are; nil is the current one. Of a later one a Reset does not say which
	// pools are hot that this one does not have.
	Policy *Policy

	Tickets []Ticket // new connections that may pass, given after the changes above

	// The same for pools of slots. Key.Limit is the ID of a limit's state.
	Slots     []KeyParts
	ColdSlots []Key
}

// Ticket is a new connection that may pass between two instants of the clock of Lease, although the host
// has no parts of its bucket. It is void when the lease has ended, and when an update resets all buckets or
// names its bucket.
type Ticket struct {
	Key       Key
	At, Until leaky.Time
}

// KeyParts are the parts of one bucket. Key.Limit is the ID of a limit's state, or for its new
// connections ID+1.
type KeyParts struct {
	Key   Key
	Parts uint32
}

// MaxDemands is the maximum number of buckets of rates that a plane reports at one time, besides those that are
// unsettled.
const MaxDemands = 10_000

// HeaviestDemands returns those of all, whose order it changes, that are unsettled, as others must not use those, and
// at most [MaxDemands] more: first those that sources wait for, then those of which most has left. If sources wait
// for more, chance decides which, so that none is left out for long.
func HeaviestDemands(all []Demand) []Demand {
	slices.SortFunc(all, func(a, b Demand) int {
		if a.Unsettled != b.Unsettled {
			if a.Unsettled {
				return -1
			}
			return 1
		}
		return cmp.Or(min(b.Waiting, 1)-min(a.Waiting, 1), cmp.Compare(b.Used, a.Used))
	})
	unsettled := sort.Search(len(all), func(i int) bool { return !all[i].Unsettled })
	rest := all[unsettled:]
	n := sort.Search(len(rest), func(i int) bool { return rest[i].Waiting == 0 })
	if n > MaxDemands {
		rand.Shuffle(n, func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
	}
	return all[:unsettled+min(len(rest), MaxDemands)]
}

// Demand is what a plane needs of one shared bucket, or of one pool of slots.
type Demand struct {
	Key   Key
	Slots bool // it is of a pool of slots: Used and Unsettled are not set

	// Name is set for a pool that the policy has no name for any more, as its listener is gone while connections
	// are in flight: see [Policy.ShareName].
	Name string

	// Used is the time that what has left since the last report takes at the whole rate, of
	// bytes or of packets, whichever is longer.
	Used leaky.Time

	// Waiting is the number of sources that wait for the bucket; 0 if it delays nothing.
	Waiting int

	// Unsettled is set while something is yet to leave that was admitted when the bucket had
	// more parts.
	Unsettled bool

	// Units are the new connections that wait for the bucket and have no ticket, or were refused since
	// the last report, and Every and Burst the whole rate: the time from one to the next, and the burst
	// as such a time.
	Units        int
	Every, Burst leaky.Time

	// Held are the parts of the pool that connections in flight need. Want are those that would be
	// used, with the connections that wait, and Spare how many more are wanted for connections that
	// may come, unless other hosts need them.
	Held, Want, Spare uint32

	// Fit are the least parts with which this host has as many slots as now, and Next those with which
	// it has one more.
	Fit, Next uint32
}
