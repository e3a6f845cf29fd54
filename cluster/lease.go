package cluster

import (
	"maps"
	"slices"
)

// Lease is what a host may use at one time, and then. See [shaper.Lease].
type Lease struct {
	End, AloneAt         Time // by the host's clock
	Cold, Between, Alone int64
	Withheld             int64 // of the parts of a hot bucket between End and AloneAt, as parts of the whole
	SlotsCold            int64 // of cold buckets of slots; these do not end with the lease
	Hosts                int   // among which slots are divided: if the ledger knows of more hosts, there are more
}

// Lease returns the current lease, which changes with each reply.
func (h *Host) Lease() Lease {
	l := Lease{End: h.leaseEnd, AloneAt: h.floorAt, Cold: h.floor(), Between: h.floor(), Alone: h.floor(), Hosts: max(h.Params.Hosts, h.others.Hosts)}
	live := h.frozenLive
	switch {
	case h.leased:
		live = h.live
		l.End = h.renewedAt + h.lease()
		l.AloneAt = l.End + h.grace()
	case !h.joined && !mutant("cold-unjoined"):
		l.Cold, l.Between = 0, 0
	}
	// In the island of another host there may be only that and this one by now, and those that have left it may use
	// their floors. So this host may use no more than 2 / Hosts of what it was given.
	if live := int64(min(live, h.Params.Hosts)); live > 2 {
		l.Withheld = Whole - 2*Whole/live
	}
	if h.roomy {
		l.SlotsCold = h.Params.SlotsFloor()
	}
	switch {
	case (h.absent && !mutant("absent-floor") || h.leaving && !mutant("leaving-floor")) && !h.leased:
		l = Lease{}
	case h.Alone == AloneClosed:
		l.Between, l.Alone = 0, 0
	case h.Alone == AloneOpen:
		l.Between, l.Alone, l.Withheld = Whole, Whole, 0
	}
	return l
}

// Parts returns what the host uses of a bucket until its lease ends, and whether that is hot.
func (h *Host) Parts(key string) (parts int64, hot bool) {
	if IsSlots(key) {
		if b := h.hot[key]; b != nil {
			return b.parts, true
		}
		return h.Lease().SlotsCold, false
	}
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
	parts, hot := h.Parts(key)
	if IsSlots(key) {
		return l.useSlots(parts, now)
	}
	return l.use(parts, hot, now)
}

// useSlots is use for a bucket of slots.
func (l *Lease) useSlots(parts int64, now Time) int64 {
	if now >= l.AloneAt && (l.Alone == 0 || l.Alone == Whole) {
		return l.Alone
	}
	return parts
}

// use is what may be used at now of a bucket of which parts were given.
func (l *Lease) use(parts int64, hot bool, now Time) int64 {
	switch {
	case now < l.End || now < l.AloneAt && mutant("parts-in-grace"):
		return parts
	case now < l.AloneAt && hot:
		return min(l.Rest(parts), l.Between)
	case now < l.AloneAt:
		return min(parts, l.Between)
	}
	return l.Alone
}

// Rest returns what is left of the parts of a hot bucket between End and AloneAt.
func (l *Lease) Rest(parts int64) int64 { return parts * (Whole - l.Withheld) / Whole }

// TakeChanges returns the hot buckets that may have changed since the last call, and those that may
// have become cold. With all, buckets that are not among the first are cold.
func (h *Host) TakeChanges() (hot, cold []string, all bool) {
	all = h.changeAll
	switch {
	case all && h.leased:
		hot = slices.Sorted(maps.Keys(h.hot))
	case all:
		hot = slices.Collect(maps.Keys(h.frozen))
		for key := range h.hot {
			if IsSlots(key) {
				hot = append(hot, key)
			}
		}
		slices.Sort(hot)
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
