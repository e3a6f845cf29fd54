package cluster

import (
	"flag"
	"fmt"
	"maps"
	"strings"
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
	{"nothing", false, newNode},
	{"one has all", true, func() *node { return newNode().group(Whole, 0) }},
	{"one has all, units leave late", true, func() *node {
		n := newNode().group(Whole, 0)
		n.drain = searchParams.Lease / 4
		return n
	}},
	{"both want all", true, func() *node { return newNode().group(Whole, Whole) }},
	{"an epoch is almost settled", true, func() *node {
		n := newNode().group(Whole, 0)
		a, b := n.hosts[0], n.hosts[1]
		n.send(a)
		n.process(a)
		n.restart(&Ledger{})
		n.call(b)
		n.offset = unnoticed
		n.call(b)
		n.pass(a.when(a.sentAt + searchParams.Timeout()))
		n.take(a) // of the epoch before
		for n.ledgerTime()+unnoticed < n.ledger.state.settleAt {
			n.call(b)
			n.pass(n.now + unnoticed)
		}
		n.call(b)
		return n
	}},
	{"almost cold", false, func() *node {
		n := newNode().group(Whole/3, 0)
		n.want(n.hosts[0], 1)
		for n.now < 1030*Second {
			n.group()
		}
		return n
	}},
}

var searchParams = Params{Hosts: 2, Lease: Second, Step: Second / 2}

const searchKey = "db"

// unnoticed is a step of the ledger's clock that passes unnoticed, once in an epoch.
const unnoticed = Second/2 - 10*Millisecond

// node is a state of the whole.
type node struct {
	now    Time // on no clock of the group
	offset Time // of the ledger's clock
	ledger *Ledger
	saved  *Ledger // to which the store may return
	runs   int
	hosts  [2]*searchHost
	drain  Time // how long units may take to leave
	faults int
	depth  int
	before *node
	step   string   // that led here
	uses   [2]int64 // of the hosts
}

type searchHost struct {
	*Host
	slow    Time     // percent by which its clock is slow
	rest    int64    // what still leaves
	until   Time     // by its clock
	request *Request // on its way
	reply   *Reply   // on its way
}

func newNode() *node {
	n := &node{now: 1000 * Second, ledger: &Ledger{Run: "0"}, saved: &Ledger{}}
	for i := range n.hosts {
		n.hosts[i] = &searchHost{slow: Time(1 - 2*i)}
		n.start(i, 1)
	}
	return n
}

func (n *node) start(i int, start int64) {
	h := n.hosts[i]
	h.Host = NewHost(HostOptions{Params: searchParams, Name: string(rune('a' + i)), Start: start}, h.time(n.now))
	h.rest = 0
}

// group lets the hosts come together, and want so much.
func (n *node) group(wants ...int64) *node {
	for range 30 {
		n.pass(n.now + Second/20)
		for i, h := range n.hosts {
			if h.Joined() && i < len(wants) && wants[i] > 0 {
				h.Want(searchKey, wants[i], 1)
				wants[i] = 0
			}
			n.call(h)
		}
	}
	n.saved = n.ledger.Clone()
	return n
}

// time is what the clock of h shows at now.
func (h *searchHost) time(now Time) Time { return now - now/100*h.slow }

// when is the first instant at which the clock of h shows t.
func (h *searchHost) when(t Time) Time {
	now := t * 100 / (100 - h.slow)
	for h.time(now) >= t {
		now--
	}
	for h.time(now) < t {
		now++
	}
	return now
}

// admits is what is admitted, and use what may leave.
func (h *searchHost) admits(now Time) int64 { return h.Use(searchKey, h.time(now)) }

func (h *searchHost) use(now Time) int64 {
	if h.time(now) < h.until {
		return max(h.rest, h.admits(now))
	}
	return h.admits(now)
}

// inUse is what may leave, if it is more than is admitted.
func (h *searchHost) inUse(now Time) int64 {
	if use := h.use(now); use > h.admits(now) {
		return use
	}
	return 0
}

// ledgerTime is what the clock of the ledger shows.
func (n *node) ledgerTime() Time { return n.now + n.offset }

func (n *node) send(h *searchHost) {
	h.request = h.Request(h.time(n.now), func(string) int64 { return h.inUse(n.now) })
}

func (n *node) process(h *searchHost) {
	h.reply = n.ledger.Call(n.ledgerTime(), h.request)
}

func (n *node) take(h *searchHost) {
	n.change(h, func() { h.Reply(h.time(n.now), h.reply) })
	h.reply = nil
}

// want has h want so much, and no more.
func (n *node) want(h *searchHost, want int64) {
	n.change(h, func() {
		h.Want(searchKey, want, 1)
		h.Lower(searchKey, want)
	})
}

// pass lets time pass.
func (n *node) pass(to Time) {
	a, b := n.hosts[0], n.hosts[1]
	n.change(a, func() { n.change(b, func() { n.now = to }) })
}

// change does something. What h was admitted before leaves for some time.
func (n *node) change(h *searchHost, do func()) {
	before := h.admits(n.now)
	do()
	if h.admits(n.now) < before && n.drain > 0 {
		h.rest, h.until = before, h.time(n.now)+n.drain
	}
}

func (n *node) call(h *searchHost) {
	n.send(h)
	n.process(h)
	h.request = nil
	n.take(h)
}

// restart starts another process of the ledger, with the state of l.
func (n *node) restart(l *Ledger) {
	n.pass(n.now + Millisecond)
	n.runs++
	n.ledger = l
	n.ledger.Run = fmt.Sprint(n.runs)
}

// clone returns a copy, one step further.
func (n *node) clone() *node {
	c := *n
	c.before, c.depth = n, n.depth+1
	c.ledger = n.ledger.Clone()
	for i, h := range n.hosts {
		copied := *h
		host := *h.Host
		copied.Host = &host
		host.hot, host.asked = cloneShares(h.hot), cloneShares(h.asked)
		host.changed, host.frozen = maps.Clone(h.changed), maps.Clone(h.frozen)
		c.hosts[i] = &copied
	}
	return &c
}

func cloneShares(m map[string]*share) map[string]*share {
	c := make(map[string]*share, len(m))
	for key, b := range m {
		s := *b
		c[key] = &s
	}
	return c
}

// steps calls try with all that can happen next. What is not in the course of things is a fault.
func (n *node) steps(try func(name string, faults int, do func(n *node))) {
	for i, h := range n.hosts {
		name := h.Name
		host := func(f func(n *node, h *searchHost)) func(n *node) {
			return func(n *node) { f(n, n.hosts[i]) }
		}
		try(name+" calls", 0, host((*node).call))
		try(name+" sends a call, which is late or lost", 1, host((*node).send))
		try(name+" calls, the reply is late or lost", 1, host(func(n *node, h *searchHost) {
			n.send(h)
			n.process(h)
			h.request = nil
		}))
		if h.request != nil {
			try("the call of "+name+" arrives", 0, host(func(n *node, h *searchHost) {
				n.process(h)
				h.request = nil
			}))
			try("the call of "+name+" arrives, and will again", 1, host((*node).process))
		}
		if h.reply != nil {
			try("the reply to "+name+" arrives", 0, host((*node).take))
		}
		try(name+" restarts", 1, host(func(n *node, h *searchHost) { n.start(i, h.Start+1) }))
		for _, want := range []int64{0, Whole} {
			if want != h.wants() {
				try(fmt.Sprintf("%s wants %d", name, want), 0, host(func(n *node, h *searchHost) { n.want(h, want) }))
			}
		}
		if h.inUse(n.now) > 0 {
			try("all has left "+name, 0, host(func(_ *node, h *searchHost) { h.until = 0 }))
		}
	}
	try("both call until there is nothing new", 0, func(n *node) {
		for range 4 {
			n.pass(n.now + Millisecond)
			for _, h := range n.hosts {
				n.call(h)
			}
		}
	})
	try("the ledger restarts", 1, func(n *node) { n.restart(n.ledger) })
	try("the ledger returns to its state of before", 1, func(n *node) { n.restart(n.saved.Clone()) })
	try("the ledger restarts empty", 1, func(n *node) { n.restart(&Ledger{}) })
	try("the ledger is saved", 1, func(n *node) { n.saved = n.ledger.Clone() })
	if n.offset == 0 {
		try("the clock of the ledger steps", 1, func(n *node) { n.offset = unnoticed })
	}
	next := n.nextEnd()
	if next == 0 {
		return
	}
	try("time passes until something ends", 0, func(n *node) { n.pass(next) })
	if next > n.now+2*Millisecond {
		try("time passes until just before something ends", 0, func(n *node) { n.pass(next - Millisecond) })
	}
}

func (h *searchHost) wants() int64 {
	for _, all := range []map[string]*share{h.hot, h.asked} {
		if b := all[searchKey]; b != nil {
			return b.want
		}
	}
	return 0
}

// nextEnd returns the next instant after now at which a host or the ledger would do something else than now, or 0.
func (n *node) nextEnd() (next Time) {
	end := func(t Time) {
		if t > n.now && (next == 0 || t < next) {
			next = t
		}
	}
	for _, h := range n.hosts {
		l := h.Lease()
		end(h.when(l.End))
		end(h.when(l.AloneAt))
		end(h.when(h.until))
		if h.calling {
			end(h.when(h.sentAt + h.Params.Timeout() + 1))
		}
	}
	s := n.ledger.state
	if s == nil {
		return next
	}
	ledger := func(t Time) { end(t - n.offset) }
	ledger(s.settleAt)
	ledger(s.last + s.params.Step)
	for _, b := range s.buckets {
		ledger(b.wanted + s.params.demoteAfter())
	}
	for _, m := range s.members {
		ledger(m.at + s.params.expiry())
		ledger(m.good + s.params.Lease)
		ledger(m.known)
		if s.params.Strict {
			ledger(m.born + s.params.expiry())
		}
	}
	return next
}

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
			n.ledger, n.saved, n.hosts = nil, nil, [2]*searchHost{} // only the path is needed any more
		}
		if level = next; len(level) > 0 {
			s.deepest = depth + 1
		}
	}
	return ""
}

func (s *search) check(n *node) string {
	var sum int64
	floor := searchParams.Floor()
	for i, h := range n.hosts {
		use, o := h.use(n.now), n.hosts[1-i]
		n.uses[i] = use
		sum += use
		if use <= floor {
			continue
		}
		s.aboveFloor++
		if l := o.Lease(); o.leased && o.counted && o.hot[searchKey] == nil && o.time(n.now) < l.End {
			return fmt.Sprintf("%s may use more than its floor, and %s takes the bucket for cold", h.Name, o.Name)
		}
	}
	if sum > Whole+2 {
		return fmt.Sprintf("together hosts may use %.3f", float64(sum)/float64(Whole))
	}
	if n.ledger.state == nil {
		return ""
	}
	if wrong := n.ledger.Overbooked(n.ledgerTime()); wrong != "" {
		return wrong
	}
	if r := n.ledger.state; r.run == n.ledger.Run && r.last >= r.settleAt { // as it has told
		s.settled++
		for _, h := range n.hosts {
			if h.epoch < r.epoch && h.admits(n.now) > floor {
				return fmt.Sprintf("epoch %d is settled, and %s may use more than its floor by epoch %d", r.epoch, h.Name, h.epoch)
			}
		}
	}
	return ""
}

// path describes how n was reached.
func (n *node) path() string {
	var b strings.Builder
	if n.before != nil {
		b.WriteString(n.before.path())
	}
	fmt.Fprintf(&b, "\n%9.3f %-50s", float64(n.now)/float64(Second), n.step)
	for i, use := range n.uses {
		fmt.Fprintf(&b, "  %c uses %.3f", 'a'+i, float64(use)/float64(Whole))
	}
	return b.String()
}
