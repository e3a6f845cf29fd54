package conn

import (
	"slices"
	"testing"
	"time"

	"shaperd/leaky"
)

// check has whatever may happen now happen, and looks at all that is in the lines: what waits
// counts where it waits, all that is barred is so for a reason, and a line in which somebody waits
// will be served.
func (t *turmoil) check(what string) {
	ls := t.lines
	ls.run(t.now)
	if len(ls.work) != 0 || ls.busy {
		t.t.Fatalf("%s: work left over", what)
	}
	lanes := map[*lane]uint64{}
	barred := map[*node]bool{}
	pos := map[*unit]bool{}
	streams, packets := map[*line]int{}, map[*line]uint64{}
	for _, w := range t.flows {
		for _, u := range w.queue {
			if w.stream && !u.queued {
				continue
			}
			if !u.queued {
				t.t.Fatalf("%s: a unit is neither queued nor sent nor refused", what)
			}
			pos[&u.unit] = true
			for i := range u.path[:u.pos+1] {
				at := &u.path[i]
				if i < u.pos {
					lanes[at.lane] += u.weight
				}
				if u.droppable {
					packets[at.line] += u.packets
				} else {
					streams[at.line]++
				}
			}
			if u.booked {
				t.booked++
				barred[u.path[u.pos].leaf] = true
			}
		}
	}
	var deep func(n *node)
	for _, l := range ls.byKey {
		if l.pending || l.passing != nil {
			t.t.Fatalf("%s: %s is pending or has one passing", what, l.state.Name)
		}
		if l.streams != streams[l] || l.queuedPackets != packets[l] {
			t.t.Fatalf("%s: %s counts %d streams and %d packets, want %d and %d", what, l.state.Name, l.streams, l.queuedPackets, streams[l], packets[l])
		}
		for i, b := range l.bookings {
			if !pos[b.unit] || !b.unit.booked || b.from != b.unit.due || i > 0 && l.bookings[i-1].from > b.from {
				t.t.Fatalf("%s: wrong booking", what)
			}
		}
		for i, u := range l.late {
			if !u.booked || u.path[u.pos].line != l || u.pos != len(u.path)-1 || i > 0 && l.late[i-1].due > u.due {
				t.t.Fatalf("%s: wrong late", what)
			}
		}
		if l.held != nil && (!pos[l.held] || !l.held.booked) {
			t.t.Fatalf("%s: held wrong", what)
		}
		if (l.root.first() != nil || len(l.late) > 0) && !l.event.Scheduled() {
			t.t.Fatalf("%s: %s will never be served", what, l.state.Name)
		}
		for _, sh := range l.shares {
			for _, ln := range sh.lanes {
				if ln.beyond != lanes[ln] {
					t.t.Fatalf("%s: %s: %d bytes beyond, want %d", what, l.state.Name, ln.beyond, lanes[ln])
				}
				if ln.barred && ln.beyond == 0 {
					t.t.Fatalf("%s: %s: a lane is barred for nothing", what, l.state.Name)
				}
			}
		}
		deep = func(n *node) {
			if n.served {
				t.t.Fatalf("%s: %s: served for ever", what, l.state.Name)
			}
			if n.parent != nil && n.member != (!n.barred && (n.head != nil || len(n.starts) > 0)) {
				t.t.Fatalf("%s: %s: member %v barred %v head %v", what, l.state.Name, n.member, n.barred, n.head != nil)
			}
			for _, c := range n.starts {
				deep(c)
			}
		}
		deep(&l.root)
	}
	for _, w := range t.flows {
		for i := range w.path {
			n := w.path[i].leaf
			if n.barred != barred[n] {
				t.t.Fatalf("%s: a leaf is barred: %v, want %v", what, n.barred, barred[n])
			}
			for c := n; c.parent != nil; c = c.parent {
				if c.member != c.active() {
					t.t.Fatalf("%s: %s: member %v barred %v head %v", what, w.path[i].state.Name, c.member, c.barred, c.head != nil)
				}
			}
		}
	}
}

// pass lets time go on until until.
func (t *turmoil) pass(until leaky.Time, late func() leaky.Time) {
	same := 0
	for {
		for len(t.later) > 0 {
			f := t.later[0]
			t.later = t.later[1:]
			f()
		}
		at, ok := t.wheel.Next()
		if !ok || at > until {
			t.now = until
			return
		}
		was := t.now
		t.now = max(t.now, min(until, at+late()))
		if same++; t.now != was {
			same = 0
		}
		if same > 2000 {
			t.t.Fatal("an event fires again and again")
		}
		t.wheel.Advance(t.now)
		t.check("event")
	}
}

// Whatever comes, goes, is closed in the middle of what another does, and follows a reload, every unit
// leaves in order, or is refused, and leaves nothing behind.
func TestTurmoilInLinesThatCross(t *testing.T) {
	rnd := newRand(t)
	var sent, refused, nested, booked, gone int
	for round := range 30 {
		r := newRig(t)
		tm := &turmoil{rig: r, rnd: rnd}
		limits := tm.limits()
		r.policy = policy(t, r.shaper, limits...)
		r.shaper.Swap(r.policy, 0)
		late := func() leaky.Time { return leaky.Time(rnd.Uint64N(uint64(leaky.Second / 500))) }
		for range 400 {
			switch rnd.IntN(12) {
			case 0, 1, 2:
				if len(tm.flows) < 25 {
					tm.open()
				}
			case 3, 4, 5:
				if len(tm.flows) > 0 {
					tm.submit(tm.flows[rnd.IntN(len(tm.flows))])
				}
			case 6:
				if len(tm.flows) > 0 {
					tm.close(tm.flows[rnd.IntN(len(tm.flows))])
				}
			case 7: // answered, goes on
				if len(tm.flows) > 0 {
					w := tm.flows[rnd.IntN(len(tm.flows))]
					if w.stranger {
						w.stranger = false
						tm.follow(w)
					}
				}
			case 8:
				if rnd.IntN(6) == 0 {
					p := policy(t, r.shaper, tm.limits()...)
					r.shaper.Swap(p, tm.now)
					r.policy = p
					for _, w := range slices.Clone(tm.flows) {
						if rnd.IntN(10) == 0 {
							w.gone = true
							tm.gone++
						}
						tm.follow(w)
						tm.lines.run(tm.now)
						tm.check("follow")
						if rnd.IntN(4) == 0 {
							tm.pass(tm.now+leaky.Time(rnd.Uint64N(uint64(leaky.Second/50))), late)
						}
					}
				}
			case 9: // goes on
				for _, w := range slices.Clone(tm.flows) {
					if w.stranger && rnd.IntN(4) == 0 {
						var units []*unit
						queue := slices.Clone(w.queue)
						for _, u := range queue {
							units = append(units, &u.unit)
						}
						if tm.lines.withdraw(tm.now, units...); w.closed {
							continue
						}
						apart(w.path)
						for _, u := range queue {
							u.resubmit(tm.now)
						}
						tm.check("goes on")
					}
				}
			default:
				tm.pass(tm.now+leaky.Time(rnd.Uint64N(uint64(leaky.Second/10))), late)
			}
			tm.check("step")
		}
		for i := 0; i < 1000 && len(tm.flows) > 0; i++ {
			for _, w := range slices.Clone(tm.flows) {
				if w.stream {
					tm.close(w)
				}
			}
			busy := false
			for _, w := range slices.Clone(tm.flows) {
				busy = busy || len(w.queue) > 0
			}
			if !busy {
				break
			}
			tm.pass(tm.now+leaky.FromDuration(time.Minute), late)
		}
		for _, w := range tm.flows {
			if len(w.queue) > 0 && len(w.path) > 0 {
				t.Fatalf("round %d: %d units never left", round, len(w.queue))
			}
		}
		for len(tm.flows) > 0 {
			tm.close(tm.flows[0])
		}
		tm.pass(tm.now+leaky.Second, onTime)
		if len(tm.lines.byKey) != 0 {
			t.Fatalf("%d lines left", len(tm.lines.byKey))
		}
		sent, refused, nested, booked, gone = sent+tm.sent, refused+r.refused, nested+tm.nested, booked+tm.booked, gone+tm.gone
	}
	if min(sent, refused, nested, booked, gone) == 0 {
		t.Errorf("%d sent, %d refused, %d nested, %d booked, %d gone", sent, refused, nested, booked, gone)
	}
}
