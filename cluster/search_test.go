package cluster

import (
	"flag"
	"fmt"
	"testing"
	"time"
)

var (
	searchDepth  = flag.Int("search.depth", 4, "number of steps in TestSearch")
	searchFaults = flag.Int("search.faults", 2, "number of steps in TestSearch that are faults")
)

// TestSearch looks at all that can happen to two hosts, a ledger and one bucket in a number of steps, from several
// states of the group. The clock of one host is slow and that of the other is fast, as far as they may be.
func TestSearch(t *testing.T) {
	t.Parallel()
	for _, begin := range beginnings {
		t.Run(begin.name, func(t *testing.T) {
			t.Parallel()
			began := time.Now()
			s := newSearch(*searchDepth, *searchFaults)
			found := s.run(begin.node())
			t.Logf("%d states in up to %d steps in %.1f s; in %d a host may use more than its floor, in %d the epoch is settled",
				len(s.seen), s.deepest, time.Since(began).Seconds(), s.aboveFloor, s.settled)
			if found != "" {
				t.Error(found)
			}
			if s.deepest < *searchDepth || s.settled == 0 || s.aboveFloor == 0 && begin.lent {
				t.Error("the search has seen nothing")
			}
		})
	}
}

// beginnings are where searches begin.
var beginnings = []struct {
	name string
	lent bool // more than a floor
	node func() *node
}{
	{"nothing", false, twoHosts},
	{"one has all", true, func() *node { return twoHosts().group(Whole, 0) }},
	{"one has all, units leave late", true, func() *node {
		n := twoHosts().group(Whole, 0)
		n.drain = n.params.Lease / 4
		return n
	}},
	{"both want all", true, func() *node { return twoHosts().group(Whole, Whole) }},
	{"an epoch is almost settled", true, func() *node {
		n := twoHosts().group(Whole, 0)
		n.drain = unnoticed // the longest that units may take beyond a lease
		a, b := n.hosts[0], n.hosts[1]
		n.send(a)
		n.process(a)
		n.restart(&Ledger{})
		n.call(b)
		n.offset = unnoticed
		n.call(b)
		n.pass(a.when(a.sentAt + n.params.Timeout()))
		n.take(a) // of the epoch before
		for n.ledgerTime()+unnoticed < n.ledger.state.settleAt {
			n.call(b)
			n.pass(min(n.nextEnd(), n.now+unnoticed))
		}
		n.call(b)
		return n
	}},
	{"almost cold", false, func() *node {
		n := twoHosts().group(Whole/3, 0)
		n.want(n.hosts[0], 1)
		for n.now < 1030*Second {
			n.group()
		}
		return n
	}},
}

func twoHosts() *node { return newNode(2, "db", false) }

// search is a breadth-first search.
type search struct {
	depth, faults int
	seen          map[uint64]bool
	deepest       int
	aboveFloor    int
	settled       int
}

func newSearch(depth, faults int) *search {
	return &search{depth: depth, faults: faults, seen: map[uint64]bool{}}
}

// run returns what is wrong, or "".
func (s *search) run(begin *node) string {
	level := []*node{begin}
	for depth := range s.depth {
		var next []*node
		for _, n := range level {
			wrong := ""
			n.steps(func(name string, faults int, do func(n *node)) {
				if wrong != "" || n.faults+faults > s.faults {
					return
				}
				c := n.clone()
				c.step, c.faults = name, n.faults+faults
				do(c)
				if wrong = s.check(c); wrong != "" {
					wrong += c.path()
				}
				if hash := hashOf(c); !s.seen[hash] {
					s.seen[hash] = true
					next = append(next, c)
				}
			})
			if wrong != "" {
				return wrong
			}
			n.ledger, n.saved, n.hosts = nil, nil, nil // only the path is needed any more
		}
		if level = next; len(level) > 0 {
			s.deepest = depth + 1
		}
	}
	return ""
}

func (s *search) check(n *node) string {
	if wrong := n.check(); wrong != "" {
		return wrong
	}
	floor := n.params.Floor()
	for i, h := range n.hosts {
		if n.uses[i] <= floor {
			continue
		}
		s.aboveFloor++
		o := n.hosts[1-i]
		if l := o.Lease(); o.leased && o.counted && o.hot[n.key] == nil && o.time(n.now) < l.End {
			return fmt.Sprintf("%s may use more than its floor, and %s takes the bucket for cold", h.Name, o.Name)
		}
	}
	if r := n.ledger.state; r != nil && r.run == n.ledger.Run && r.last >= r.settleAt { // as it has told
		s.settled++
		for _, h := range n.hosts {
			if h.epoch < r.epoch && h.admits(n.now) > floor {
				return fmt.Sprintf("epoch %d is settled, and %s may use more than its floor by epoch %d", r.epoch, h.Name, h.epoch)
			}
		}
	}
	return ""
}
