package world

import "shaperd.dev/shaperd/cluster"

// crash ends a process, and has another one start after d.
func (w *world) crash(m *machine, d cluster.Time) {
	if !m.up || w.calm {
		return
	}
	m.stop()
	w.after(d+m.plane.drain, m.start)
}

// forget has an operator say that a machine does not exist: one that is off, or one that is not,
// which the ledger must refuse if others count it.
func (w *world) forget(m *machine, s *server, d cluster.Time) {
	if !s.up || w.now < s.pausedUntil || w.calm || m.replaced {
		return
	}
	if m.up {
		if !w.Split && m.host.Status(m.time).Counted && s.ledger.Forget(s.clock.at(w.now), m.name) {
			w.fail(Forgotten, "the ledger forgets %s, which is counted", m.name)
		}
		if w.chance(0.5) {
			return
		}
		w.logf("%s is off", m.name)
		m.stop()
		m.off = true
		w.after(d+w.params.Lease*8, func() {
			m.off = m.replaced
			m.start()
		})
		w.after(w.params.Lease*3, func() { w.forget(m, s, d) })
		return
	}
	if m.off && s.ledger.Forget(s.clock.at(w.now), m.name) {
		w.logf("%s is forgotten", m.name)
		m.left, m.gone = true, true // that is what the operator has promised
		w.Forgotten++
	}
}

// configure starts a machine with wrong parameters, and puts it right after d.
func (w *world) configure(m *machine, d cluster.Time) {
	if !m.up || m.params != w.params {
		return
	}
	if w.chance(0.5) {
		m.params.Hosts++
	} else {
		m.params.Lease *= 2
		if w.chance(0.5) {
			m.params.Lease = w.params.Lease * 9 / 10 // not less: see docs/cluster.md
		}
		m.params.Step = m.params.Lease / 2
	}
	w.logf("%s has wrong parameters", m.name)
	w.crash(m, w.upTo(cluster.Second))
	w.after(d+cluster.Second, func() {
		m.params = w.params
		w.logf("%s has the right parameters", m.name)
		w.crash(m, w.upTo(cluster.Second))
	})
}

// replace puts a machine with another name into the place of one that has left. (Of two ledgers, an
// operator would have to tell the other one.)
func (w *world) replace(m *machine) {
	if m.up || !m.gone || m.replaced || w.Split || len(w.machines) > 2*w.params.Hosts {
		return
	}
	m.off, m.replaced = true, true
	n := w.addMachine(string(rune('a'+len(w.machines))), m.alone)
	n.server = m.server
	w.logf("%s replaces %s", n.name, m.name)
	n.start()
}

// moveSides has a machine call another server, or most machines the same one.
func (w *world) moveSides(m *machine) {
	to := w.servers[w.random.IntN(len(w.servers))]
	m.server = to
	if w.chance(0.3) {
		for _, m := range w.machines {
			if w.chance(0.8) {
				m.server = to
			}
		}
	}
}
