// Package world runs hosts and ledgers through random schedules of faults in virtual time, and looks
// for an instant at which hosts together may use more than there is.
//
// Hosts and ledgers have clocks of their own; messages are late, lost and duplicated; machines stop,
// restart, stand still, leave and are cut off; ledgers stand still, have their clocks set, lose what
// they knew and return to what they knew before. A schedule is determined by its seed.
package world

import (
	"fmt"
	"math/rand/v2"

	"shaperd.dev/shaperd/cluster"
)

// Ledger is a ledger under test, such as *cluster.Ledger or the script of a store.
type Ledger interface {
	Call(now cluster.Time, q *cluster.Request) *cluster.Reply
	Forget(now cluster.Time, host string) bool

	// Save returns a copy of the state.
	Save() any
	// Load puts the ledger into a state that Save returned, or the empty one if it is nil, as another
	// process, named run.
	Load(state any, run string)
}

// Options choose a schedule.
type Options struct {
	Seed   uint64
	Length cluster.Time // of the faults
	Strict bool         // see cluster.Params
	Split  bool         // two ledgers are alive at once
	Many   bool         // buckets, as in some of the others
	Small  bool         // few hosts, buckets and kinds of faults, which follow each other fast
	Faults []Fault      // kinds that happen in a small group; when empty, the seed chooses
	New    func(run string) Ledger

	// After is called after each call, if it is not nil. It returns what is wrong, or "".
	After func(l Ledger, now cluster.Time) string
	// Log gets what happens, if it is not nil.
	Log func(line string)
}

// Invariant is something that no schedule may violate.
type Invariant string

// The invariants.
const (
	Sum       Invariant = "sum"       // hosts together may use no more than there is
	Lent      Invariant = "lent"      // no host takes a bucket for cold of which another may use more than its floor
	Epoch     Invariant = "epoch"     // once an epoch is settled, nobody may use more than its floor by one before
	Forgotten Invariant = "forgotten" // no host is forgotten that is counted
	Plane     Invariant = "plane"     // a plane admits what its host says
	Group     Invariant = "group"     // when faults have ended, hosts find together
	Use       Invariant = "use"       // and use what they want
	Cold      Invariant = "cold"      // and buckets become cold
	Books     Invariant = "ledger"    // what Options.After looks at
)

// Result is what a schedule showed.
type Result struct {
	Violation string    // the first one, or ""
	Broken    Invariant // that it violates
	Worst     int64     // the largest sum of parts of one bucket

	Time       cluster.Time // that passed
	Samples    int64        // at which the sums were computed, of rates
	Sum        float64      // of the sums in all samples, as parts of the whole
	AboveFloor int64        // times that a host could use more than its floor of a rate
	SlotsLent  int64        // times that a host could use more than its floor of slots
	Calls      int64
	Epochs     int64
	Joins      int64 // times that a host came into the group
	Demotions  int64 // times that a host learned that a bucket is cold again
	Leaves     int64 // hosts that have left
	Departed   int64 // units that have left by ticket
	Forgotten  int64
}

// Add adds what another schedule showed. The violation is not taken.
func (r *Result) Add(o *Result) {
	r.Worst = max(r.Worst, o.Worst)
	r.Time += o.Time
	r.Samples += o.Samples
	r.Sum += o.Sum
	r.AboveFloor += o.AboveFloor
	r.SlotsLent += o.SlotsLent
	r.Calls += o.Calls
	r.Epochs += o.Epochs
	r.Joins += o.Joins
	r.Demotions += o.Demotions
	r.Leaves += o.Leaves
	r.Departed += o.Departed
	r.Forgotten += o.Forgotten
}

func (r *Result) String() string {
	return fmt.Sprintf("%.0f hours of a group, %d calls, %d epochs, %d joins, %d leaves, %d forgotten hosts, %d times a bucket was cold again, mean sum %.3f, %d times slots were lent, %d tickets used, worst %.4f",
		r.Time.Duration().Hours(), r.Calls, r.Epochs, r.Joins, r.Leaves, r.Forgotten, r.Demotions, r.Sum/float64(max(1, r.Samples)), r.SlotsLent, r.Departed, parts(r.Worst))
}

// world is one schedule.
type world struct {
	Options
	Result
	random *rand.Rand
	events queue
	now    cluster.Time

	params   cluster.Params
	interval cluster.Time // between the calls of a host
	keys     []string
	index    map[string]int // of keys
	rates    []*rate        // of keys that are of tickets
	machines []*machine
	servers  []*server
	runs     int          // processes of ledgers that were started
	calm     bool         // no more faults
	faults   []Fault      // kinds of those that happen
	pace     cluster.Time // the longest time between two
	loss     float64      // of messages
	copies   float64      // of calls that arrive twice
	changes  float64      // how often a host changes what it wants of a bucket
	busy     []bool       // buckets of which machines may want more than their floor
	eager    []*machine   // while it is calm, these want all of the first buckets, and others nothing
}

// Run runs one schedule.
func Run(o Options) Result {
	w := &world{Options: o, random: rand.New(rand.NewPCG(o.Seed, 1)), index: map[string]int{}}
	w.build()
	w.after(2*cluster.Second, w.fault)
	w.run(o.Length)
	if w.Violation == "" {
		w.settleDown()
	}
	w.Time = w.now
	return w.Result
}

// build chooses the group.
func (w *world) build() {
	leases := []cluster.Time{300 * cluster.Millisecond, cluster.Second, 2 * cluster.Second, 2 * cluster.Second}
	mostHosts, mostKeys := 5, 4
	if w.Small {
		leases, mostHosts, mostKeys = leases[:1], 3, 3
	}
	lease := leases[w.random.IntN(len(leases))]
	w.params = cluster.Params{Hosts: 2 + w.random.IntN(mostHosts-1), Lease: lease, Step: lease / 2, Strict: w.Strict}
	w.interval = lease / 10
	keys := 1 + w.random.IntN(mostKeys)
	switch r := w.random.IntN(100); {
	case w.Small:
	case r < 3 || w.Many:
		keys = 110 // more than fit into one call
	case r < 4:
		keys = 300 // and more events than fit into a reply
	}
	w.changes = 0.15
	if keys > 3 || w.Small && w.chance(0.5) {
		w.changes = 0.01
	}
	if w.Small {
		w.chooseFewFaults()
	} else {
		w.chooseFaults()
	}
	for i := range keys {
		key := fmt.Sprintf("k%03d", i)
		var r *rate
		switch i % 3 {
		case 1:
			key = cluster.SlotsPrefix + key
		case 2:
			key = cluster.TicketsPrefix + key
			r = &rate{every: lease/20 + w.upTo(2*lease)}
			if w.chance(0.3) {
				r.burst = w.upTo(3 * r.every)
			}
		}
		w.keys, w.index[key], w.rates = append(w.keys, key), i, append(w.rates, r)
	}
	w.busy = make([]bool, keys)
	for i := range w.busy {
		w.changeBusy(i)
	}
	sides := 1
	if w.Split {
		sides = 2
	}
	for i := range sides {
		s := &server{world: w, up: true, clock: w.clock(cluster.Second * cluster.Time(1000+i))}
		s.ledger = w.New(w.newRun())
		w.servers = append(w.servers, s)
	}
	machines := w.params.Hosts
	if w.chance(0.3) && machines > 2 {
		machines--
	}
	alone := cluster.Alone(0)
	if w.chance(0.2) {
		alone = cluster.AloneClosed
	}
	for i := range machines {
		w.addMachine(string(rune('a'+i)), alone)
	}
	for _, m := range w.machines {
		w.after(w.upTo(cluster.Second), m.start)
	}
	w.logf("%+v, %d machines, %d keys", w.params, machines, keys)
}

func (w *world) addMachine(name string, alone cluster.Alone) *machine {
	m := &machine{
		world: w, name: name, alone: alone, params: w.params, server: w.servers[0], clock: w.clock(w.upTo(1000 * cluster.Second)),
		plane: newPlane(w.keys), wants: make([]int64, len(w.keys)),
		left: true, // it has never joined
	}
	if w.chance(0.5) {
		m.plane.drain = w.params.Lease / 4
	}
	m.time = m.clock.at(w.now)
	w.machines = append(w.machines, m)
	return m
}

// clock returns a clock that is at most 1 % fast or slow.
func (w *world) clock(offset cluster.Time) clock {
	return clock{offset: offset, ppm: w.random.Int64N(20001) - 10000}
}

func (w *world) newRun() string {
	w.runs++
	return fmt.Sprintf("run%d", w.runs)
}

// run lets events happen for d, and checks after each.
func (w *world) run(d cluster.Time) {
	for end := w.now + d; w.events.first() <= end && w.Violation == ""; {
		e := w.events.pop()
		w.passTo(e.at)
		e.do()
		w.check()
	}
}

// passTo lets time pass to t, and checks at each instant at which a machine takes what it may use
// alone. In between, what machines may use does not rise.
func (w *world) passTo(t cluster.Time) {
	for {
		next := t
		for _, m := range w.machines {
			if m.up && m.aloneAt > w.now && m.aloneAt < next {
				next = m.aloneAt
			}
		}
		w.flow(next)
		w.now = next
		for _, m := range w.machines {
			m.time = m.clock.at(next)
		}
		if next == t {
			return
		}
		w.check()
	}
}

// after makes something happen after d.
func (w *world) after(d cluster.Time, do func()) { w.events.push(w.now+d, do) }

func (w *world) chance(p float64) bool { return w.random.Float64() < p }

func (w *world) upTo(d cluster.Time) cluster.Time { return cluster.Time(w.random.Int64N(int64(d))) }

func (w *world) logf(format string, args ...any) {
	if w.Log != nil {
		w.Log(fmt.Sprintf("%9.3f ", float64(w.now)/float64(cluster.Second)) + fmt.Sprintf(format, args...))
	}
}

// fail records what is wrong. The schedule ends.
func (w *world) fail(broken Invariant, format string, args ...any) {
	if w.Violation == "" {
		w.Broken = broken
		w.Violation = fmt.Sprintf("seed %d at %.3f s: ", w.Seed, float64(w.now)/float64(cluster.Second)) + fmt.Sprintf(format, args...)
		w.logf("%s", w.Violation)
	}
}

// clock is a clock that has been set to anything, and is fast or slow.
type clock struct {
	offset cluster.Time
	ppm    int64
}

func (c clock) at(t cluster.Time) cluster.Time {
	return c.offset + t + t*cluster.Time(c.ppm)/1_000_000
}

// when returns the first time at which the clock shows t.
func (c clock) when(t cluster.Time) cluster.Time {
	at := (t - c.offset) * 1_000_000 / cluster.Time(1_000_000+c.ppm)
	for c.at(at) >= t {
		at--
	}
	for c.at(at) < t {
		at++
	}
	return at
}
