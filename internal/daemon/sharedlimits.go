package daemon

import (
	"cmp"
	"slices"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/shaper"
)

// maxShownBuckets is the maximum number of buckets of a limit that are shown: those of which this host has
// most.
const maxShownBuckets = 10

// unkeyedShares returns the names of the buckets of shared limits of p that have no key.
func unkeyedShares(n sharedNames, p *shaper.Policy) (names []string) {
	for i := range p.Len() {
		l, id := p.Limit(i), p.State(i).ID
		if !l.Shared || l.Key != 0 {
			continue
		}
		if l.Rate > 0 || l.Packets.N > 0 {
			names = append(names, n.nameOf(p, shaper.Key{Limit: id}, false))
		}
		if l.NewConnections.N > 0 {
			names = append(names, n.nameOf(p, shaper.Key{Limit: id + 1}, false))
		}
		if l.HasPool() {
			names = append(names, n.nameOf(p, shaper.Key{Limit: id}, true))
		}
	}
	return names
}

// describeLimits adds the shared limits of p. cold are the parts of a bucket that is not hot, and coldSlots those of
// a pool; shares are those of hot ones, and of the buckets and pools of limits without key. slots returns how many of
// the slots of a limit this host may use with parts of a pool.
func describeLimits(s *api.Shared, n sharedNames, p *shaper.Policy, cold, coldSlots int64, shares []cluster.ShareStatus, slots func(pool shaper.SlotPool, parts int64) int) {
	byLimit, pools := map[int]*api.SharedLimit{}, slotPools(p, s.Hosts)
	for i := range p.Len() {
		l := p.Limit(i)
		if !l.Shared {
			continue
		}
		to := &api.SharedLimit{
			Limit: l.Name, Key: l.KeyText(), Rate: float64(l.Rate) / 8, Packets: l.Packets.PerSecond(), NewConnections: l.NewConnections.PerSecond(),
			MaxConnections: l.MaxConnections, HostConnections: l.MaxConnections / s.Hosts, ColdShare: ratio(cold), Buckets: []api.SharedBucket{},
		}
		if l.HasPool() {
			to.HostConnections = slots(pools[l.Name], coldSlots)
		}
		byLimit[i] = to
	}
	for _, h := range shares {
		key, i, ok := n.parse(p, h.Key)
		to := byLimit[i]
		if !ok || to == nil { // of an earlier policy, or of another host's
			continue
		}
		if h.Hot {
			to.HotBuckets++
		}
		if len(to.Buckets) >= maxShownBuckets {
			continue
		}
		b := api.SharedBucket{
			Name: h.Key, Key: p.DescribeKey(i, key), NewConnections: key.Limit != p.State(i).ID, Slots: cluster.IsSlots(h.Key), Hot: h.Hot,
			Share: ratio(h.Parts), Want: ratio(h.Want), Short: h.Short, Tight: h.Tight, Holders: []api.SharedHolder{},
		}
		if cluster.IsTickets(h.Key) && h.Hot && h.Parts == 0 {
			b.Tickets, b.Share, b.Want = true, float64(s.Live)/float64(s.Hosts), 0
		}
		if b.Slots {
			b.Share = float64(slots(pools[to.Limit], h.Parts)) / float64(to.MaxConnections)
			if b.Hot {
				b.Want = slotsRatio(to, pools[to.Limit], h.Want)
			}
		}
		to.Buckets = append(to.Buckets, b)
	}
	for _, l := range byLimit {
		s.Limits = append(s.Limits, *l)
	}
	slices.SortFunc(s.Limits, func(a, b api.SharedLimit) int { return cmp.Compare(a.Limit, b.Limit) })
}

// slotsRatio is the fraction of the slots of l that a host has with parts of the pool.
func slotsRatio(l *api.SharedLimit, pool shaper.SlotPool, parts int64) float64 {
	return float64(pool.Slots(uint32(parts))) / float64(l.MaxConnections)
}

// ratio is the fraction of the whole that parts are.
func ratio(parts int64) float64 { return float64(parts) / shaper.Whole }

// bucketNames returns the names of the buckets in s.
func bucketNames(s *api.Shared) (names []string) {
	for i := range s.Limits {
		for j := range s.Limits[i].Buckets {
			names = append(names, s.Limits[i].Buckets[j].Name)
		}
	}
	return names
}

// slotPools returns the slots that hosts share now, by the names of limits.
func slotPools(p *shaper.Policy, hosts int) map[string]shaper.SlotPool {
	pools := map[string]shaper.SlotPool{}
	for i := range p.Len() {
		if l := p.Limit(i); l.HasPool() {
			pools[l.Name] = l.Pool(p.State(i), hosts)
		}
	}
	return pools
}

// describeHolders adds what the ledger gives hosts of the buckets in s.
func describeHolders(s *api.Shared, shot *cluster.Snapshot, pools map[string]shaper.SlotPool) {
	holders := map[string][]cluster.HolderStatus{}
	for _, b := range shot.Buckets {
		holders[b.Key] = b.Holders
	}
	for i := range s.Limits {
		pool := pools[s.Limits[i].Limit]
		for j := range s.Limits[i].Buckets {
			b := &s.Limits[i].Buckets[j]
			if b.Tickets {
				continue
			}
			for _, h := range holders[b.Name] {
				to := api.SharedHolder{Host: h.Host, Share: ratio(h.Parts) * float64(s.Live) / float64(s.Hosts), Want: ratio(h.Want), Weight: h.Weight}
				if b.Slots {
					to.Share, to.Want = slotsRatio(&s.Limits[i], pool, h.Parts), slotsRatio(&s.Limits[i], pool, h.Want)
				}
				b.Holders = append(b.Holders, to)
			}
		}
	}
}
