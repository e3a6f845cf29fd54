package shaper

import "shaperd.dev/shaperd/leaky"

// Whole is a shared bucket in parts: all hosts together use at most so many.
const Whole = 1 << 20

// Lease says which parts of shared buckets this host may use, and until when. A bucket of n
// parts has the rates and bursts of its limit times n / Whole; one of 0 parts lets nothing leave.
// All buckets of a host are under one lease, which is renewed several times in its life. A bucket
// that no one has asked parts for is cold: every host may use its Cold parts.
//
// The zero Lease is that of a host that may use nothing.
type Lease struct {
	// Until End a bucket has its parts, then until AloneAt at most Between, and then Alone.
	// Both are instants of the daemon's clock that goes on while the machine is suspended, see
	// Boot of the pacer's clock, and End is not later than AloneAt.
	End, AloneAt leaky.Time

	Cold, Between, Alone uint32 // parts, at most Whole

	// Hosts is the number of hosts that may exist, and SlotsCold the parts of a pool of slots that
	// no one has asked parts for. See Slots.
	Hosts     int
	SlotsCold uint32
}

// Parts returns what a bucket that was given parts may use at now.
func (l *Lease) Parts(parts uint32, now leaky.Time) uint32 {
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

// Demand is what a plane needs of one shared bucket, or of one pool of slots.
type Demand struct {
	Key   Key
	Slots bool // it is of a pool of slots: Used and Unsettled are not set

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
