package world

import "shaperd.dev/shaperd/cluster"

// howLong returns for how long something fails: up to a second or 15, or until about when something ends
// that a ledger or a host counts from their last call.
func (w *world) howLong() cluster.Time {
	l, g := w.params.Lease, w.params.Step
	switch {
	case w.chance(0.3):
		ends := []cluster.Time{l, l + g, 2 * l, 2*l + g, 2*l + 2*g}
		return max(1, ends[w.random.IntN(len(ends))]+w.upTo(l/4)-l/8)
	case w.chance(0.5):
		return w.upTo(15 * cluster.Second)
	}
	return w.upTo(cluster.Second)
}

// The kinds of faults are 0 to moveSides.
const moveSides = 16

// chooseFaults chooses what fails in this schedule, and how often: some mistakes show only where many other things
// do not happen.
func (w *world) chooseFaults() {
	for kind := range moveSides {
		if w.chance(0.5) {
			w.faults = append(w.faults, kind)
		}
	}
	if w.Split || len(w.faults) == 0 {
		w.faults = append(w.faults, moveSides, moveSides)
	}
	w.pace = []cluster.Time{cluster.Second, 3 * cluster.Second, 6 * cluster.Second}[w.random.IntN(3)]
	w.loss = []float64{0.005, 0.02, 0.1}[w.random.IntN(3)]
}

// fault makes something fail, and the next one follow.
func (w *world) fault() {
	if w.calm {
		return
	}
	w.after(w.upTo(w.pace), w.fault)
	m := w.machines[w.random.IntN(len(w.machines))]
	s := w.servers[w.random.IntN(len(w.servers))]
	long := w.howLong()
	switch w.faults[w.random.IntN(len(w.faults))] {
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
		if w.chance(0.5) { // one that may pass unnoticed
			step = w.upTo(w.params.Step+w.params.Lease/8) - w.params.Lease/16
		}
		w.logf("clock of the ledger steps by %v", step.Duration())
		s.clock.offset += step
		w.passUnnoticed(step)
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
	case moveSides:
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
