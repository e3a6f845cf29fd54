package cluster

import (
	"fmt"
	"maps"
	"strings"
)

// unnoticed is a step of the ledger's clock that passes unnoticed, once in an epoch.
const unnoticed = Second/2 - 10*Millisecond

// node is a state of a group with one bucket or pool.
type node struct {
	params Params
	key    string
	more   bool // hosts leave, are off and forgotten, and calls of their processes before arrive

	now    Time // on no clock of the group
	offset Time // of the ledger's clock
	ledger *Ledger
	saved  *Ledger // to which the store may return
	runs   int
	hosts  []*nodeHost
	drain  Time // how long units may take to leave
	faults int
	depth  int
	before *node
	step   string  // that led here
	uses   []int64 // of the hosts
}

type nodeHost struct {
	*Host
	node    *node
	slow    Time  // percent by which its clock is slow
	rest    int64 // what still leaves
	until   Time  // by its clock
	slots   int64 // in use
	off     bool
	left    bool       // in its state directory
	late    []*Request // of processes before
	request *Request   // on its way
	reply   *Reply     // on its way
}

// newNode returns a group whose first host has a slow clock, and the last one a fast one, as far as they may be.
func newNode(hosts int, key string, more bool) *node {
	n := &node{
		params: Params{Hosts: hosts, Lease: Second, Step: Second / 2}, key: key, more: more,
		now: 1000 * Second, ledger: &Ledger{Run: "0"}, saved: &Ledger{}, uses: make([]int64, hosts),
	}
	for i := range hosts {
		n.hosts = append(n.hosts, &nodeHost{node: n, slow: Time(1 - 2*i/(hosts-1))})
		n.start(i, 1)
	}
	return n
}

func (n *node) start(i int, start int64) {
	h := n.hosts[i]
	if h.request != nil && n.more {
		h.late = append(h.late, h.request)
		h.request = nil
	}
	h.Host = NewHost(HostOptions{Params: n.params, Name: string(rune('a' + i)), Start: start, Left: h.left}, h.time(n.now))
	h.rest, h.slots, h.off = 0, 0, false
}

// group lets the hosts come together, and want so much.
func (n *node) group(wants ...int64) *node {
	for range 30 {
		n.pass(n.now + Second/20)
		for i, h := range n.hosts {
			if h.Joined() && i < len(wants) && wants[i] > 0 {
				h.Want(n.key, wants[i], 1)
				wants[i] = 0
			}
			n.call(h)
		}
	}
	n.saved = n.ledger.Clone()
	return n
}

// time is what the clock of h shows at now.
func (h *nodeHost) time(now Time) Time { return now - now/100*h.slow }

// when is the first instant at which the clock of h shows t.
func (h *nodeHost) when(t Time) Time {
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
func (h *nodeHost) admits(now Time) int64 {
	if h.off {
		return 0
	}
	return h.Use(h.node.key, h.time(now))
}

func (h *nodeHost) use(now Time) int64 {
	switch {
	case h.off:
		return 0
	case IsSlots(h.node.key):
		return max(h.slots, h.admits(now))
	case h.time(now) < h.until:
		return max(h.rest, h.admits(now))
	}
	return h.admits(now)
}

// inUse is what may be in use, if it is more than is admitted: of a bucket this is not known.
func (h *nodeHost) inUse(now Time) int64 {
	switch {
	case IsSlots(h.node.key):
		return h.slots
	case h.use(now) > h.admits(now):
		return Whole
	}
	return 0
}

// ledgerTime is what the clock of the ledger shows.
func (n *node) ledgerTime() Time { return n.now + n.offset }

func (n *node) send(h *nodeHost) {
	h.request = h.Request(h.time(n.now), func(string) int64 { return h.inUse(n.now) })
}

func (n *node) process(h *nodeHost) {
	h.reply = n.ledger.Call(n.ledgerTime(), h.request)
}

func (n *node) take(h *nodeHost) {
	n.change(func() { h.Reply(h.time(n.now), h.reply) }, h)
	h.reply = nil
	h.left = h.left && !h.Joined()
}

// want has h want so much, and no more.
func (n *node) want(h *nodeHost, want int64) {
	n.change(func() {
		h.Want(n.key, want, 1)
		h.Lower(n.key, want)
	}, h)
}

// pass lets time pass.
func (n *node) pass(to Time) { n.change(func() { n.now = to }, n.hosts...) }

// change does something to hosts. What they were admitted before leaves for some time.
func (n *node) change(do func(), hosts ...*nodeHost) {
	before := make([]int64, len(hosts))
	for i, h := range hosts {
		before[i] = h.admits(n.now)
	}
	do()
	for i, h := range hosts {
		if h.admits(n.now) < before[i] && n.drain > 0 {
			h.rest, h.until = before[i], h.time(n.now)+n.drain
		}
	}
}

func (n *node) call(h *nodeHost) {
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
	c.hosts, c.uses = make([]*nodeHost, len(n.hosts)), make([]int64, len(n.hosts))
	for i, h := range n.hosts {
		copied := *h
		copied.node = &c
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
		if n.more {
			n.moreSteps(i, try)
		}
		if h.off {
			continue
		}
		host := func(f func(n *node, h *nodeHost)) func(n *node) {
			return func(n *node) { f(n, n.hosts[i]) }
		}
		try(name+" calls", 0, host((*node).call))
		try(name+" sends a call, which is late or lost", 1, host((*node).send))
		try(name+" calls, the reply is late or lost", 1, host(func(n *node, h *nodeHost) {
			n.send(h)
			n.process(h)
			h.request = nil
		}))
		if h.request != nil {
			try("the call of "+name+" arrives", 0, host(func(n *node, h *nodeHost) {
				n.process(h)
				h.request = nil
			}))
			try("the call of "+name+" arrives, and will again", 1, host((*node).process))
		}
		if h.reply != nil {
			try("the reply to "+name+" arrives", 0, host((*node).take))
		}
		try(name+" restarts", 1, host(func(n *node, h *nodeHost) { n.start(i, h.Start+1) }))
		for _, want := range []int64{0, Whole} {
			if want != h.wants() {
				try(fmt.Sprintf("%s wants %d", name, want), 0, host(func(n *node, h *nodeHost) { n.want(h, want) }))
			}
		}
		if h.inUse(n.now) > 0 {
			try("all has left "+name, 0, host(func(_ *node, h *nodeHost) { h.until = 0 }))
		}
	}
	try("all call until there is nothing new", 0, func(n *node) {
		for range 4 {
			n.pass(n.now + Millisecond)
			for _, h := range n.hosts {
				if !h.off {
					n.call(h)
				}
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

// moreSteps is steps for what hosts do and suffer that are not always there, and for slots.
func (n *node) moreSteps(i int, try func(name string, faults int, do func(n *node))) {
	h := n.hosts[i]
	name := h.Name
	for k := range h.late {
		try("a call of the process before of "+name+" arrives", 0, func(n *node) { n.ledger.Call(n.ledgerTime(), n.hosts[i].late[k]) })
	}
	if h.off {
		try(name+" starts", 0, func(n *node) { n.start(i, h.Start+1) })
		try("an operator forgets "+name, 0, func(n *node) {
			h := n.hosts[i]
			h.left = n.ledger.Forget(n.ledgerTime(), name) || h.left
		})
		return
	}
	if h.inUse(n.now) == 0 && h.Joined() {
		try(name+" leaves", 0, func(n *node) { n.leave(n.hosts[i], true, true) })
		try(name+" leaves, the reply is lost", 1, func(n *node) { n.leave(n.hosts[i], true, false) })
		try(name+" leaves, the call is late", 1, func(n *node) { n.leave(n.hosts[i], false, false) })
	}
	try(name+" crashes, and is off", 1, func(n *node) {
		h := n.hosts[i]
		h.rest, h.slots, h.off, h.request = 0, 0, true, nil
	})
	if IsSlots(n.key) {
		use := func(what string, of func(h *nodeHost) int64) {
			try(name+what, 0, func(n *node) { h := n.hosts[i]; h.slots = of(h) })
		}
		use(" has all connections that it may", func(h *nodeHost) int64 { return max(h.slots, h.admits(h.node.now)) })
		use(" has half of them", func(h *nodeHost) int64 { return max(h.slots, h.admits(h.node.now)/2) })
		use(" ends half of its connections", func(h *nodeHost) int64 { return h.slots / 2 })
		use(" ends all connections", func(*nodeHost) int64 { return 0 })
		try(name+" wants no more than it has", 0, func(n *node) { h := n.hosts[i]; h.Lower(n.key, h.slots) })
	}
}

// leave has h leave, and end.
func (n *node) leave(h *nodeHost, arrives, answered bool) {
	for range 3 {
		var q *Request
		n.change(func() { q = h.Leave(h.time(n.now)) }, h)
		if h.inUse(n.now) > 0 { // it does not come to leave, as if it had crashed
			break
		}
		h.left = true
		if !arrives {
			h.late = append(h.late, q)
			break
		}
		if r := n.ledger.Call(n.ledgerTime(), q); !answered || !h.Reply(h.time(n.now), r) {
			break
		}
	}
	if h.request != nil {
		h.late = append(h.late, h.request)
	}
	h.off, h.request = true, nil
}

func (h *nodeHost) wants() int64 {
	for _, all := range []map[string]*share{h.hot, h.asked} {
		if b := all[h.node.key]; b != nil {
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

// check returns what is wrong, or "". It sets what hosts may use.
func (n *node) check() string {
	var sum int64
	for i, h := range n.hosts {
		n.uses[i] = h.use(n.now)
		sum += n.uses[i]
	}
	if sum > Whole+int64(len(n.hosts)) {
		return fmt.Sprintf("together hosts may use %.3f", float64(sum)/float64(Whole))
	}
	if n.ledger.state == nil {
		return ""
	}
	return n.ledger.Overbooked(n.ledgerTime())
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
