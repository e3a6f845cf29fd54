package bpf

import (
	"flag"
	"fmt"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

var steps = flag.Int("steps", 60_000, "random segments of the model test")

// TestModel feeds random segments of few connections, mostly as TCP would send them, to the
// programs and to the model, which must agree on each.
func TestModel(t *testing.T) {
	t.Parallel()
	rnd := testutil.Rand(t)
	b := newTCPVariant(t, shaper.AttachPolice, map[string]any{
		kernelVarUnderTest: uint32(1), kernelVarSweepInterval: uint64(time.Hour),
	}, testIdleTimeout)
	all := shaper.Limit{Name: "all", MaxConnections: 6}
	one := capped(3)
	b.setLimits(all, one)
	m := &model{caps: map[string]int{"all": 6, "capped": 3}, conns: map[int]*modelConn{}, slots: map[string]int{}, reversed: map[int]bool{}}
	// The server's port is the lower one, as adoption expects.
	var dialogues []*dialogue
	for i := range 12 {
		dialogues = append(dialogues, dial(fmt.Sprintf("10.0.0.%d:%d", 1+i%3, 40000+i)))
	}
	var refusals, lates, closes, expiries, adoptions int
	for step := range *steps {
		id := rnd.IntN(len(dialogues))
		d := dialogues[id]
		keys := map[string]string{"all": "all", "capped": d.ends[client].Addr().String()}
		side := rnd.IntN(2)
		was := m.conns[id]
		lives := was != nil && !was.closed
		opens := was != nil && was.lapsed()
		if rnd.IntN(1000) == 0 {
			b.setAllDeferUntil(t, 0)
			m.deferUntil = 0
		}
		flags := []byte{ack, ack, ack, ack | fin, ack | fin, rst, rst | ack, syn, syn | ack, 0, fin, syn | fin}[rnd.IntN(12)]
		if !lives && !opens && rnd.IntN(3) > 0 {
			side, flags = client, syn
		} else if opens && rnd.IntN(3) > 0 {
			side, flags = server, syn|ack
			if was.syn[server] {
				side, flags = client, ack
			}
		} else if lives && !(was.syn[0] && was.syn[1]) && rnd.IntN(2) == 0 {
			side, flags = server, syn|ack
		} else if lives && rnd.IntN(3) > 0 {
			flags = []byte{ack, ack | fin}[rnd.IntN(2)]
		}
		if begins := side == client && flags == syn; begins && !lives && (!opens || rnd.IntN(3) == 0) {
			d.next = [2]uint32{rnd.Uint32(), rnd.Uint32()}
		}
		n := rnd.IntN(3) * rnd.IntN(100)
		seq, acked := d.next[side], d.next[1-side]
		switch rnd.IntN(12) {
		case 0:
			seq += uint32(rnd.IntN(5)) - 2
		case 1:
			acked += uint32(rnd.IntN(5)) - 2
		case 2:
			seq, acked = rnd.Uint32(), rnd.Uint32()
		default:
			d.next[side] = seq + uint32(n)
			if flags&syn != 0 {
				d.next[side]++
			}
			if flags&fin != 0 {
				d.next[side]++
			}
		}
		if flags&ack == 0 {
			acked = 0
		}
		switch rnd.IntN(200) {
		case 0:
			b.now += rnd.Uint64N(3 * testIdleTimeout)
		case 1, 2, 3:
			b.now += rnd.Uint64N(2 * testClosingTimeout)
		case 4:
			b.now += []uint64{testIdleTimeout, testIdleTimeout - 1, testClosingTimeout, testClosingTimeout - 1, testHalfOpenTimeout, testHalfOpenTimeout - 1}[rnd.IntN(6)]
		default:
			b.now += rnd.Uint64N(uint64(time.Millisecond))
		}
		packet := d.segment(side, flags, seq, acked, n)
		fate := m.packet(id, side, flags, seq, acked, n, keys, b.now)
		action := uint32(passed)
		if side == client {
			action, _, _ = b.send(packet)
		} else {
			b.reply(packet)
		}
		want := uint32(passed)
		switch fate {
		case unestablished:
			want = dropped
			lates++
		case refused:
			want = answered
			if n > 0 {
				want = dropped
			}
			refusals++
		}
		held := 0
		for _, n := range m.slots {
			held += n
		}
		one, _ := b.readState(0)
		two, _ := b.readState(1)
		if action != want || int(one.InFlight+two.InFlight) != held || step%5000 == 0 && b.inFlight() != held {
			t.Fatalf("step %d: side %d, flags %x, seq %d, ack %d, %d bytes at %d: action %d, want %d; %d and %d in flight, want %d\nbefore: %+v",
				step, side, flags, seq, acked, n, b.now, int32(action), int32(want), one.InFlight, two.InFlight, held, was)
		}
		is := m.conns[id]
		switch {
		case lives && was.expired:
			expiries++
		case lives && was.closed:
			closes++
		case is != was && side == server:
			adoptions++
		}
	}
	t.Logf("%d refused, %d late, %d closed, %d expired, %d adopted", refusals, lates, closes, expiries, adoptions)
	if least := *steps / 1000; refusals < least || lates < least/10 || closes < least || expiries < least || adoptions < least {
		t.Error("too few cases of some kind")
	}
}
