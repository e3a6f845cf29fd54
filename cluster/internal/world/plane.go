package world

import (
	"slices"

	"shaperd.dev/shaperd/cluster"
)

// plane is what enforces the parts of a machine, as a plane of the daemon does: it knows nothing but
// what it was told.
type plane struct {
	lease   cluster.Lease
	keys    []string
	parts   []int64 // of hot buckets
	hot     []bool
	rests   [][]rest
	slots   []int64 // parts that are in use, of buckets of slots
	tickets [][]*heldTicket
	drain   cluster.Time // how long units that were admitted may take to leave
}

// rest is what still leaves at the rate at which it was admitted.
type rest struct {
	parts int64
	until cluster.Time
}

func newPlane(keys []string) plane {
	n := len(keys)
	return plane{keys: keys, parts: make([]int64, n), hot: make([]bool, n), rests: make([][]rest, n), slots: make([]int64, n), tickets: make([][]*heldTicket, n)}
}

// use returns what may leave of bucket i at now, by the machine's clock.
func (p *plane) use(i int, now cluster.Time) int64 {
	use := p.admits(i, now)
	if cluster.IsSlots(p.keys[i]) {
		return max(use, p.slots[i])
	}
	for _, r := range p.rests[i] {
		if now < r.until {
			use = max(use, r.parts)
		}
	}
	if now >= p.lease.End && now < p.lease.End+p.drain && !cluster.IsTickets(p.keys[i]) {
		use = max(use, p.given(i))
	}
	return use
}

// admits returns what is admitted to bucket i at now.
func (p *plane) admits(i int, now cluster.Time) int64 {
	switch {
	case cluster.IsSlots(p.keys[i]):
		if now >= p.lease.AloneAt && p.lease.Alone == 0 {
			return 0
		}
		return p.given(i)
	case now < p.lease.End:
		return p.given(i)
	case now < p.lease.AloneAt:
		return min(p.rest(i), p.lease.Between)
	}
	return p.lease.Alone
}

// rest is given, when the lease has ended.
func (p *plane) rest(i int) int64 {
	if p.hot[i] {
		return p.lease.Rest(p.parts[i])
	}
	return p.given(i)
}

func (p *plane) given(i int) int64 {
	switch {
	case p.hot[i]:
		return p.parts[i]
	case cluster.IsSlots(p.keys[i]):
		return p.lease.SlotsCold
	}
	return p.lease.Cold
}

// unsettled reports whether more of bucket i may leave than is admitted.
func (p *plane) unsettled(i int, now cluster.Time) bool { return p.use(i, now) > p.admits(i, now) }

// inUse returns the most of bucket i that may be in use.
func (p *plane) inUse(i int, now cluster.Time) int64 {
	switch {
	case cluster.IsSlots(p.keys[i]):
		return p.slots[i]
	case p.unsettled(i, now):
		return cluster.Whole
	}
	return 0
}

// churn has connections end, and others begin as far as there are slots.
func (m *machine) churn() {
	for i, key := range m.keys {
		if !cluster.IsSlots(key) {
			continue
		}
		slots := &m.plane.slots[i]
		if *slots > 0 && m.chance(0.3) {
			*slots = m.random.Int64N(*slots)
		}
		if m.calm && m.wants[i] == 0 {
			*slots = 0
		}
		if room := min(m.wants[i], m.plane.admits(i, m.time)) - *slots; room > 0 && m.chance(0.7) && !m.leaving {
			*slots += m.random.Int64N(room + 1)
		}
	}
}

// apply tells the plane what the host may use now. What was in use goes on for up to drain.
func (m *machine) apply() {
	defer m.takeTickets()
	now := m.time
	hot, cold, all := m.host.TakeChanges()
	lease := m.host.Lease()
	if !all && len(hot)+len(cold) == 0 && lease == m.plane.lease {
		return
	}
	p := &m.plane
	before := m.before[:0]
	for i := range m.keys {
		before = append(before, p.admits(i, now))
	}
	m.before = before
	inUse := func(i int) bool { return p.hot[i] && now < p.lease.AloneAt || m.inUse(i) }
	for i := range m.keys {
		m.busyBefore[i] = inUse(i)
	}
	if all {
		clear(p.hot)
		clear(p.tickets)
	}
	for _, key := range cold {
		p.hot[m.index[key]], p.tickets[m.index[key]] = false, nil
		m.Demotions++
	}
	for _, key := range hot {
		i := m.index[key]
		p.parts[i], _ = m.host.Parts(key)
		p.hot[i], p.tickets[i] = true, nil
	}
	p.lease = lease
	m.aloneAt = m.clock.when(lease.AloneAt)
	for i, key := range m.keys {
		use := p.admits(i, now)
		if want := m.host.Use(key, now); use != want {
			m.fail(Plane, "%s: its plane admits %d parts of %s, and its host says %d", m.name, use, key, want)
		}
		if use < before[i] && m.plane.drain > 0 && m.busyBefore[i] && m.rates[i] == nil && !cluster.IsSlots(key) {
			p.rests[i] = slices.DeleteFunc(p.rests[i], func(r rest) bool { return now >= r.until })
			p.rests[i] = append(p.rests[i], rest{before[i], now + m.upTo(p.drain)})
		}
	}
}
