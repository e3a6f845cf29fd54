package bpf

import "testing"

// The protocol of buckets.h and decide.h, by which CPUs that charge a new key at the same time
// merge the buckets that they insert, lose no charges, and do not charge it for the units of the
// evicted key; with one step per memory access. Time stands still, a unit costs 1, and a
// drained bucket is at 0.
const (
	tableEntries = 2
	unitsEach    = 2  // charged by each CPU
	maxOwed      = 10 // backlog that a new key inherits, more than is charged here
	slowUnit     = 50 // cost of a unit of the evicted key
)

// tableTag is the tag of an entry.
type tableTag int8

const (
	tagEmpty tableTag = iota
	tagOther
	tagChanging
	tagKey
)

type chargeStep int8

const (
	lookFirst chargeStep = iota
	lookSecond
	claim
	setDebt
	putTag
	lookBack  // for an earlier duplicate
	endSecond // merge the second into the first
	readSecond
	freeSecond
	addToFirst
	checkTag
	addUnit
	recheckTag
	refundUnit
	unitsDone
)

// charger is a CPU that charges the key's bucket, with its local state. The last one charges
// the other key's bucket, which is evicted.
type charger struct {
	step    chargeStep
	entry   int8 // entry of the bucket
	carried int8 // backlog of the duplicate that it has removed
	units   int8 // units charged so far
	empty   bool // the claimed entry was empty
}

// tableState is the state of memory and all CPUs.
type tableState struct {
	tag      [tableEntries]tableTag
	backlog  [tableEntries]int8
	chargers [4]charger
}

// tableFault is a fault injected into the protocol, which the test must detect.
type tableFault int8

const (
	sound            tableFault = iota
	noRecheck                   // the tag is not checked again after a charge
	tagBeforeBacklog            // the tag is set before the backlog
	blindRefund                 // a charge is refunded even if the entry was reset
)

// tableExplorer explores all interleavings.
type tableExplorer struct {
	fault tableFault
	known map[tableState]bool
	bad   map[string]tableState
}

func (e *tableExplorer) explore(m tableState) {
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
		for entry := range int8(tableEntries) {
			next := m
			if c.step == claim { // tries both entries
				next.chargers[i].entry = entry
			} else if entry > 0 {
				break
			}
			if i == len(m.chargers)-1 {
				e.stepOther(&next, &next.chargers[i])
			} else {
				e.step(&next, &next.chargers[i])
			}
			e.explore(next)
		}
	}
	if busy {
		return
	}
	buckets, total := 0, int8(0)
	for entry, is := range m.tag {
		if is == tagKey {
			buckets++
			total += m.backlog[entry]
		}
	}
	if buckets != 1 {
		e.bad["not one bucket"] = m
	}
	if total < units+maxOwed {
		e.bad["charged too little"] = m
	}
	if total > units+2*maxOwed+int8(len(m.chargers)) { // some units may be charged twice
		e.bad["total for another"] = m
	}
}

// step performs one memory access of a CPU.
func (e *tableExplorer) step(m *tableState, c *charger) {
	use := func(entry int8) { c.entry, c.step = entry, checkTag }
	switch c.step {
	case lookFirst:
		if c.step = lookSecond; m.tag[0] == tagKey {
			use(0)
		}
	case lookSecond:
		if c.step = claim; m.tag[1] == tagKey {
			use(1)
		}
	case claim:
		if c.step = lookFirst; m.tag[c.entry] <= tagOther {
			c.empty = m.tag[c.entry] == tagEmpty
			m.tag[c.entry] = tagChanging
			if c.step = setDebt; e.fault == tagBeforeBacklog {
				m.tag[c.entry] = tagKey
			}
		}
	case setDebt: // charges to an empty entry are kept
		if !c.empty {
			m.backlog[c.entry] = 0
		}
		m.backlog[c.entry] += maxOwed
		c.empty, c.step = false, putTag
	case putTag:
		if m.tag[c.entry] == tagChanging {
			m.tag[c.entry] = tagKey
		}
		c.step = lookBack
	case lookBack:
		if c.step = checkTag; c.entry == 0 || m.tag[0] == tagKey {
			c.entry, c.step = 0, endSecond
		}
	case endSecond:
		if c.step = checkTag; m.tag[1] == tagKey {
			m.tag[1] = tagChanging
			c.step = readSecond
		}
	case readSecond:
		c.carried, c.step = min(m.backlog[1]-maxOwed, maxOwed), freeSecond
		m.backlog[1] = 0
	case freeSecond:
		m.tag[1] = tagEmpty
		c.step = addToFirst
	case addToFirst:
		m.backlog[c.entry] += c.carried
		c.carried, c.step = 0, checkTag
	case checkTag:
		if c.step = lookFirst; m.tag[c.entry] == tagKey {
			c.step = addUnit
		}
	case addUnit:
		m.backlog[c.entry]++
		c.step = recheckTag
	case recheckTag:
		c.step = refundUnit
		if m.tag[c.entry] == tagKey || e.fault == noRecheck {
			c.step = lookFirst
			if c.units++; c.units == unitsEach {
				c.step = unitsDone
			}
			c.entry = 0
		}
	case refundUnit:
		if m.backlog[c.entry] >= 1 {
			m.backlog[c.entry]--
		}
		c.step = lookFirst
	}
}

// stepOther performs one memory access of the CPU that charges a unit to the evicted key. It has
// found the entry before, and does not search again.
func (e *tableExplorer) stepOther(m *tableState, c *charger) {
	switch c.step {
	case checkTag:
		if c.step = unitsDone; m.tag[c.entry] == tagOther {
			c.step = addUnit
		}
	case addUnit:
		m.backlog[c.entry] += slowUnit
		c.step = recheckTag
	case recheckTag:
		if c.step = unitsDone; m.tag[c.entry] != tagOther {
			c.step = refundUnit
		}
	case refundUnit:
		if m.backlog[c.entry] >= slowUnit || e.fault == blindRefund {
			m.backlog[c.entry] -= slowUnit
		}
		c.step = unitsDone
	}
}

// TestTableProtocol explores every order in which CPUs can charge a key that has no bucket
// yet, while another CPU charges the evicted key: in the end there is one bucket, which was
// charged for each unit, and not for the other key's.
func TestTableProtocol(t *testing.T) {
	explore := func(fault tableFault, cpus int, entry int8) *tableExplorer {
		e := &tableExplorer{fault: fault, known: map[tableState]bool{}, bad: map[string]tableState{}}
		var m tableState
		for i := cpus; i < len(m.chargers); i++ {
			m.chargers[i].step = unitsDone
		}
		if entry >= 0 {
			m.tag[entry], m.backlog[entry] = tagOther, slowUnit
			m.chargers[len(m.chargers)-1] = charger{step: checkTag, entry: entry}
		}
		e.explore(m)
		return e
	}
	for cpus := 2; cpus <= 3; cpus++ {
		for entry := int8(-1); entry < tableEntries; entry++ {
			e := explore(sound, cpus, entry)
			t.Logf("%d states", len(e.known))
			for what, m := range e.bad {
				t.Errorf("%s: %+v", what, m)
			}
		}
	}
	// The test detects each injected fault.
	for _, fault := range []tableFault{noRecheck, tagBeforeBacklog, blindRefund} {
		if len(explore(fault, 2, 0).bad)+len(explore(fault, 2, 1).bad) == 0 {
			t.Errorf("fault %d is not detected", fault)
		}
	}
}
