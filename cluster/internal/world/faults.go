package world

import "shaperd.dev/shaperd/cluster"

// fault makes something fail, for up to a second or 15, and the next one follow.
func (w *world) fault() {
	if w.calm {
		return
	}
	w.after(w.upTo(3*cluster.Second), w.fault)
	m := w.machines[w.random.IntN(len(w.machines))]
	s := w.servers[w.random.IntN(len(w.servers))]
	long := w.upTo(cluster.Second)
	if w.chance(0.4) {
		long = w.upTo(15 * cluster.Second)
	}
	switch w.random.IntN(17) {
	case 0:
		w.logf("%s crashes for %v", m.name, long.Duration())
		w.crash(m, long)
	case 1:
		w.logf("%s stands still for %v", m.name, long.Duration())
		m.pause(long)
	case 2:
		w.logf("%s is cut off to the ledger for %v", m.name, long.Duration())
		w.cut(&m.cutTo, long)
	case 3:
		w.logf("%s is cut off from the ledger for %v", m.name, long.Duration())
		w.cut(&m.cutFrom, long)
	case 4:
		w.logf("%s is cut off for %v", m.name, long.Duration())
		w.cut(&m.cutTo, long)
		w.cut(&m.cutFrom, long)
	case 5, 6:
		s.failOver(long / 4)
	case 7:
		s.restart(long / 4)
	case 8:
		w.logf("ledger stands still for %v", long.Duration())
		s.pause(long, false)
	case 9:
		w.logf("ledger stands still for %v, and its clock", long.Duration())
		s.pause(long, true)
	case 10:
		step := w.upTo(20*cluster.Second) - 8*cluster.Second
		w.logf("clock of the ledger steps by %v", step.Duration())
		s.clock.offset += step
	case 11:
		w.logf("all are cut off for %v", long.Duration())
		for _, m := range w.machines {
			d := long + w.upTo(cluster.Second/10)
			w.cut(&m.cutTo, d)
			w.cut(&m.cutFrom, d)
		}
	case 12:
		m.leave()
	case 13:
		w.forget(m, s, long)
	case 14:
		w.configure(m, long)
	case 15:
		w.replace(m)
	case 16:
		w.moveSides(m)
	}
	for i := range w.busy {
		if w.chance(0.1) {
			w.changeBusy(i)
		}
	}
}

// changeBusy decides whether machines may want more than their floor of a bucket.
func (w *world) changeBusy(i int) { w.busy[i] = w.chance(0.75) }

func (w *world) cut(until *cluster.Time, d cluster.Time) { *until = max(*until, w.now+d) }
