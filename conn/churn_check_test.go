package conn

import (
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
)

// check runs what may happen now, and checks the invariants of the queues: a unit counts where it
// waits, a node is suspended only for a reason, and a queue with units will be served.
func (ch *churn) check(what string) {
	sc := ch.scheduler
	sc.run(ch.now)
	if len(sc.work) != 0 || sc.running {
		ch.t.Fatalf("%s: work left over", what)
	}
	lanes := map[*lane]uint64{}
	suspended := map[*fairq.Node[unit]]bool{}
	pos := map[*unit]bool{}
	streams, packets := map[*queue]int{}, map[*queue]uint64{}
	for _, w := range ch.flows {
		for _, u := range w.queue {
			if w.stream && !u.queued {
				continue
			}
			if !u.queued {
				ch.t.Fatalf("%s: a unit is neither queued nor sent nor refused", what)
			}
			pos[&u.unit] = true
			for i := range u.path[:u.pos+1] {
				h := &u.path[i]
				if i < u.pos {
					lanes[h.lane] += u.weight
				}
				if u.droppable {
					packets[h.queue] += u.packets
				} else {
					streams[h.queue]++
				}
			}
			if u.booked {
				ch.booked++
				suspended[u.path[u.pos].flowQueue] = true
			}
		}
	}
	for _, q := range sc.byKey {
		if q.pending || q.forwarding != nil {
			ch.t.Fatalf("%s: %s is pending or forwarding", what, q.state.Name)
		}
		if q.grants != streams[q] || q.queuedPackets != packets[q] {
			ch.t.Fatalf("%s: %s counts %d streams and %d packets, want %d and %d", what, q.state.Name, q.grants, q.queuedPackets, streams[q], packets[q])
		}
		for i, b := range q.bookings {
			if !pos[b.unit] || !b.unit.booked || b.from != b.unit.due || i > 0 && q.bookings[i-1].from > b.from {
				ch.t.Fatalf("%s: wrong booking", what)
			}
		}
		for i, u := range q.booked {
			if !u.booked || u.path[u.pos].queue != q || u.pos != len(u.path)-1 || i > 0 && q.booked[i-1].due > u.due {
				ch.t.Fatalf("%s: wrong order of booked units", what)
			}
		}
		if q.blocked != nil && (!pos[q.blocked] || !q.blocked.booked) {
			ch.t.Fatalf("%s: wrong blocked unit", what)
		}
		if (q.root.Next() != nil || len(q.booked) > 0) && !q.timer.Scheduled() {
			ch.t.Fatalf("%s: %s will never be served", what, q.state.Name)
		}
		below := map[*sourceQueue]int{}
		for key, sq := range q.sources {
			if sq.key != key || sq.flows == 0 && sq.below == 0 && !sq.idle {
				ch.t.Fatalf("%s: a member is kept for nothing", what)
			}
			if p := sq.parent; p != nil {
				below[p]++
				if q.sources[p.key] != p || p.flows < sq.flows {
					ch.t.Fatalf("%s: a member is below one that is not there", what)
				}
			}
		}
		for _, sq := range q.sources {
			if sq.below != below[sq] {
				ch.t.Fatalf("%s: %d members are below one, of %d", what, below[sq], sq.below)
			}
			for _, ln := range sq.lanes {
				if ln.laterBytes != lanes[ln] {
					ch.t.Fatalf("%s: %s: %d bytes in later queues, want %d", what, q.state.Name, ln.laterBytes, lanes[ln])
				}
				if ln.Suspended() && ln.laterBytes == 0 {
					ch.t.Fatalf("%s: %s: a lane is suspended without reason", what, q.state.Name)
				}
			}
		}
		if err := q.root.Check(); err != nil {
			ch.t.Fatalf("%s: %s: %v", what, q.state.Name, err)
		}
	}
	for _, w := range ch.flows {
		for i := range w.path {
			n := w.path[i].flowQueue
			if n.Suspended() != suspended[n] {
				ch.t.Fatalf("%s: a leaf is suspended: %v, want %v", what, n.Suspended(), suspended[n])
			}
			for _, c := range []*fairq.Node[unit]{n, &w.path[i].lane.Node, &w.path[i].source.Node} {
				if err := c.Check(); err != nil {
					ch.t.Fatalf("%s: %s: %v", what, w.path[i].state.Name, err)
				}
			}
		}
	}
}

// pass advances the time to until.
func (ch *churn) pass(until leaky.Time, late func() leaky.Time) {
	same := 0
	for {
		for len(ch.later) > 0 {
			f := ch.later[0]
			ch.later = ch.later[1:]
			f()
		}
		at, ok := ch.wheel.Next()
		if !ok || at > until {
			ch.now = until
			return
		}
		was := ch.now
		ch.now = max(ch.now, min(until, at+late()))
		if same++; ch.now != was {
			same = 0
		}
		if same > 2000 {
			ch.t.Fatal("an event fires endlessly")
		}
		ch.wheel.Advance(ch.now)
		ch.check("event")
	}
}

// Whatever arrives, ends, is closed during the service of another, or follows a reload: every unit
// leaves in order or is refused, and no state is left.
func TestSchedulerChurn(t *testing.T) {
	rnd := testutil.Rand(t)
	var sent, refused, nested, booked, gone int
	for round := range 30 {
		r := newRig(t)
		ch := &churn{rig: r, rnd: rnd}
		r.policy = ch.policy()
		r.shaper.Swap(r.policy, 0)
		late := func() leaky.Time { return leaky.Time(rnd.Uint64N(uint64(leaky.Second / 500))) }
		for range 400 {
			switch rnd.IntN(12) {
			case 0, 1, 2:
				if len(ch.flows) < 25 {
					ch.open()
				}
			case 3, 4, 5:
				if len(ch.flows) > 0 {
					ch.submit(ch.flows[rnd.IntN(len(ch.flows))])
				}
			case 6:
				if len(ch.flows) > 0 {
					ch.close(ch.flows[rnd.IntN(len(ch.flows))])
				}
			case 7: // answered, sends again
				if len(ch.flows) > 0 {
					w := ch.flows[rnd.IntN(len(ch.flows))]
					if w.unverified {
						w.unverified = false
						ch.follow(w)
					}
				}
			case 8:
				if rnd.IntN(6) == 0 {
					p := ch.policy()
					r.shaper.Swap(p, ch.now)
					r.policy = p
					for _, w := range slices.Clone(ch.flows) {
						if rnd.IntN(10) == 0 {
							w.gone = true
							ch.gone++
						}
						ch.follow(w)
						ch.scheduler.run(ch.now)
						ch.check("follow")
						if rnd.IntN(4) == 0 {
							ch.pass(ch.now+leaky.Time(rnd.Uint64N(uint64(leaky.Second/50))), late)
						}
					}
				}
			case 9: // sends again
				for _, w := range slices.Clone(ch.flows) {
					if w.unverified && rnd.IntN(4) == 0 {
						ch.requeue(w, func() { giveOwnQueues(w.path) })
						if w.closed {
							continue
						}
						ch.check("goes on")
					}
				}
			default:
				ch.pass(ch.now+leaky.Time(rnd.Uint64N(uint64(leaky.Second/10))), late)
			}
			ch.check("step")
		}
		for i := 0; i < 1000 && len(ch.flows) > 0; i++ {
			for _, w := range slices.Clone(ch.flows) {
				if w.stream {
					ch.close(w)
				}
			}
			busy := false
			for _, w := range slices.Clone(ch.flows) {
				busy = busy || len(w.queue) > 0
			}
			if !busy {
				break
			}
			ch.pass(ch.now+leaky.FromDuration(time.Minute), late)
		}
		for _, w := range ch.flows {
			if len(w.queue) > 0 && len(w.path) > 0 {
				t.Fatalf("round %d: %d units never left", round, len(w.queue))
			}
		}
		for len(ch.flows) > 0 {
			ch.close(ch.flows[0])
		}
		ch.pass(ch.now+leaky.Second, onTime)
		if len(ch.scheduler.byKey) != 0 {
			t.Fatalf("%d queues left", len(ch.scheduler.byKey))
		}
		sent, refused, nested, booked, gone = sent+ch.sent, refused+r.refused, nested+ch.nested, booked+ch.booked, gone+ch.gone
	}
	if min(sent, refused, nested, booked, gone) == 0 {
		t.Errorf("%d sent, %d refused, %d nested, %d booked, %d gone", sent, refused, nested, booked, gone)
	}
}
