package cluster

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
	h.got, h.gotSentAt, h.confirmed = r.N, h.sentAt, h.told
	h.others = Params{}
	switch {
	case r.Epoch != h.epoch:
		h.changeEpoch(now, r)
		return true
	case r.Resync && !mutant("ignore-resync") || h.leased && h.claimSent && !h.moreClaims && !r.Renew:
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
	h.takeSales(now, r.Sales)
	live := r.Live
	if !r.Counted {
		live++
	}
	if live != h.live {
		h.live, h.changeAll = live, true
	}
	h.counted, h.gone, h.differ = r.Counted, r.Gone, r.Differ
	h.infoOld = r.AskInfo || h.infoOld && !h.infoSent
	if h.known >= r.Version && len(r.Events) == 0 {
		if r.AllTold {
			h.settleSlots()
		}
		if r.Settled || mutant("join-unsettled") {
			again = h.settle(now) || again
		}
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
		h.stayAway()
	case RefusedMoved:
		if h.leaving {
			h.epoch = r.Epoch
			return true
		}
	case RefusedOld:
		if !h.joined && !h.leased && r.Latest >= h.Start {
			h.Start = r.Latest + 1 + h.Salt // the clock was set back since the last start
			return true
		}
		if r.Latest > h.Start { // another host has this name, or had it before the clock was set back
			h.leave()
			h.stayAway()
			h.rivalAt = now
			if now >= h.floorAt {
				h.Start = r.Latest + 1 + h.Salt
			}
		}
	}
	return false
}

// changeEpoch begins to speak to a ledger that knows nothing of this host.
func (h *Host) changeEpoch(now Time, r *Reply) {
	h.epoch, h.known, h.confirmed = r.Epoch, 0, 0
	h.dropTickets()
	if !h.leased || !h.counted || r.Settled || h.Params.Strict || now >= h.renewedAt+h.lease() {
		h.leave()
		h.forgetHot()
	} else {
		h.claim = true
	}
	for _, all := range []map[string]*share{h.hot, h.asked} {
		for _, b := range all {
			if b.version = 0; b.held > 0 || b.want > 0 {
				b.toldIn = 0
			}
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
				h.asked[e.Key] = &share{want: b.want, weight: b.weight, every: b.every, burst: b.burst}
			}
			continue
		case e.Cold:
			continue
		case b == nil:
			b = &share{weight: 1}
			inUse := h.InUse == nil || h.InUse(e.Key)
			if a := h.asked[e.Key]; a != nil {
				b.want, b.weight, b.every, b.burst, inUse = a.want, a.weight, a.every, a.burst, true
				delete(h.asked, e.Key)
			}
			if inUse {
				b.parts = h.ownFloor(e.Key)
			}
			b.held, b.unsure = b.parts, true
			if b.parts == 0 && b.want == 0 {
				b.toldIn = h.n // there is nothing to tell
			}
			h.hot[e.Key], fresh[e.Key] = b, true
		case b.version != 0 && b.version != e.Version: // it was cold in between
			b.parts, b.toldIn, b.unsure = min(b.parts, h.ownFloor(e.Key)), 0, true
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
		// More slots are in use than were given: that many are counted, and need not be free.
		beyond := IsSlots(g.Key) && g.Parts > b.parts && g.Parts <= b.told
		if g.Parts != b.parts && !beyond {
			b.parts, b.held = g.Parts, max(b.held, g.Parts)
			h.changed[g.Key] = struct{}{}
		}
	}
	return confirm
}

// settle puts a host in the group that knows all hot buckets. It returns whether it was out.
func (h *Host) settle(now Time) bool {
	for key, b := range h.hot {
		if b.version == 0 && !IsSlots(key) { // hot in the epoch before
			delete(h.hot, key)
			h.changed[key] = struct{}{}
		}
	}
	if h.leased {
		return false
	}
	if !mutant("join-sure") {
		h.beUnsure()
	}
	h.leased, h.joined, h.absent, h.changeAll = true, true, false, true
	h.joinedAt = now
	return true
}
