package world

import "shaperd.dev/shaperd/cluster"

// rate is the rate of a bucket of tickets, and leaky buckets that all units fill: when they leave, and when
// the ledger meant them to leave.
type rate struct {
	every, burst cluster.Time
	left, meant  float64 // units
	extra        float64 // units that steps of the clock have let leave
	departed     int64   // by ticket, since countedAt
	countedAt    cluster.Time
}

// flow lets time pass from w.now to t. Machines use all of their parts.
func (w *world) flow(t cluster.Time) {
	for i, r := range w.rates {
		if r == nil {
			continue
		}
		units := float64(t-w.now) / float64(r.every)
		const fast = 1.0101 // as a clock may be
		r.left, r.meant = max(0, r.left-fast*units), max(0, r.meant-fast*units)
		for _, m := range w.machines {
			if m.up {
				most := min(m.plane.admits(i, m.clock.at(w.now)), m.plane.admits(i, m.clock.at(t)))
				parts := units * float64(most) / float64(cluster.Whole)
				r.left, r.meant = r.left+parts, r.meant+parts
			}
		}
	}
}

// passUnnoticed lets more units leave because of a step of the clock of a ledger which that does not notice: what it
// has sold before leaves beside what it sells from now on.
func (w *world) passUnnoticed(step cluster.Time) {
	if step <= 0 || step > w.params.Step {
		return
	}
	for _, r := range w.rates {
		if r != nil {
			r.extra += float64(min(step, w.params.Lease/4+r.burst)) / float64(r.every)
		}
	}
}

// most is the most that a bucket of r may hold. Each ledger has a bucket, and so may each host that is alone.
func (w *world) most(r *rate) float64 {
	return 1 + r.extra + float64(len(w.servers))*(1+float64(r.burst)/float64(r.every))
}

// late is what may leave at the whole rate until a reply arrives.
func (w *world) late(r *rate) float64 { return float64(w.params.Timeout()) / float64(r.every) }

// sell has the ledger mean units to leave, if its epoch lasts.
func (s *server) sell(sale *cluster.Sale) {
	w, epoch := s.world, s.epoch
	i := w.index[sale.Key]
	r := w.rates[i]
	for k := range cluster.Time(sale.N) {
		w.after(max(0, sale.At+k*sale.Every), func() {
			if s.epoch != epoch {
				return
			}
			// The one that buys first uses its floor until it hears.
			if r.meant++; r.meant > w.most(r)+w.late(r)/float64(w.params.Hosts) {
				w.fail(Sum, "%.1f units too many of %s were sold%s", r.meant, w.keys[i], w.describe(i))
			}
		})
	}
}

// depart has a unit leave, late by the latency of a reply.
func (w *world) depart(i int) {
	r := w.rates[i]
	r.left++
	r.departed++
	w.Departed++
	if r.left > w.most(r)+w.late(r) {
		w.fail(Sum, "%.1f units too many of %s have left%s", r.left, w.keys[i], w.describe(i))
	}
}

// startCount begins to count units for expectUnits.
func (w *world) startCount() {
	for _, r := range w.rates {
		if r != nil {
			r.departed, r.countedAt = 0, w.now
		}
	}
}

// expectUnits fails if units of those that want tickets have not left at the rate of the hosts that are counted.
func (w *world) expectUnits() {
	m := w.eager[0]
	for i, r := range w.rates[:min(wanted, len(w.rates))] {
		if r == nil || w.Violation != "" {
			continue
		}
		live := m.host.Status(m.time).Live
		most := float64(w.now-r.countedAt) / float64(r.every) * float64(live) / float64(w.params.Hosts)
		if float64(r.departed) < 0.85*most-2 {
			w.fail(Use, "of %s, which alone wants %s, %d units have left where %.1f could", m.name, w.keys[i], r.departed, most)
		}
	}
}

// heldTicket is a ticket, and the epoch in which it was bought.
type heldTicket struct {
	cluster.Ticket
	epoch int64
}

// wantTickets tells the host how many units wait, sometimes also if none do.
func (m *machine) wantTickets(chance float64) {
	for i, r := range m.rates {
		if r == nil {
			continue
		}
		if waiting := max(0, m.wants[i]-int64(len(m.plane.tickets[i]))); waiting > 0 || m.chance(chance) {
			m.host.WantTickets(m.keys[i], waiting, 1+m.random.Int64N(4), r.every, r.burst)
		}
	}
}

// takeTickets lets the plane use what the host has bought.
func (m *machine) takeTickets() {
	if m.host == nil {
		return
	}
	for _, ticket := range m.host.TakeTickets() {
		i := m.index[ticket.Key]
		t := &heldTicket{ticket, m.epoch}
		m.plane.tickets[i] = append(m.plane.tickets[i], t)
		m.events.push(m.clock.when(ticket.At), func() { m.useTicket(i, t) })
	}
}

// useTicket has a unit leave if one waits, and the ticket is not void.
func (m *machine) useTicket(i int, t *heldTicket) {
	for k, held := range m.plane.tickets[i] {
		if held != t {
			continue
		}
		m.plane.tickets[i] = append(m.plane.tickets[i][:k:k], m.plane.tickets[i][k+1:]...)
		if t.epoch != m.epoch {
			m.fail(Epoch, "%s has a ticket of %s, of epoch %d, in epoch %d", m.name, m.keys[i], t.epoch, m.epoch)
		}
		if m.wants[i] > 0 && m.time < m.plane.lease.End && m.time < t.Until {
			m.wants[i]--
			m.depart(i)
		}
		return
	}
}
