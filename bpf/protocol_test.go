package bpf

import (
	"flag"
	"testing"
)

var thirdCPU = flag.Bool("third-cpu", false, "follow three CPUs through the protocol of slots, not two: a minute, and 6 GB")

// The protocol of slots.h, by which CPUs take slots, with a step for each access to
// memory. A word is 0 when it is free, else a count of the key, a CPU's claim for it,
// or another key.
const (
	protocolWords = 3
	protocolTries = 5
	protocolWaits = 2 // tries before another's claim is taken away
	claimed       = 8 // and the CPU
	otherKey      = 7
)

// taker is a CPU that takes one slot, and what it knows.
type taker struct {
	looks  int8 // at the next word, or protocolWords when it has seen all
	tries  int8
	mine   int8 // the word it has claimed, or -1
	seen   [protocolWords]int8
	result int8 // 0 while it tries
}

const (
	gotSlot = 1 + iota
	foundFull
	foundNoRoom
	lost
)

// moment is the state of everything.
type moment struct {
	words  [protocolWords]int8
	takers [3]taker
	other  int8 // changes that another key will still make
}

// explorer follows all ways that things can go.
type explorer struct {
	cap     int8
	unsound bool // does not look for other claims
	known   map[moment]bool
	most    int8
	ends    map[[5]int]bool // results by kind
}

func (e *explorer) explore(m moment) {
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
	for i := range m.takers {
		if m.takers[i].result == 0 {
			busy = true
			next := m
			e.step(&next, i)
			e.explore(next)
		}
	}
	if !busy {
		var ends [5]int
		for _, t := range m.takers {
			ends[t.result]++
		}
		e.ends[ends] = true
		return
	}
	// Another key comes to a free word, or gives up the one it has.
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

// step makes one access to memory for a taker.
func (e *explorer) step(m *moment, i int) {
	t := &m.takers[i]
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
		swap(t.mine, claim, 0) // the next step sees to the rest
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

// TestSlotProtocol follows every order in which CPUs can take slots of one key
// that has none yet, while words become free and are taken by another: there are
// never more than the cap, and one always gets a slot unless all lose too often.
func TestSlotProtocol(t *testing.T) {
	explore := func(most int8, third, unsound bool) *explorer {
		e := &explorer{cap: most, unsound: unsound, known: map[moment]bool{}, ends: map[[5]int]bool{}}
		m := moment{words: [protocolWords]int8{otherKey}, other: 2}
		for i := range m.takers {
			m.takers[i].mine = -1
		}
		if !third {
			m.takers[2].result = foundFull
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
	// The same without the look for other claims is found out.
	if e := explore(1, false, true); e.most == 1 {
		t.Error("this finds no fault in what has one")
	}
}
