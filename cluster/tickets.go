package cluster

import "strings"

// TicketsPrefix begins the keys of buckets of tickets: low rates, of which a host's part would be less
// than a unit in the time of a lease. Parts of such a rate would make each host's units wait for those of
// that host alone, which takes as many times longer as there are hosts. So when such a bucket is hot the
// ledger keeps the leaky bucket itself, and sells departures.
//
// To the rest of the rules it is a rate of which hosts have no parts while it is hot: tickets are sold only
// when all know that it is, at the rate of the hosts that are counted, and end with the epoch and the lease.
const TicketsPrefix = "@"

// IsTickets reports whether key is that of a bucket of tickets.
func IsTickets(key string) bool { return strings.HasPrefix(key, TicketsPrefix) }

// MaxTickets is the maximum number of tickets that a host wants of one bucket.
const MaxTickets = 64

// MaxEvery is the maximum of Item.Every and Item.Burst: 30 days.
const MaxEvery = 30 * 24 * 3600 * Second

// Sale is a sale of tickets: N units may leave, the first At after the call was sent, which may be
// negative, and the others Every after another, each at most a lease later.
type Sale struct {
	Key       string
	N         int64
	At, Every Time
}

// Ticket is a unit that may leave, between two instants of the host's clock.
type Ticket struct {
	Key       string
	At, Until Time
}

// ahead is how long before it departs a ticket is sold.
func (p *Params) ahead() Time { return p.Lease / 4 }

// sellAll sells the tickets that the call asks for.
func (c *call) sellAll() (sales []Sale) {
	s, m := c.state, c.m
	known := s.knownByAll("", c.now)
	for i := range c.q.Items {
		it := &c.q.Items[i]
		b := s.buckets[it.Key]
		if b == nil || !b.tickets || !c.settled || b.version > known && !mutant("tickets-before-known") || !s.live(m, c.now) {
			continue
		}
		if sale := s.sell(b, c.q.Host, it, c.now); sale.N > 0 {
			sales = append(sales, sale)
		}
	}
	return sales
}

// sell sells tickets of b, unless it is the turn of another host that asks for some and could have one. If there
// is one that asks it sells one. Hosts take turns by start-time fair queueing.
func (s *state) sell(b *bucket, host string, it *Item, now Time) Sale {
	h := b.holders[host]
	most := min(h.want, MaxTickets)
	due := now + s.params.ahead()
	// An island of m of N hosts has m/N of the rate.
	live := Time(s.countLive(now))
	if mutant("tickets-no-islands") {
		live = Time(s.params.Hosts)
	}
	h.every = (it.Every*Time(s.params.Hosts) + live - 1) / live
	if b.last == 0 {
		b.last, b.every = now, h.every // until now, hosts used their floors
	}
	for name, o := range b.holders {
		switch {
		case name == host || o.want == 0 || now >= o.at+s.params.Lease/2 || b.last+o.every > due:
		case o.turn < h.turn:
			return Sale{}
		default:
			most = min(most, 1)
		}
	}
	at := max(b.last+h.every, now-it.Burst)
	if h.every != b.every {
		at = max(at, now) // what was not used of another rate is no credit of this one
	}
	sale := Sale{Key: it.Key, At: at - now, Every: h.every}
	for ; sale.N < most && at <= due; at += h.every {
		sale.N++
		b.last = at
	}
	if sale.N > 0 {
		b.every, b.turn = h.every, max(b.turn, h.turn)
		h.want -= sale.N
		h.turn += sale.N * (Whole / min(h.weight, mostTurns))
	}
	return sale
}

// mostTurns is how many turns a host gets for one of another: however many sources wait there, the others are served.
const mostTurns = 16

// WantTickets says how many units of a bucket of tickets wait, at most [MaxTickets], from how many sources, and
// its rate: the time from one unit to the next, and the burst as such a time, both at most [MaxEvery].
func (h *Host) WantTickets(key string, n, weight int64, every, burst Time) {
	h.Want(key, min(n, MaxTickets), weight)
	for _, b := range []*share{h.hot[key], h.asked[key]} {
		if b != nil {
			b.every, b.burst = every, burst
		}
	}
}

// takeSales takes tickets. What was sold in reply to a call counts from when the reply came: later than the
// ledger means.
func (h *Host) takeSales(now Time, sales []Sale) {
	for _, sale := range sales {
		b := h.hot[sale.Key]
		if b == nil || !h.leased {
			continue
		}
		for i := range Time(min(sale.N, MaxTickets)) {
			at := now + max(0, sale.At+i*sale.Every)*102/100
			h.tickets = append(h.tickets, Ticket{sale.Key, at, h.sentAt + h.lease()})
		}
	}
}

// dropTickets makes all tickets void.
func (h *Host) dropTickets() {
	if !mutant("tickets-survive") {
		h.tickets, h.changeAll = nil, true
	}
}

// TakeTickets returns the tickets that were bought since the last call. They are void when [Host.TakeChanges]
// returns all, or the key among the changed ones.
func (h *Host) TakeTickets() []Ticket {
	tickets := h.tickets
	h.tickets = nil
	return tickets
}
