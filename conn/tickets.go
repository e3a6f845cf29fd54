// Owner: the loop's thread.

package conn

import (
	"cmp"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// tickets are new connections that may pass a gate although this host has no parts of its rate: the ledger
// paces them, and sells this host some. They are in the order in which they may pass.
type tickets struct {
	list   []ticket
	missed int // connections that were refused since the last report, and would have needed one
}

// ticket is a connection that may pass between two instants of the loop's clock.
type ticket struct{ at, until leaky.Time }

// nextTicket returns when the next connection may pass with a ticket. It discards tickets that are over.
func (gt *gate) nextTicket(now leaky.Time) (at leaky.Time, ok bool) {
	t := &gt.tickets
	for len(t.list) > 0 && t.list[0].until <= now {
		t.list = t.list[1:]
		gt.state.VoidTickets.Add(1)
	}
	if len(t.list) == 0 {
		return 0, false
	}
	return t.list[0].at, true
}

// useTicket uses the next ticket, and reports whether a connection may pass with it at now.
func (gt *gate) useTicket(now leaky.Time) bool {
	at, ok := gt.nextTicket(now)
	if !ok || at > now {
		return false
	}
	gt.tickets.list = gt.tickets.list[1:]
	gt.state.UsedTickets.Add(1)
	return true
}

// wanted returns how many tickets gt needs besides those that it has.
func (gt *gate) wanted(now leaky.Time) int {
	_, _ = gt.nextTicket(now)
	return max(0, gt.waiting+gt.tickets.missed-len(gt.tickets.list))
}

// depart is when the next connection may pass.
func (gt *gate) depart(now leaky.Time) leaky.Time {
	if at, ok := gt.nextTicket(now); ok {
		return at
	}
	return gt.pacing.depart(now)
}

// miss records that a connection was refused at gt, for want of a ticket.
func (sg *sharing) miss(gt *gate, now leaky.Time) {
	if gt.share != nil && gt.atRate(now) {
		gt.tickets.missed++
		sg.list(gt.share)
		sg.beShort(gt.share)
	}
}

// giveTickets takes in tickets, after the changes of the same update.
func (sg *sharing) giveTickets(given []shaper.Ticket) {
	now, boot, policy := sg.clock(), sg.boot(), sg.shaper.Policy()
	sg.follow(now)
	if !sg.leased() {
		return
	}
	for _, t := range given {
		sh := sg.open(policy, t.Key, now)
		if sh == nil || sh.gate == nil {
			continue
		}
		list := append(sh.gate.tickets.list, ticket{now.Add(t.At.Sub(boot)), now.Add(t.Until.Sub(boot))})
		slices.SortFunc(list, func(a, b ticket) int { return cmp.Compare(a.at, b.at) })
		sh.gate.tickets.list = list
		sg.admission.freed = append(sg.admission.freed, sh.gate)
	}
	sg.admission.run(now)
}

// demandTickets sets what is needed of the rate of gt in d.
func (gt *gate) demandTickets(d *shaper.Demand, now leaky.Time) {
	if gt.tickets.missed > 0 {
		d.Waiting = max(d.Waiting, 1)
	}
	d.Units, d.Every, d.Burst = gt.wanted(now), gt.whole.Packets.Cost(1), gt.whole.PacketsBurst
	gt.tickets.missed = 0
}

// dropTickets makes the tickets of sh void.
func (sh *share) dropTickets() {
	if gt := sh.gate; gt != nil {
		gt.state.VoidTickets.Add(uint64(len(gt.tickets.list)))
		gt.tickets.list = nil
	}
}
