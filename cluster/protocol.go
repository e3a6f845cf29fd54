package cluster

import "time"

// Time is an instant of a clock, or a span, in microseconds. Hosts and the ledger each have a clock
// of their own, and no instant of one is ever compared with one of another.
type Time int64

// Units of Time.
const (
	Millisecond Time = 1000
	Second      Time = 1000 * Millisecond
)

// FromDuration converts d, rounded down.
func FromDuration(d time.Duration) Time { return Time(d / time.Microsecond) }

// Duration converts t.
func (t Time) Duration() time.Duration { return time.Duration(t) * time.Microsecond }

// Whole is a bucket in parts: all hosts together use at most so many.
const Whole int64 = 1 << 20

// Params are what all hosts and the ledger must agree on. The ledger refuses a host with others.
type Params struct {
	Hosts  int  // hosts that may exist: 1 to MaxHosts
	Lease  Time // how long a host may use what it was given, from before it asked
	Step   Time // the largest step of the ledger's clock that may pass unnoticed
	Strict bool // two ledgers may be alive at once: who joins is counted late, and no lease is claimed
}

// MaxHosts is the maximum of Params.Hosts.
const MaxHosts = 1000

// Floor is what each host may use of a bucket without asking, and what is kept for it when it is away.
func (p *Params) Floor() int64 { return Whole / int64(p.Hosts) }

// grace is how long after the end of its lease a host must wait before it uses its floor: until then the
// others have learned that it is away.
func (p *Params) grace() Time { return p.Lease + 2*p.Step }

// Away is how long after its start a host that has not joined must wait before it uses its floor: others may count the
// process before it for so long.
func (p *Params) Away() Time { return p.Lease*98/100 + p.grace()*102/100 }

// quarantine is for how long a ledger gives nothing in a new epoch: until leases of the one before have ended, by a clock
// that steps once, and what was admitted in them has left.
func (p *Params) quarantine() Time { return p.Lease + 2*p.Step }

// expiry is how long after a host's last call its parts are given to others.
func (p *Params) expiry() Time { return 2*p.Lease + p.Step }

// Request is a call of a host to the ledger. A host has one call on its way at a time, gives up on it
// after Params.Timeout, and takes no reply but that to its last one.
type Request struct {
	Params Params
	Host   string // name of the host
	Start  int64  // number of this start of the host: grows from one start to the next
	N      int64  // number of the call, since the start

	Got    int64 // number of the last call whose reply was taken, or 0
	GotAge Time  // since that call was sent, by the host's clock

	Epoch  int64 // of the ledger's state that the host last heard from, or 0
	Leased bool  // the host uses of a hot bucket only what the ledger has given it
	Claim  bool  // Has are leases of the epoch before that have not ended
	More   bool  // the claim goes on in the next call
	Over   bool  // no lease that the host had has not ended
	Left   bool  // the host uses nothing of any bucket until it has joined
	Known  int64 // all events up to this version are known
	Told   bool  // all slots that the host has were told in this epoch

	Items []Item // what is new about buckets; at most MaxItems

	Digest uint64 // of the host's shared limits: the ledger counts hosts with another one
	Info   string // what other hosts may want to know about this one, at most MaxInfo bytes; "" is unchanged
	Leave  bool   // the host uses nothing of any bucket any more until it has joined again
	Gone   []Gone // with a claim: the hosts that the ledger of the epoch before knew to be gone
}

// Item tells the ledger about one bucket.
type Item struct {
	Key    string
	Has    int64 // parts in use, of the whole
	Want   int64 // parts that would be used
	Weight int64 // the host's weight beside others that want more: its waiting sources, 1 to MaxWeight

	// Of a bucket of tickets, of which Want are wanted: the time from one unit to the next, and the burst as
	// such a time. Otherwise 0.
	Every, Burst Time
}

// MaxItems is the maximum number of items of a call, which bounds the time that a store needs for it.
const MaxItems = 100

// MaxInfo is the maximum length of Request.Info in bytes: stores read it at each call.
const MaxInfo = 1024

// MaxWeight is the maximum weight of a host.
const MaxWeight = 1 << 16

// Gone is a host that uses nothing: it has left, or an operator said that it does not exist. One that is replaced has
// no place any more, as another host has taken that: it is remembered so that an operator who says again that it does
// not exist, or a late call that it leaves, does not give away the place of one that the ledger has not heard of yet.
type Gone struct {
	Host     string
	Start, N int64 // of its last call; 0 if it is not known. Of one that is replaced Start is -1 - that of its last call
}

// Replaced reports whether another host has the place of g.
func (g Gone) Replaced() bool { return g.Start < 0 }

// replaced is what is remembered of g when another host has its place.
func (g Gone) replaced() Gone { return Gone{g.Host, -1 - g.Start, g.N} }

// lastStart is the start of the last call of g.
func (g Gone) lastStart() int64 {
	if g.Replaced() {
		return -1 - g.Start
	}
	return g.Start
}

// Reply is the ledger's answer to a call.
type Reply struct {
	N, Start int64 // of the call
	Latest   int64 // the latest start of the host; set if Refused is RefusedOld
	Epoch    int64
	Refused  Refusal
	Params   Params // of the ledger; set if Refused is RefusedParams

	Live    int  // hosts that are counted, and those that are gone
	Counted bool // the receiver is counted
	Settled bool // in this epoch, nothing is in use that the ledger does not know of, but for slots
	AllTold bool // nor are there slots that it does not know of
	Resync  bool // the ledger has forgotten what the host has
	Renew   bool // the lease is renewed, from when the call was sent

	Version int64 // of the newest event
	Events  []Event
	Grants  []Grant
	Sales   []Sale

	Gone    []Gone
	Differ  int  // hosts with another digest
	AskInfo bool // Request.Info is wanted
}

// Refusal is why the ledger did not process a call.
type Refusal uint8

// Reasons of refusal.
const (
	NotRefused       Refusal = iota
	RefusedOld               // a later call or a later start of the same host was processed
	RefusedMoved             // the host has been to another ledger, and its lease here has not ended
	RefusedParams            // the ledger has other Params
	RefusedTooMany           // Params.Hosts hosts exist without this one
	RefusedUnsettled         // the host had left, and the ledger does not know yet whose place it may take
)

// Event says that a bucket has become hot: hosts use what they are given of it; or cold again:
// each host may use its floor.
type Event struct {
	Version int64
	Key     string
	Cold    bool
}

// Grant is what a host is given of one bucket.
type Grant struct {
	Key   string
	Parts int64
	Short bool // more is due when others have given it back
	Tight bool // all hosts together want more than there is
}
