package conn

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// churn is flows that start, end, end each other and follow reloads, as sessions and UDP flows do.
type churn struct {
	*rig
	rnd    *rand.Rand
	flows  []*wildFlow
	later  []func()
	ids    uint64
	units  int
	sent   int
	nested int // events during a send
	booked int
	gone   int
	spare  []*wildUnit
}

// wildFlow is a flow of a churn: a direction of a session, or a UDP flow.
type wildFlow struct {
	*churn
	f          *shaper.Flow
	path       []hop
	account    account
	queue      []*wildUnit // oldest first
	stream     bool
	unverified bool
	gone       bool
	closed     bool
	requeueing bool // others may leave meanwhile, but nothing arrives for it: the loop receives nothing until it is done
	was        *shaper.Policy
	next       int
	last       int
}

type wildUnit struct {
	unit
	w  *wildFlow
	id int
}

func (u *wildUnit) send(now leaky.Time) (bytes, packets uint64, requeue bool) {
	w := u.w
	ch := w.churn
	if w.closed {
		ch.t.Fatalf("sent after close")
	}
	if u.queued || u.booked {
		ch.t.Fatalf("sent while queued")
	}
	if u.id < w.last {
		ch.t.Fatalf("unit %d left after %d", u.id, w.last)
	}
	w.last = u.id
	ch.sent++
	n := u.bytes
	if w.stream {
		switch ch.rnd.IntN(8) {
		case 0:
			n = 1 + ch.rnd.Uint64N(2*n)
		case 1:
			u.bytes = 64 + ch.rnd.Uint64N(20000)
			n = u.bytes
		case 2:
			n = 0
		}
		ch.runNested(w)
		if w.closed {
			return n, 0, false
		}
		if n == 0 || ch.rnd.IntN(10) == 0 {
			w.queue = nil
			return n, 0, false
		}
		u.id = w.next
		w.next++
		return n, 0, true
	}
	w.queue = slices.DeleteFunc(w.queue, func(o *wildUnit) bool { return o == u })
	ch.free(u)
	if ch.rnd.IntN(20) == 0 {
		return 0, 0, false
	}
	return n, 1, false
}

func (ch *churn) free(u *wildUnit) {
	*u = wildUnit{}
	ch.spare = append(ch.spare, u)
}

func (u *wildUnit) resubmit(now leaky.Time) {
	if len(u.w.path) == 0 {
		if u.w.stream {
			u.w.queue = nil
			return
		}
		u.send(now)
		return
	}
	u.path, u.accepted = u.w.path, true
	u.w.scheduler.submit(&u.unit, now)
}

func (u *wildUnit) refused(by *queue, _ shaper.Reason) {
	w := u.w
	if w.stream {
		w.t.Fatal("refused a stream")
	}
	w.rig.refused++
	w.queue = slices.DeleteFunc(w.queue, func(o *wildUnit) bool { return o == u })
	w.free(u)
}

// runNested is what happens during a send.
func (ch *churn) runNested(self *wildFlow) {
	if ch.rnd.IntN(4) > 0 || len(ch.flows) == 0 {
		return
	}
	ch.nested++
	w := ch.flows[ch.rnd.IntN(len(ch.flows))]
	switch ch.rnd.IntN(4) {
	case 0:
		ch.close(w)
	case 1:
		if w != self {
			ch.submit(w)
		}
	case 2: // an idle UDP flow is evicted
		for _, w := range ch.flows {
			if !w.stream && len(w.queue) == 0 {
				ch.close(w)
				break
			}
		}
	case 3:
		ch.open()
	}
}

func (ch *churn) open() *wildFlow {
	ch.ids++
	f := flowFrom(fmt.Sprintf("10.%d.%d.%d", ch.rnd.IntN(2), ch.rnd.IntN(2), 1+ch.rnd.IntN(3)), uint16(ch.rnd.IntN(3)))
	f.Connection = ch.ids
	w := &wildFlow{churn: ch, f: f, last: -1, stream: ch.rnd.IntN(2) == 0, was: ch.shaper.Policy()}
	if !w.stream {
		f.Protocol = shaper.UDP
		w.unverified = ch.rnd.IntN(2) == 0
	}
	w.path = ch.scheduler.newPath(ch.spec(w))
	ch.flows = append(ch.flows, w)
	ch.submit(w)
	return w
}

func (ch *churn) spec(w *wildFlow) pathSpec {
	p := ch.shaper.Policy()
	r := p.Route(w.f)
	return pathSpec{policy: p, flow: w.f, route: r, set: r.ToDownstream, unverified: w.unverified}
}

func (ch *churn) submit(w *wildFlow) {
	if len(w.path) == 0 || w.closed || w.requeueing {
		return
	}
	n := 1
	if w.stream {
		if len(w.queue) > 0 {
			return
		}
	} else {
		n += ch.rnd.IntN(3)
	}
	for range n {
		if w.closed {
			return
		}
		u := &wildUnit{}
		if k := len(ch.spare); k > 0 && !w.stream {
			u, ch.spare = ch.spare[k-1], ch.spare[:k-1]
		}
		size := []uint64{1, 64, 1000, 1448, 1472}[ch.rnd.IntN(5)]
		u.w, u.id = w, w.next
		w.next++
		u.unit = unit{owner: u, path: w.path, bytes: size, packets: 1, credit: udpCredit, grain: size, droppable: true}
		if w.stream {
			size = []uint64{1448, 3000, 16000}[ch.rnd.IntN(3)]
			u.unit = unit{owner: u, path: w.path, bytes: size, credit: grantCredit, grain: size}
		}
		w.queue = append(w.queue, u)
		ch.units++
		ch.scheduler.submit(&u.unit, ch.now)
	}
}

func (ch *churn) close(w *wildFlow) {
	if w.closed {
		return
	}
	w.closed = true
	ch.flows = slices.DeleteFunc(ch.flows, func(o *wildFlow) bool { return o == w })
	var units []*unit
	for _, u := range w.queue {
		units = append(units, &u.unit)
	}
	ch.scheduler.withdraw(ch.now, units...)
	if w.stream {
		ch.later = append(ch.later, func() { ch.scheduler.releasePath(w.path, ch.now) })
		return
	}
	for _, u := range w.queue {
		ch.free(u)
	}
	w.queue = nil
	ch.scheduler.releasePath(w.path, ch.now)
}

// follow does what reroute does.
func (ch *churn) follow(w *wildFlow) {
	spec := ch.spec(w)
	was := w.was
	w.was = spec.policy
	if !w.gone && ch.scheduler.keepsPath(w.path, spec, ch.now) {
		if w.stream && len(w.queue) > 0 && !w.closed {
			w.queue[0].bytes = 64 + ch.rnd.Uint64N(20000)
		}
		return
	}
	if w.closed {
		return
	}
	ch.requeue(w, func() {
		path := ch.scheduler.newPath(ch.spec(w))
		w.path = ch.scheduler.replacePath(&w.account, w.path, path, w.gone, was, ch.now)
	})
}

// requeue takes the units of w out of their queues, changes these, and puts the units back.
func (ch *churn) requeue(w *wildFlow, change func()) {
	w.requeueing = true
	defer func() { w.requeueing = false }()
	queue := slices.Clone(w.queue)
	var units []*unit
	for _, u := range queue {
		units = append(units, &u.unit)
	}
	if ch.scheduler.withdraw(ch.now, units...); w.closed {
		return
	}
	change()
	for _, u := range queue {
		if w.closed {
			return
		}
		u.resubmit(ch.now)
	}
}

// policy compiles random limits and classes.
func (ch *churn) policy() *shaper.Policy {
	var classes []shaper.TrafficClass
	for i, prefix := range []string{"10.0.0.1/32", "10.0.1.0/24", "10.0.0.0/16"}[ch.rnd.IntN(4):] {
		c := classOf(prefix, 1+ch.rnd.IntN(10))
		c.Name = fmt.Sprint("class", (i+ch.rnd.IntN(2))%4, prefix)
		if ch.rnd.IntN(3) == 0 {
			c.Match = shaper.Match{Port: []shaper.PortRange{{First: 1, Last: 2}}}
		}
		classes = append(classes, c)
	}
	limits := ch.limits()
	for i := range limits {
		if l := &limits[i]; l.Scheduling != shaper.ScheduleFIFO && ch.rnd.IntN(2) == 0 {
			for _, c := range classes {
				l.Reserve = append(l.Reserve, shaper.Reserve{Class: c.Name, Percent: 1 + ch.rnd.IntN(25)})
			}
			l.Reserve = append(l.Reserve, shaper.Reserve{Class: shaper.DefaultClass, Percent: 1 + ch.rnd.IntN(25)})
		}
	}
	return policyByAS(ch.t, ch.shaper, testASNs(ch.t), classes, limits...)
}

// limits returns random limits.
func (ch *churn) limits() (limits []shaper.Limit) {
	rate := func() uint64 { return 8 << (12 + ch.rnd.IntN(9)) }
	add := func(l shaper.Limit) {
		if ch.rnd.IntN(3) == 0 {
			l.Scheduling = shaper.ScheduleFIFO
		} else {
			l.Turns = [][]shaper.TurnBy{nil, byPrefix, byAS}[ch.rnd.IntN(3)]
		}
		if ch.rnd.IntN(2) == 0 {
			l.Match.Listen = []string{"l"}
		}
		l.MaxDelay = time.Duration(ch.rnd.IntN(200)) * time.Millisecond
		if ch.rnd.IntN(3) == 0 {
			l.Burst = ch.rnd.Uint64N(5000)
		}
		limits = append(limits, l)
	}
	add(shaper.Limit{Name: "all", Rate: rate()})
	if ch.rnd.IntN(3) > 0 {
		add(shaper.Limit{Name: "per-source", Key: shaper.KeySource, Rate: rate()})
	}
	if ch.rnd.IntN(3) > 0 {
		add(shaper.Limit{Name: "per-connection", Key: shaper.KeyConnection, Rate: rate()})
	}
	if ch.rnd.IntN(2) > 0 {
		add(shaper.Limit{Name: "two", Rate: rate(), Match: shaper.Match{Port: []shaper.PortRange{{First: 0, Last: 1}}}})
	}
	if ch.rnd.IntN(2) > 0 {
		add(shaper.Limit{Name: "packets", Packets: shaper.Frequency{N: 10 + ch.rnd.Uint64N(1000), Per: time.Second}, Key: shaper.Fields(ch.rnd.IntN(2)) * shaper.KeyPort})
	}
	for p := range uint16(3) {
		if ch.rnd.IntN(2) > 0 {
			add(shaper.Limit{Name: fmt.Sprint("port", p), Rate: rate(), Match: shaper.Match{Port: []shaper.PortRange{{First: p, Last: p}}}})
		}
	}
	return limits
}
