package bpf

import "testing"

// The protocol of table.h and decide.h, by which CPUs that meet a new key at the same time
// make one bucket of those that they made, and none of what they charge is lost, with a
// step for each access to memory. Time stands still; a unit costs 1, and a bucket that
// owes nothing is at 0, drained.
const (
	tablePlaces = 2
	unitsEach   = 2 // that a CPU charges
)

type chargeStep int8

const (
	lookFirst chargeStep = iota
	lookSecond
	putTag
	lookBack  // for one of the same tag that stands before it
	endSecond // in favour of the first
	readSecond
	addToFirst
	checkTag
	addUnit
	checkAgain
	takeBack
	unitsDone
)

// charger is a CPU that charges the key's bucket, and what it knows.
type charger struct {
	step    chargeStep
	place   int8 // the bucket's
	carries int8 // what the one owed that it has ended
	units   int8 // charged
}

// tableMoment is the state of everything.
type tableMoment struct {
	tag      [tablePlaces]bool // it is the key's
	owes     [tablePlaces]int8
	chargers [3]charger
}

// tableExplorer follows all ways that things can go.
type tableExplorer struct {
	once  bool // does not look again at whose the bucket is that it has charged
	known map[tableMoment]bool
	bad   map[string]tableMoment
}

func (e *tableExplorer) explore(m tableMoment) {
	if e.known[m] {
		return
	}
	e.known[m] = true
	busy, units := false, int8(0)
	for i, c := range m.chargers {
		units += c.units
		if c.step == unitsDone {
			continue
		}
		busy = true
		for place := range int8(tablePlaces) {
			next := m
			if c.step == putTag { // where there is more room for it
				next.chargers[i].place = place
			} else if place > 0 {
				break
			}
			e.step(&next, &next.chargers[i])
			e.explore(next)
		}
	}
	if busy {
		return
	}
	buckets, owes := 0, int8(0)
	for place, is := range m.tag {
		if is {
			buckets++
			owes += m.owes[place]
		}
	}
	if buckets != 1 {
		e.bad["not one bucket"] = m
	}
	if owes < units {
		e.bad["charged too little"] = m
	}
}

// step makes one access to memory for a charger.
func (e *tableExplorer) step(m *tableMoment, c *charger) {
	use := func(place int8) { c.place, c.step = place, checkTag }
	switch c.step {
	case lookFirst:
		if c.step = lookSecond; m.tag[0] {
			use(0)
		}
	case lookSecond:
		if c.step = putTag; m.tag[1] {
			use(1)
		}
	case putTag:
		if c.step = lookFirst; !m.tag[c.place] {
			m.tag[c.place] = true
			c.step = lookBack
		}
	case lookBack:
		if c.step = checkTag; c.place == 0 || m.tag[0] {
			c.place, c.step = 0, endSecond
		}
	case endSecond:
		if c.step = checkTag; m.tag[1] {
			m.tag[1] = false
			c.step = readSecond
		}
	case readSecond:
		c.carries, c.step = m.owes[1], addToFirst
	case addToFirst:
		m.owes[c.place] += c.carries
		c.carries, c.step = 0, checkTag
	case checkTag:
		if c.step = lookFirst; m.tag[c.place] {
			c.step = addUnit
		}
	case addUnit:
		m.owes[c.place]++
		c.step = checkAgain
	case checkAgain:
		c.step = takeBack
		if m.tag[c.place] || e.once {
			c.step = lookFirst
			if c.units++; c.units == unitsEach {
				c.step = unitsDone
			}
			c.place = 0
		}
	case takeBack:
		m.owes[c.place]--
		c.step = lookFirst
	}
}

// TestTableProtocol follows every order in which CPUs can charge a key that has no bucket
// yet: in the end it has one, which was charged for each unit.
func TestTableProtocol(t *testing.T) {
	explore := func(once bool, cpus int) *tableExplorer {
		e := &tableExplorer{once: once, known: map[tableMoment]bool{}, bad: map[string]tableMoment{}}
		var m tableMoment
		for i := cpus; i < len(m.chargers); i++ {
			m.chargers[i].step = unitsDone
		}
		e.explore(m)
		return e
	}
	for cpus := 2; cpus <= 3; cpus++ {
		e := explore(false, cpus)
		t.Logf("%d states", len(e.known))
		for what, m := range e.bad {
			t.Errorf("%s: %+v", what, m)
		}
	}
	// The same without the second look is found out.
	if e := explore(true, 2); len(e.bad) == 0 {
		t.Error("this finds no fault in what has one")
	}
}
