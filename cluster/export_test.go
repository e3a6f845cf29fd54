package cluster

import "fmt"

// Overbooked returns the bucket of which hosts have more than the whole, and how much, or "". No hosts
// claim more than they were given. A late call of one that is gone may say what slots it had.
func (l *Ledger) Overbooked(now Time) string {
	for key, b := range l.state.buckets {
		var sum int64
		for name, h := range b.holders {
			m := l.state.members[name]
			if m != nil && h.generation == m.generation && !(b.slots && m.returning) && (b.slots || !l.state.expired(m, now)) {
				sum += h.parts
			}
		}
		if sum > Whole && (!b.slots || sum > Whole+int64(len(l.state.members))) {
			return fmt.Sprintf("%.3f of %s are booked", float64(sum)/float64(Whole), key)
		}
	}
	return ""
}
