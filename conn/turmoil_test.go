package conn

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"shaperd/leaky"
	"shaperd/shaper"
)

// turmoil is flows that come, go, end each other and follow reloads, as sessions and flows of
// datagrams do.
type turmoil struct {
	*rig
	rnd    *rand.Rand
	flows  []*wildFlow
	later  []func()
	ids    uint64
	units  int
	sent   int
	nested int // what happened in the middle of a send
	booked int
	gone   int
	spare  []*wildUnit
}

// wildFlow is a flow of a turmoil: a session's direction, or one of datagrams.
type wildFlow struct {
	*turmoil
	f        *shaper.Flow
	path     []stop
	account  account
	queue    []*wildUnit // oldest first
	stream   bool
	stranger bool
	gone     bool
	closed   bool
	was      *shaper.Policy
	next     int
	last     int
}

type wildUnit struct {
	unit
	w  *wildFlow
	id int
}

func (u *wildUnit) send(now leaky.Time) (bytes, packets uint64, again bool) {
	w := u.w
	t := w.turmoil
	if w.closed {
		t.t.Fatalf("sent after close")
	}
	if u.queued || u.booked {
		t.t.Fatalf("sent while queued")
	}
	if u.id < w.last {
		t.t.Fatalf("unit %d left after %d", u.id, w.last)
	}
	w.last = u.id
	t.sent++
	n := u.bytes
	if w.stream {
		switch t.rnd.IntN(8) {
		case 0:
			n = 1 + t.rnd.Uint64N(2*n)
		case 1:
			u.bytes = 64 + t.rnd.Uint64N(20000)
			n = u.bytes
		case 2:
			n = 0
		}
		t.trouble(w)
		if w.closed {
			return n, 0, false
		}
		if n == 0 || t.rnd.IntN(10) == 0 {
			w.queue = nil
			return n, 0, false
		}
		u.id = w.next
		w.next++
		return n, 0, true
	}
	w.queue = slices.DeleteFunc(w.queue, func(o *wildUnit) bool { return o == u })
	t.free(u)
	if t.rnd.IntN(20) == 0 {
		return 0, 0, false
	}
	return n, 1, false
}

func (t *turmoil) free(u *wildUnit) {
	*u = wildUnit{}
	t.spare = append(t.spare, u)
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
	u.path, u.admitted = u.w.path, true
	u.w.lines.submit(&u.unit, now)
}

func (u *wildUnit) refused(by *line, _ shaper.Reason) {
	w := u.w
	if w.stream {
		w.t.Fatal("refused a stream")
	}
	w.rig.refused++
	w.queue = slices.DeleteFunc(w.queue, func(o *wildUnit) bool { return o == u })
	w.free(u)
}

// trouble is what happens in the middle of a send.
func (t *turmoil) trouble(self *wildFlow) {
	if t.rnd.IntN(4) > 0 || len(t.flows) == 0 {
		return
	}
	t.nested++
	w := t.flows[t.rnd.IntN(len(t.flows))]
	switch t.rnd.IntN(4) {
	case 0:
		t.close(w)
	case 1:
		if w != self {
			t.submit(w)
		}
	case 2: // an idle flow of datagrams makes room
		for _, w := range t.flows {
			if !w.stream && len(w.queue) == 0 {
				t.close(w)
				break
			}
		}
	case 3:
		t.open()
	}
}

func (t *turmoil) open() *wildFlow {
	t.ids++
	f := flowFrom(fmt.Sprintf("10.0.0.%d", 1+t.rnd.IntN(5)), uint16(t.rnd.IntN(3)))
	f.Connection = t.ids
	w := &wildFlow{turmoil: t, f: f, last: -1, stream: t.rnd.IntN(2) == 0, was: t.shaper.Policy()}
	if !w.stream {
		f.Protocol = shaper.UDP
		w.stranger = t.rnd.IntN(2) == 0
	}
	w.path = t.newPath(w)
	t.flows = append(t.flows, w)
	t.submit(w)
	return w
}

func (t *turmoil) newPath(w *wildFlow) []stop {
	p := t.shaper.Policy()
	r := p.Route(w.f)
	return t.lines.path(p, w.f, r, r.ToDownstream, w.stranger)
}

func (t *turmoil) submit(w *wildFlow) {
	if len(w.path) == 0 || w.closed {
		return
	}
	n := 1
	if w.stream {
		if len(w.queue) > 0 {
			return
		}
	} else {
		n += t.rnd.IntN(3)
	}
	for range n {
		if w.closed {
			return
		}
		u := &wildUnit{}
		if k := len(t.spare); k > 0 && !w.stream {
			u, t.spare = t.spare[k-1], t.spare[:k-1]
		}
		size := []uint64{1, 64, 1000, 1448, 1472}[t.rnd.IntN(5)]
		u.w, u.id = w, w.next
		w.next++
		u.unit = unit{owner: u, path: w.path, bytes: size, packets: 1, credit: udpCredit, grain: size, droppable: true}
		if w.stream {
			size = []uint64{1448, 3000, 16000}[t.rnd.IntN(3)]
			u.unit = unit{owner: u, path: w.path, bytes: size, credit: grantCredit, grain: size}
		}
		w.queue = append(w.queue, u)
		t.units++
		t.lines.submit(&u.unit, t.now)
	}
}

func (t *turmoil) close(w *wildFlow) {
	if w.closed {
		return
	}
	w.closed = true
	t.flows = slices.DeleteFunc(t.flows, func(o *wildFlow) bool { return o == w })
	var units []*unit
	for _, u := range w.queue {
		units = append(units, &u.unit)
	}
	t.lines.withdraw(t.now, units...)
	if w.stream {
		t.later = append(t.later, func() { t.lines.release(w.path, t.now) })
		return
	}
	for _, u := range w.queue {
		t.free(u)
	}
	w.queue = nil
	t.lines.release(w.path, t.now)
}

// follow is what reroute does.
func (t *turmoil) follow(w *wildFlow) {
	p := t.shaper.Policy()
	r := p.Route(w.f)
	was := w.was
	w.was = p
	if !w.gone && t.lines.same(w.path, p, w.f, r, r.ToDownstream, w.stranger, t.now) {
		if w.stream && len(w.queue) > 0 && !w.closed {
			w.queue[0].bytes = 64 + t.rnd.Uint64N(20000)
		}
		return
	}
	if w.closed {
		return
	}
	t.repath(w, was)
}

func (t *turmoil) repath(w *wildFlow, was *shaper.Policy) {
	queue := slices.Clone(w.queue)
	var units []*unit
	for _, u := range queue {
		units = append(units, &u.unit)
	}
	if t.lines.withdraw(t.now, units...); w.closed {
		return
	}
	path := t.newPath(w)
	w.path = t.lines.replace(&w.account, w.path, path, w.gone, was, t.now)
	for _, u := range queue {
		if w.closed {
			return
		}
		u.resubmit(t.now)
	}
}

// limits returns random ones.
func (t *turmoil) limits() (limits []shaper.Limit) {
	rate := func() uint64 { return 8 << (12 + t.rnd.IntN(9)) }
	add := func(l shaper.Limit) {
		if t.rnd.IntN(3) == 0 {
			l.Share = shaper.ShareFIFO
		}
		if t.rnd.IntN(2) == 0 {
			l.Match.Listen = []string{"l"}
		}
		l.MaxDelay = time.Duration(t.rnd.IntN(200)) * time.Millisecond
		if t.rnd.IntN(3) == 0 {
			l.Burst = t.rnd.Uint64N(5000)
		}
		limits = append(limits, l)
	}
	add(shaper.Limit{Name: "all", Rate: rate()})
	if t.rnd.IntN(3) > 0 {
		add(shaper.Limit{Name: "per-source", Key: shaper.KeySource, Rate: rate()})
	}
	if t.rnd.IntN(3) > 0 {
		add(shaper.Limit{Name: "per-connection", Key: shaper.KeyConnection, Rate: rate()})
	}
	if t.rnd.IntN(2) > 0 {
		add(shaper.Limit{Name: "two", Rate: rate(), Match: shaper.Match{Port: []shaper.PortRange{{First: 0, Last: 1}}}})
	}
	if t.rnd.IntN(2) > 0 {
		add(shaper.Limit{Name: "packets", Packets: shaper.Frequency{N: 10 + t.rnd.Uint64N(1000), Per: time.Second}, Key: shaper.Fields(t.rnd.IntN(2)) * shaper.KeyPort})
	}
	for p := range uint16(3) {
		if t.rnd.IntN(2) > 0 {
			add(shaper.Limit{Name: fmt.Sprint("port", p), Rate: rate(), Match: shaper.Match{Port: []shaper.PortRange{{First: p, Last: p}}}})
		}
	}
	return limits
}
