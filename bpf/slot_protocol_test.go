package bpf

import (
	"flag"
	"testing"
)

var thirdCPU = flag.Bool("third-cpu", false, "explore the slot protocol with three CPUs, not two: takes a minute and 6 GB")

// The protocol of conn_slots.h, by which CPUs take slots, with one step per memory
// access. A word is 0 when free, else a count of the key, a CPU's claim for it, or
// another key.
const (
	protocolWords = 3
	protocolTries = 5
	protocolWaits = 2 // tries before another's claim is cleared
	claimed       = 8 // plus the CPU
	otherKey      = 7
)

// slotClaimer is a CPU that takes one slot, with its local state.
type slotClaimer struct {
	looks  int8 // next word to read, or protocolWords after all
	tries  int8
	mine   int8 // claimed word, or -1
	seen   [protocolWords]int8
	result int8 // 0 while it runs
}

const (
	gotSlot = 1 + iota
	foundFull
	foundNoRoom
	lost
)

// protocolState is the state of memory and all CPUs.
type protocolState struct {
	words    [protocolWords]int8
	claimers [3]slotClaimer
	other    int8 // remaining changes by another key
}

// explorer explores all interleavings.
type explorer struct {
	cap     int8
	unsound bool // fault injection: does not look for other claims
	known   map[protocolState]bool
	most    int8
	ends    map[[5]int]bool // final states: number of CPUs by result
}

func (e *explorer) explore(m protocolState) {
	if e.known[m] {
		return
	}
	e.known[m] = true
	sum := int8(0)
	for _, w := range m.words {
		if w > 0 && w < otherKey {
			sum += w
		}
	}
	e.most = max(e.most, sum)
	busy := false
	for i := range m.claimers {
		if m.claimers[i].result == 0 {
			busy = true
			next := m
			e.step(&next, i)
			e.explore(next)
		}
	}
	if !busy {
		var ends [5]int
		for _, t := range m.claimers {
			ends[t.result]++
		}
		e.ends[ends] = true
		return
	}
	// Another key takes a free word, or releases its word.
	if m.other > 0 {
		for i, w := range m.words {
			next := m
			next.other--
			switch w {
			case 0:
				next.words[i] = otherKey
			case otherKey:
				next.words[i] = 0
			default:
				continue
			}
			e.explore(next)
		}
	}
}

// step performs one memory access of a CPU.
func (e *explorer) step(m *protocolState, i int) {
	t := &m.claimers[i]
	if t.looks < protocolWords {
		t.seen[t.looks] = m.words[t.looks]
		t.looks++
		return
	}
	swap := func(word, was, is int8) bool {
		if m.words[word] != was {
			return false
		}
		m.words[word] = is
		return true
	}
	claim := int8(claimed + i)
	again := func() {
		t.looks, t.seen = 0, [protocolWords]int8{}
		if t.tries++; t.tries == protocolTries {
			if t.mine >= 0 {
				swap(t.mine, claim, 0)
			}
			t.mine, t.result = -1, lost
		}
	}
	held, other, free, own := int8(-1), int8(-1), int8(-1), false
	for j := int8(protocolWords - 1); j >= 0; j-- {
		switch w := t.seen[j]; {
		case w == 0:
			free = j
		case w < otherKey:
			held = j
		case w == claim && j == t.mine:
			own = true
		case w >= claimed:
			other = j
		}
	}
	if e.unsound {
		other = -1
	}
	switch {
	case held >= 0 && t.mine >= 0:
		swap(t.mine, claim, 0) // the next step continues
		t.mine = -1
	case held >= 0 && t.seen[held] >= e.cap:
		t.result = foundFull
	case held >= 0:
		if swap(held, t.seen[held], t.seen[held]+1) {
			t.result = gotSlot
		} else {
			again()
		}
	case t.mine < 0 && other >= 0 && t.tries < protocolWaits:
		again()
	case t.mine < 0 && free < 0:
		t.result = foundNoRoom
	case t.mine < 0:
		if swap(free, 0, claim) {
			t.mine = free
		}
		again()
	case !own:
		t.mine = -1
		again()
	case other < 0:
		if swap(t.mine, claim, 1) {
			t.result = gotSlot
		} else {
			t.mine = -1
			again()
		}
	default:
		if other > t.mine || t.tries >= protocolWaits {
			swap(other, t.seen[other], 0)
		}
		again()
	}
}

// TestSlotProtocol explores every order in which CPUs can take slots of one key
// that has none yet, while words become free and are taken by another key: the cap
// is never exceeded, and one CPU always gets a slot unless all lose too many races.
func TestSlotProtocol(t *testing.T) {
	explore := func(most int8, third, unsound bool) *explorer {
		e := &explorer{cap: most, unsound: unsound, known: map[protocolState]bool{}, ends: map[[5]int]bool{}}
		m := protocolState{words: [protocolWords]int8{otherKey}, other: 2}
		for i := range m.claimers {
			m.claimers[i].mine = -1
		}
		if !third {
			m.claimers[2].result = foundFull
		}
		e.explore(m)
		return e
	}
	for most := int8(1); most <= 2; most++ {
		e := explore(most, *thirdCPU, false)
		t.Logf("cap %d: %d states, %d ends", most, len(e.known), len(e.ends))
		if e.most != most {
			t.Errorf("cap %d: up to %d at once", most, e.most)
		}
		for ends := range e.ends {
			if ends[gotSlot] > int(most) || ends[gotSlot] == 0 && ends[lost]+ends[foundNoRoom] < 2 {
				t.Errorf("cap %d: %v", most, ends)
			}
		}
	}
	// The test detects a protocol that does not look for other claims.
	if e := explore(1, false, true); e.most == 1 {
		t.Error("the injected fault is not detected")
	}
}
