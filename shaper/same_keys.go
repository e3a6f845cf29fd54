package shaper

import (
	"reflect"
	"slices"
)

// CountsSameKeys reports whether p and q count the connections of every flow under the same
// keys: the same limits count connections, with the same matches and keys and in the same
// order. Their values may differ.
func (p *Policy) CountsSameKeys(q *Policy) bool {
	same := slices.EqualFunc(p.origins, q.origins, func(a, b origin) bool { return a.name == b.name && a.id == b.id })
	i, j := 0, 0
	for ; same; i, j = i+1, j+1 {
		i, j = p.nextCounting(i), q.nextCounting(j)
		if i == len(p.limits) || j == len(q.limits) {
			return i == len(p.limits) && j == len(q.limits)
		}
		a, b := &p.limits[i], &q.limits[j]
		byTable := a.Key&KeyASN != 0 || len(a.Match.ASN) > 0 || len(a.Except.ASN) > 0 || a.Key&KeyCountry != 0 || len(a.Match.Country) > 0
		if len(a.Match.Group)+len(a.Except.Group) > 0 { // whose sources may have changed
			return false
		}
		same = a.Name == b.Name && a.SlotFor.InTurns() == b.SlotFor.InTurns() && a.Key == b.Key && a.TLV == b.TLV && a.IPv4Prefix == b.IPv4Prefix && a.IPv6Prefix == b.IPv6Prefix &&
			a.Direction == b.Direction && reflect.DeepEqual(a.Match, b.Match) && reflect.DeepEqual(a.Except, b.Except) && (!byTable || p.asns == q.asns)
	}
	return false
}

// nextCounting returns the first limit from i on that counts connections, or the number
// of limits.
func (p *Policy) nextCounting(i int) int {
	for i < len(p.limits) && !p.limits[i].CountsConnections() {
		i++
	}
	return i
}
