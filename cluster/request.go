package cluster

import (
	"cmp"
	"math"
	"slices"
	"strings"
)

// Request returns the next call, which is sent at now, and gives up on the last one. inUse returns the
// most parts of a bucket that may still be in use at now, if they may be more than its current ones. It
// may be nil: nothing is. For buckets of slots it must return what is in use.
func (h *Host) Request(now Time, inUse func(key string) int64) *Request {
	if inUse == nil {
		inUse = func(string) int64 { return 0 }
	}
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
	h.holdBack(q, inUse)
	q.Known = max(q.Known, h.confirmed)
	if h.claim {
		q.Gone = h.gone
	}
	h.infoSent = h.infoOld
	if h.infoOld && len(h.Info) <= MaxInfo {
		q.Info = h.Info
	}
	for key, b := range h.asked {
		if b.want == 0 && b.held == 0 && b.toldIn != 0 && b.toldIn <= h.got {
			delete(h.asked, key) // the ledger knows that
		}
	}
	var due []dueItem
	for _, all := range []map[string]*share{h.hot, h.asked} {
		for key, b := range all {
			if held := h.heldOf(key, b, now, inUse); held != b.held {
				b.held, b.toldIn = held, 0
			}
			if b.toldIn > h.got && !mutant("tell-once") {
				b.toldIn = 0 // the reply to a later call, which may not have it, does not confirm it
			}
			// A claim is of everything, whether the host is sure that it knows the event or not.
			if b.toldIn == 0 && (b.version <= q.Known || h.claim) {
				due = append(due, dueItem{key, b})
			}
		}
	}
	due = h.remind(q, due)
	q.More = h.claim && len(due) > MaxItems
	for _, d := range h.firstDue(q, due) {
		q.Items = append(q.Items, Item{Key: d.key, Has: d.held, Want: d.want, Weight: d.weight, Every: d.every, Burst: d.burst})
		d.toldIn, d.told = h.n, d.held
	}
	h.moreClaims, h.told = q.More, q.Known
	q.Told = h.allSlotsTold()
	return q
}

// remind adds a bucket of which the host needs no more than its floor, even if nothing is new about it: the
// ledger makes a bucket cold when it is told of it and no host has needed more for long, and the one that
// needed it may have been restarted. All such buckets have their turn, then there is a rest.
func (h *Host) remind(q *Request, due []dueItem) []dueItem {
	if !h.leased || h.claim || len(due) >= MaxItems || h.sentAt < h.remindAt {
		return due
	}
	next := ""
	for key, b := range h.hot {
		most := h.Params.Floor()
		if IsTickets(key) {
			most = 0
		}
		if b.want <= most && b.held <= most && b.toldIn != 0 && b.version <= q.Known && key > h.reminded && (next == "" || key < next) {
			next = key
		}
	}
	if h.reminded = next; next == "" {
		h.remindAt = h.sentAt + h.Params.demoteAfter()
		return due
	}
	return append(due, dueItem{next, h.hot[next]})
}

// heldOf returns the most that may be in use of a bucket.
func (h *Host) heldOf(key string, b *share, now Time, inUse func(key string) int64) int64 {
	switch {
	case IsSlots(key):
		return max(b.parts, inUse(key))
	case mutant("tell-at-once"):
		return b.parts
	case b.held > b.parts && (h.leased || now >= h.leaseEnd):
		return max(b.parts, min(b.held, inUse(key)))
	}
	return b.held
}

// holdBack says nothing yet that is not true of what was admitted before and is still to leave.
func (h *Host) holdBack(q *Request, inUse func(key string) int64) {
	if q.Over {
		for key := range h.frozen {
			q.Over = q.Over && (inUse(key) == 0 || mutant("over-unsettled"))
		}
	}
	for key, b := range h.hot {
		switch {
		case !b.unsure || IsSlots(key):
		case inUse(key) == 0:
			b.unsure = false
		default:
			q.Leased = q.Leased && (h.counted || mutant("leased-unsure"))
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

// firstDue returns what fits into call q, by key: first what is in use of buckets that have just become
// hot, since the ledger takes that only with the first call that knows of them; then, as to one half,
// what is in use or wanted most, and as to the other, all in turn.
func (h *Host) firstDue(q *Request, due []dueItem) []dueItem {
	if len(due) > MaxItems {
		fresh := func(d dueItem) int64 {
			if d.version > h.confirmed && d.held > 0 {
				return d.version
			}
			return math.MaxInt64
		}
		slices.SortFunc(due, func(a, b dueItem) int {
			return cmp.Or(cmp.Compare(fresh(a), fresh(b)), cmp.Compare(max(b.held, b.want), max(a.held, a.want)), strings.Compare(a.key, b.key))
		})
		n := MaxItems / 2
		for n < MaxItems && fresh(due[n]) < math.MaxInt64 {
			n++
		}
		q.Known = min(q.Known, fresh(due[n])-1)
		round := func(d dueItem) int {
			if d.key > h.turn {
				return 0
			}
			return 1
		}
		slices.SortFunc(due[n:], func(a, b dueItem) int {
			return cmp.Or(round(a)-round(b), strings.Compare(a.key, b.key))
		})
		due = due[:MaxItems]
		if n < MaxItems {
			h.turn = due[MaxItems-1].key
		}
	}
	slices.SortFunc(due, func(a, b dueItem) int { return strings.Compare(a.key, b.key) })
	return due
}

// Leave returns a call that tells the ledger that the host uses nothing from now on, until a host of
// a later start has joined. It is repeated until a reply was taken that [Host.Reply] returns false
// for.
func (h *Host) Leave(now Time) *Request {
	h.leave()
	h.giveSlots()
	h.leaving, h.changeAll = true, true
	h.n++
	h.calling, h.sentAt = true, now
	return &Request{Params: h.Params, Host: h.Name, Start: h.Start, N: h.n, Epoch: h.epoch, Left: h.absent, Leave: true}
}
