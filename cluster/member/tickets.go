package member

import (
	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/shaper"
)

// ticketDemands tells the host which tickets it wants: as many as units wait for.
type ticketDemands struct {
	host    *cluster.Host
	buckets map[string]*ticketDemand
	retry   cluster.Retry
}

// ticketDemand is what this host needs of one bucket.
type ticketDemand struct {
	shaper.Demand       // in the last sample that had it
	sampled       bool  // in the last sample
	told          int64 // that the host wants
	asked         bool  // since units began to wait
}

func newTicketDemands(h *cluster.Host) *ticketDemands {
	return &ticketDemands{host: h, buckets: map[string]*ticketDemand{}}
}

// begin begins a sample.
func (t *ticketDemands) begin() {
	for _, u := range t.buckets {
		u.sampled, u.Units, u.Waiting = false, 0, 0
	}
}

// add adds what a plane needs of a bucket to the sample.
func (t *ticketDemands) add(name string, d shaper.Demand) {
	u := t.buckets[name]
	if u == nil {
		u = &ticketDemand{}
		t.buckets[name] = u
	}
	u.Demand, u.sampled = d, true
}

// bought records that the host has bought a ticket, of which the last sample did not know.
func (t *ticketDemands) bought(name string) {
	if u := t.buckets[name]; u != nil && u.Units > 0 {
		u.Units--
	}
}

// tell tells the host what it wants, and reports whether it should call at once. A bucket that units wait for
// is told with every call: each asks for tickets.
func (t *ticketDemands) tell(now, interval cluster.Time) (call bool) {
	waits := false
	for name, u := range t.buckets {
		want := int64(u.Units)
		switch {
		case want > 0:
			call, waits = call || !u.asked, waits || u.asked
			u.asked = true
		case u.told == 0:
			if !u.sampled {
				delete(t.buckets, name)
			}
			continue
		default:
			u.asked = false
		}
		u.told = want
		t.host.WantTickets(name, want, max(1, int64(u.Waiting)), cluster.FromDuration(u.Every.Duration()), cluster.FromDuration(u.Burst.Duration()))
	}
	return t.retry.Due(now, interval, waits, waits) || call
}
