package world

import "shaperd.dev/shaperd/cluster"

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
	w.hog = on[w.random.IntN(len(on))]
	w.run(w.params.Lease*10 + 10*cluster.Second)
	w.startCount()
	w.run(w.params.Lease * 20)
	w.expectTogether(on)
	if w.params.Lease > cluster.Second/2 || w.Violation != "" {
		return
	}
	w.hog = nil
	w.run(w.params.Lease*30 + 5*cluster.Second)
	for _, m := range on {
		for _, key := range w.keys {
			if cluster.IsSlots(key) && m.host.Status(m.time).Live < w.params.Hosts {
				continue // a host that is away may have some
			}
			if _, hot := m.host.Parts(key); hot {
				w.fail("%s is still hot at %s", key, m.name)
				return
			}
		}
	}
}

// expectTogether fails if not all machines are in the group, or the one that wants all has less.
func (w *world) expectTogether(on []*machine) {
	for _, m := range on {
		if w.Violation != "" {
			return
		}
		s := m.host.Status(m.time)
		if !s.Joined || !s.Counted || s.Live < len(on) {
			s.Shares = nil
			w.fail("%s has not come into the group of %d: %+v", m.name, len(on), s)
		}
		if m == w.hog {
			w.expectAll(m, s.Live)
		}
	}
}

// hogged is how many of the first buckets the hog wants.
const hogged = 3

// expectAll fails if m, which alone wants buckets, does not get them.
func (w *world) expectAll(m *machine, live int) {
	for i, key := range w.keys[:min(hogged, len(w.keys))] {
		if r := w.rates[i]; r != nil {
			w.expectUnits(m, r, live)
			continue
		}
		want := cluster.Whole * int64(live) / int64(w.params.Hosts) * 95 / 100
		if cluster.IsSlots(key) && live < w.params.Hosts {
			want = 0 // a host that is away may have all
		}
		if use := m.plane.admits(i, m.time); use < want {
			w.fail("%s, which alone wants all, may use %.3f instead of %.3f of %s%s", m.name, parts(use), parts(want), key, w.describe(i))
		}
	}
}

// demandCalmly tells the host what the machine wants while it is calm, from time to time again.
func (m *machine) demandCalmly() {
	for i, key := range m.keys {
		want := int64(0)
		if m == m.hog && i < hogged {
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
