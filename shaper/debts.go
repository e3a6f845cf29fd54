package shaper

import (
	"cmp"
	"net/netip"
	"slices"

	"shaperd/leaky"
)

// Debt is what one bucket owes, said without what holds in one process alone: another
// one can go on where this one ended.
type Debt struct {
	Limit          string
	NewConnections bool // of the bucket of new connections
	Source         netip.Addr
	ASN            uint32
	Port           uint16
	Listen         string
	Bytes, Packets uint64 // backlog
}

// Debts returns what buckets owe at now, those with the longest way to go first, at
// most so many. Buckets of single connections are left out: those end.
func (s *Shaper) Debts(most int, now leaky.Time) []Debt {
	s.mu.Lock()
	defer s.mu.Unlock()
	type owing struct {
		debt  Debt
		until leaky.Time
	}
	byID := map[uint32]*State{}
	for _, st := range s.states {
		byID[st.ID] = st
	}
	listeners := map[uint16]string{}
	for _, l := range s.listeners {
		listeners[l.ID] = l.Name
	}
	var all []owing
	s.table.each(func(k *Key, b *leaky.Bucket) {
		st := byID[k.Limit&^1]
		if b.Drained(now) || k.Connection != 0 || st == nil {
			return
		}
		shape := st.shape
		if k.Limit&1 != 0 {
			shape = st.newConns
		}
		if shape == nil {
			return
		}
		d := Debt{Limit: st.Name, NewConnections: k.Limit&1 != 0, ASN: k.ASN, Port: k.Port, Listen: listeners[k.Listen]}
		if k.Source != [16]byte{} {
			d.Source = netip.AddrFrom16(k.Source)
		}
		d.Bytes, d.Packets = b.Backlog(shape, now)
		if d.Bytes|d.Packets != 0 {
			all = append(all, owing{d, b.Until()})
		}
	})
	slices.SortFunc(all, func(a, b owing) int { return cmp.Compare(b.until, a.until) })
	var debts []Debt
	for _, o := range all[:min(len(all), most)] {
		debts = append(debts, o.debt)
	}
	return debts
}

// Restore has buckets of p owe what they owed since ago, less what has drained
// meanwhile. Debts of limits that p does not have are forgotten.
func (s *Shaper) Restore(p *Policy, debts []Debt, ago leaky.Time, now leaky.Time) {
	for _, d := range debts {
		i := p.Find(d.Limit)
		if i < 0 {
			continue
		}
		k := Key{Limit: p.states[i].ID, ASN: d.ASN, Port: d.Port}
		shape := &p.shapes[i]
		if d.NewConnections {
			k.Limit++
			shape = &p.newConns[i]
		}
		if d.Source.IsValid() {
			k.Source = d.Source.As16()
		}
		if d.Listen != "" {
			k.Listen = s.Listener(d.Listen).ID
		}
		// Debt drains from when it was written down: charged then, it has.
		var b leaky.Bucket
		b.Charge(shape, d.Bytes, 0, now)
		b.Charge(shape, 0, d.Packets, now)
		b.Age(ago)
		s.CheckIn(k, b, now)
	}
}
