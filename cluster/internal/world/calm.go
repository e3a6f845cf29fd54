package world

import (
	"slices"

	"shaperd.dev/shaperd/cluster"
)

// settleDown has all faults end, and looks whether hosts find together, follow demand, and make
// buckets cold again.
func (w *world) settleDown() {
	w.calm = true
	for _, s := range w.servers {
		s.up, s.pausedUntil = true, 0
		s.resume()
	}
	var on []*machine
	for _, m := range w.machines {
		if m.replaced {
			continue
		}
		if m.leaving || m.params != w.params {
			m.stop()
		}
		m.off, m.params, m.server = false, w.params, w.servers[0]
		m.cutTo, m.cutFrom, m.pausedUntil = 0, 0, 0
		m.resume()
		m.start()
		on = append(on, m)
	}
	w.eager = on
	w.run(together(w.params))
	w.expectTogether(on)
	w.eager = []*machine{on[w.random.IntN(len(on))]}
	w.run(followed(w.params))
	w.expectTogether(on)
	w.startCount()
	w.run(w.params.Lease * 20)
	w.expectUnits()
	if w.params.Lease > cluster.Second/2 || w.Violation != "" {
		return
	}
	w.eager = nil
	w.run(w.params.Lease*30 + 5*cluster.Second)
	for _, m := range on {
		for _, key := range w.keys {
			if cluster.IsSlots(key) && m.host.Status(m.time).Live < w.params.Hosts {
				continue // a host that is away may have some
			}
			if _, hot := m.host.Parts(key); hot {
				w.fail(Cold, "%s is still hot at %s", key, m.name)
				return
			}
		}
	}
}

// together is how long after the last fault all hosts are in the group and use what there is: messages are late by up
// to 4 s, and the ledger may have to wait for hosts with twice the lease. followed is how long it takes after a change
// of demand.
func together(p cluster.Params) cluster.Time { return 10*p.Lease + 5*cluster.Second }
func followed(p cluster.Params) cluster.Time { return 2*p.Lease + cluster.Second }

// expectTogether fails if not all machines are in the group, or those that want all have less.
func (w *world) expectTogether(on []*machine) {
	for _, m := range on {
		if w.Violation != "" {
			return
		}
		if s := m.host.Status(m.time); !s.Joined || !s.Counted || s.Live < len(on) {
			s.Shares = nil
			w.fail(Group, "%s has not come into the group of %d: %+v", m.name, len(on), s)
		}
	}
	live := on[0].host.Status(on[0].time).Live
	for i, key := range w.keys[:min(wanted, len(w.keys))] {
		if w.rates[i] != nil {
			continue
		}
		var use int64
		for _, m := range w.eager {
			use += m.plane.admits(i, m.time)
		}
		want := cluster.Whole * int64(live) / int64(w.params.Hosts) * 95 / 100
		if cluster.IsSlots(key) && live < w.params.Hosts {
			want = 0 // a host that is away may have all
		}
		if use < want {
			w.fail(Use, "%d hosts want all, and may use %.3f instead of %.3f of %s%s", len(w.eager), parts(use), parts(want), key, w.describe(i))
		}
	}
}

// wanted is how many of the first buckets the eager want.
const wanted = 3

// demandCalmly tells the host what the machine wants while it is calm, from time to time again.
func (m *machine) demandCalmly() {
	for i, key := range m.keys {
		want := int64(0)
		if i < wanted && slices.Contains(m.eager, m) {
			want = cluster.Whole
		}
		if m.rates[i] != nil {
			m.wants[i] = min(want, 10)
			continue
		}
		if want != m.wants[i] || m.chance(0.3) {
			m.wants[i] = want
			m.host.Want(key, want, 1)
			m.host.Lower(key, want)
		}
	}
	m.wantTickets(0.3)
	m.apply()
}
