package cluster

import "strings"

// SlotsPrefix begins the keys of buckets of slots: connections in flight.
//
// Slots are lent like parts of a rate, except that they do not end with a lease: the connections of a host
// that is away are still in flight. So
//   - what a host says that it has is the truth, and counts until it says less, it is restarted, it leaves,
//     or an operator says that it does not exist;
//   - more is lent only while all hosts have told what they have in this epoch, and their parts are not scaled
//     by the hosts that are counted;
//   - a host that has not heard that a bucket is hot may have its floor, for however long it is away. One that
//     has just started has no floor before it knows all hot buckets.
const SlotsPrefix = "#"

// IsSlots reports whether key is that of a bucket of slots.
func IsSlots(key string) bool { return strings.HasPrefix(key, SlotsPrefix) }

// SlotsFloor is what a host may have of a cold bucket of slots, rounded up: a host has the slots that fit into
// a part, rounded down.
func (p *Params) SlotsFloor() int64 { return (Whole + int64(p.Hosts) - 1) / int64(p.Hosts) }

// ownFloor returns what this host may have had of a bucket until now, when it was cold.
func (h *Host) ownFloor(key string) int64 {
	switch {
	case IsTickets(key):
	case IsSlots(key) && h.roomy:
		return h.Params.SlotsFloor()
	case !IsSlots(key) && h.leased:
		return h.Params.Floor()
	}
	return 0
}

// giveSlots takes all slots from the host but those that are in use.
func (h *Host) giveSlots() {
	h.roomy = false
	for key, b := range h.hot {
		if IsSlots(key) {
			b.parts, b.toldIn = 0, 0
		}
	}
}

// settleSlots takes buckets of slots for cold that the host does not know to be hot: it knows all that are.
func (h *Host) settleSlots() {
	if !h.roomy {
		h.roomy, h.changeAll = true, true
	}
	for key, b := range h.hot {
		if IsSlots(key) && b.version == 0 && b.held == 0 { // hot in the epoch before
			delete(h.hot, key)
			h.changed[key] = struct{}{}
		}
	}
}

// allSlotsTold reports whether the last call and those before, as far as their replies were taken, told all
// slots that the host has.
func (h *Host) allSlotsTold() bool {
	for _, all := range []map[string]*share{h.hot, h.asked} {
		for key, b := range all {
			if IsSlots(key) && b.held > 0 && (b.toldIn == 0 || b.toldIn > h.got && b.toldIn != h.n) {
				return false
			}
		}
	}
	return true
}

// allTold reports whether the ledger knows of all slots that any host has. If another ledger may be alive, all
// hosts must have been here for so long that it lends none.
func (s *state) allTold(now Time) bool {
	told := s.countGone()
	if s.params.Strict {
		told = 0
	}
	for _, m := range s.members {
		if m.told && !m.returning && (!s.params.Strict || s.live(m, now) && now >= m.born+s.params.expiry()) {
			told++
		}
	}
	return told >= s.params.Hosts || mutant("slots-untold")
}

// othersSlots returns what hosts but one may have of b.
func (s *state) othersSlots(b *bucket, but string) (parts int64) {
	for name, m := range s.members {
		if name == but {
			continue
		}
		var has int64
		if h := b.holders[name]; h != nil {
			has = h.parts
		}
		if m.version < b.version && !mutant("slots-no-reserve") {
			has = max(has, s.params.SlotsFloor())
		}
		parts += has
	}
	return parts
}
