package bpf

import "testing"

// The protocol of table.h and decide.h, by which CPUs that meet a new key at the same time
// make one bucket of those that they made, none of what they charge is lost, and nothing is
// inherited of what the key owes whose place it gets; with a step for each access to memory.
// Time stands still; a unit costs 1, and a bucket that owes nothing is at 0, drained.
const (
	tablePlaces = 2
	unitsEach   = 2  // that a CPU charges
	mostOwed    = 10 // by a key, more than is charged here
	slowUnit    = 50 // of the key that was there before
)

// tableTag is whose a place is.
type tableTag int8

const (
	nobody tableTag = iota
	theOther
	changing
	theKey
)

type chargeStep int8

const (
	lookFirst chargeStep = iota
	lookSecond
	claim
	setDebt
	putTag
	lookBack  // for one of the same tag that stands before it
	endSecond // in favour of the first
	readSecond
	freeSecond
	addToFirst
	checkTag
	addUnit
	checkAgain
	takeBack
	unitsDone
)

// charger is a CPU that charges the key's bucket, and what it knows. The last one charges
// theOther key's, which stands where there is room.
type charger struct {
	step    chargeStep
	place   int8 // the bucket's
	carries int8 // what the one owed that it has ended
	units   int8 // charged
	empty   bool // the place it has claimed was nobody's
}

// tableMoment is the state of everything.
type tableMoment struct {
	tag      [tablePlaces]tableTag
	owes     [tablePlaces]int8
	chargers [4]charger
}

// tableFault is what is left out of the protocol, to see that it is missed.
type tableFault int8

const (
	sound     tableFault = iota
	looksOnce            // not again at whose the bucket is that was charged
	tagFirst             // the tag stands before what the bucket owes
	takesBack            // a charge, whoever has wiped it out
)

// tableExplorer follows all ways that things can go.
type tableExplorer struct {
	fault tableFault
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
		if i < len(m.chargers)-1 {
			units += c.units
		}
		if c.step == unitsDone {
			continue
		}
		busy = true
		for place := range int8(tablePlaces) {
			next := m
			if c.step == claim { // where there is more room for it
				next.chargers[i].place = place
			} else if place > 0 {
				break
			}
			if i == len(m.chargers)-1 {
				e.stepOfAnother(&next, &next.chargers[i])
			} else {
				e.step(&next, &next.chargers[i])
			}
			e.explore(next)
		}
	}
	if busy {
		return
	}
	buckets, owes := 0, int8(0)
	for place, is := range m.tag {
		if is == theKey {
			buckets++
			owes += m.owes[place]
		}
	}
	if buckets != 1 {
		e.bad["not one bucket"] = m
	}
	if owes < units+mostOwed {
		e.bad["charged too little"] = m
	}
	if owes > units+2*mostOwed+int8(len(m.chargers)) { // some units are charged twice
		e.bad["owes for another"] = m
	}
}

// step makes one access to memory for a charger.
func (e *tableExplorer) step(m *tableMoment, c *charger) {
	use := func(place int8) { c.place, c.step = place, checkTag }
	switch c.step {
	case lookFirst:
		if c.step = lookSecond; m.tag[0] == theKey {
			use(0)
		}
	case lookSecond:
		if c.step = claim; m.tag[1] == theKey {
			use(1)
		}
	case claim:
		if c.step = lookFirst; m.tag[c.place] <= theOther {
			c.empty = m.tag[c.place] == nobody
			m.tag[c.place] = changing
			if c.step = setDebt; e.fault == tagFirst {
				m.tag[c.place] = theKey
			}
		}
	case setDebt: // what was charged since an empty place was left is somebody's still
		if !c.empty {
			m.owes[c.place] = 0
		}
		m.owes[c.place] += mostOwed
		c.empty, c.step = false, putTag
	case putTag:
		if m.tag[c.place] == changing {
			m.tag[c.place] = theKey
		}
		c.step = lookBack
	case lookBack:
		if c.step = checkTag; c.place == 0 || m.tag[0] == theKey {
			c.place, c.step = 0, endSecond
		}
	case endSecond:
		if c.step = checkTag; m.tag[1] == theKey {
			m.tag[1] = changing
			c.step = readSecond
		}
	case readSecond:
		c.carries, c.step = min(m.owes[1]-mostOwed, mostOwed), freeSecond
		m.owes[1] = 0
	case freeSecond:
		m.tag[1] = nobody
		c.step = addToFirst
	case addToFirst:
		m.owes[c.place] += c.carries
		c.carries, c.step = 0, checkTag
	case checkTag:
		if c.step = lookFirst; m.tag[c.place] == theKey {
			c.step = addUnit
		}
	case addUnit:
		m.owes[c.place]++
		c.step = checkAgain
	case checkAgain:
		c.step = takeBack
		if m.tag[c.place] == theKey || e.fault == looksOnce {
			c.step = lookFirst
			if c.units++; c.units == unitsEach {
				c.step = unitsDone
			}
			c.place = 0
		}
	case takeBack:
		if m.owes[c.place] >= 1 {
			m.owes[c.place]--
		}
		c.step = lookFirst
	}
}

// stepOfAnother does the same for one that charges the key that was there before a unit. It
// found it in the table, and looks for no other place.
func (e *tableExplorer) stepOfAnother(m *tableMoment, c *charger) {
	switch c.step {
	case checkTag:
		if c.step = unitsDone; m.tag[c.place] == theOther {
			c.step = addUnit
		}
	case addUnit:
		m.owes[c.place] += slowUnit
		c.step = checkAgain
	case checkAgain:
		if c.step = unitsDone; m.tag[c.place] != theOther {
			c.step = takeBack
		}
	case takeBack:
		if m.owes[c.place] >= slowUnit || e.fault == takesBack {
			m.owes[c.place] -= slowUnit
		}
		c.step = unitsDone
	}
}

// TestTableProtocol follows every order in which CPUs can charge a key that has no bucket
// yet, while one charges the key whose place it gets: in the end it has one, which was
// charged for each unit, and for nothing of the other's.
func TestTableProtocol(t *testing.T) {
	explore := func(fault tableFault, cpus int, place int8) *tableExplorer {
		e := &tableExplorer{fault: fault, known: map[tableMoment]bool{}, bad: map[string]tableMoment{}}
		var m tableMoment
		for i := cpus; i < len(m.chargers); i++ {
			m.chargers[i].step = unitsDone
		}
		if place >= 0 {
			m.tag[place], m.owes[place] = theOther, slowUnit
			m.chargers[len(m.chargers)-1] = charger{step: checkTag, place: place}
		}
		e.explore(m)
		return e
	}
	for cpus := 2; cpus <= 3; cpus++ {
		for place := int8(-1); place < tablePlaces; place++ {
			e := explore(sound, cpus, place)
			t.Logf("%d states", len(e.known))
			for what, m := range e.bad {
				t.Errorf("%s: %+v", what, m)
			}
		}
	}
	// The same without one of its rules is found out.
	for _, fault := range []tableFault{looksOnce, tagFirst, takesBack} {
		if len(explore(fault, 2, 0).bad)+len(explore(fault, 2, 1).bad) == 0 {
			t.Errorf("this finds no fault in what has one, %d", fault)
		}
	}
}
