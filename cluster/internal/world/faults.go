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
	case w.chance(0.5) && w.Small:
		return w.upTo(2 * l)
	case w.chance(0.5):
		return w.upTo(15 * cluster.Second)
	}
	return w.upTo(cluster.Second)
}

// Fault is a kind of fault.
type Fault int

// The kinds of faults. One is as likely as two.
const (
	Crash        Fault = iota // of a host
	Stall                     // a host stands still
	CutTo                     // a host is cut off to the ledger
	CutFrom                   // from the ledger
	CutOff                    // both
	FailOver                  // to a ledger with an old state, or none
	failOver                  // so, too
	Restart                   // of a ledger, with its state
	StallLedger               // a ledger stands still
	FreezeLedger              // and its clock
	StepClock                 // of a ledger
	CutAll                    // all hosts are cut off
	Leave                     // a host leaves
	Forget                    // an operator says that a host does not exist
	Configure                 // a host has wrong parameters for some time
	Replace                   // a host that is gone
	MoveSides                 // a host calls another ledger
)

// chooseFaults chooses what fails in this schedule, and how often: some mistakes show only where many other things
// do not happen.
func (w *world) chooseFaults() {
	for kind := range MoveSides {
		if w.chance(0.5) {
			w.faults = append(w.faults, kind)
		}
	}
	if w.Split || len(w.faults) == 0 {
		w.faults = append(w.faults, MoveSides, MoveSides)
	}
	w.pace = []cluster.Time{cluster.Second, 3 * cluster.Second, 6 * cluster.Second}[w.random.IntN(3)]
	w.loss = []float64{0.005, 0.02, 0.1}[w.random.IntN(3)]
	w.copies = 0.02
}

// chooseFewFaults is chooseFaults in a small group: there are fewer kinds, and they follow each other faster.
func (w *world) chooseFewFaults() {
	w.faults = w.Faults
	if len(w.faults) == 0 {
		for range 1 + w.random.IntN(3) {
			w.faults = append(w.faults, Fault(w.random.IntN(int(MoveSides))))
		}
	}
	if w.Split {
		w.faults = append(w.faults[:len(w.faults):len(w.faults)], MoveSides)
	}
	w.pace = w.params.Lease * []cluster.Time{1, 3, 10}[w.random.IntN(3)]
	w.loss = []float64{0.005, 0.1, 0.4}[w.random.IntN(3)]
	w.copies = []float64{0.02, 0.3}[w.random.IntN(2)]
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
	case Crash:
		w.logf("%s crashes for %v", m.name, long.Duration())
		w.crash(m, long)
	case Stall:
		w.logf("%s stands still for %v", m.name, long.Duration())
		m.pause(long)
	case CutTo:
		w.logf("%s is cut off to the ledger for %v", m.name, long.Duration())
		w.cut(&m.cutTo, long)
	case CutFrom:
		w.logf("%s is cut off from the ledger for %v", m.name, long.Duration())
		w.cut(&m.cutFrom, long)
	case CutOff:
		w.logf("%s is cut off for %v", m.name, long.Duration())
		w.cut(&m.cutTo, long)
		w.cut(&m.cutFrom, long)
	case FailOver, failOver:
		s.failOver(long / 4)
	case Restart:
		s.restart(long / 4)
	case StallLedger:
		w.logf("ledger stands still for %v", long.Duration())
		s.pause(long, false)
	case FreezeLedger:
		w.logf("ledger stands still for %v, and its clock", long.Duration())
		s.pause(long, true)
	case StepClock:
		step := w.upTo(20*cluster.Second) - 8*cluster.Second
		if w.chance(0.5) { // one that may pass unnoticed
			step = w.upTo(w.params.Step+w.params.Lease/8) - w.params.Lease/16
		}
		s.step(step)
	case CutAll:
		w.logf("all are cut off for %v", long.Duration())
		for _, m := range w.machines {
			d := long + w.upTo(cluster.Second/10)
			w.cut(&m.cutTo, d)
			w.cut(&m.cutFrom, d)
		}
	case Leave:
		m.leave()
	case Forget:
		w.forget(m, s, long)
	case Configure:
		w.configure(m, long)
	case Replace:
		w.replace(m)
	case MoveSides:
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
