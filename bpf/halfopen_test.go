package bpf

import (
	"encoding/binary"
	"fmt"
	"math"
	"testing"
	"time"

	"shaperd/shaper"
)

// suspectAll has SYNs reserve no slots until some time, under all limits.
func (b *bench) suspectAll(t testing.TB, until uint64) {
	t.Helper()
	for number := range maxLimits {
		if err := b.Suspected.Put(number, until); err != nil {
			t.Fatal(err)
		}
	}
}

// repliedAll says whether a responder has answered, at all attachments.
func (b *bench) repliedAll(t testing.TB, has bool) {
	t.Helper()
	for place := range b.Replied.MaxEntries() {
		if err := b.setReplied(place, has); err != nil {
			t.Fatal(err)
		}
	}
}

// settle waits until the timer has looked at each connection whose turn it is.
func (b *tcpBench) settle() {
	b.t.Helper()
	for due := true; due; time.Sleep(100 * time.Microsecond) {
		due = false
		err := b.eachConnection(func(_ *kernelTuple, f *kernelFlight) { due = due || f.Check <= b.now })
		if err == nil {
			err = b.TestNow.Set(b.now)
		}
		if err != nil {
			b.t.Fatal(err)
		}
	}
}

// speak has both sides say something behind the handshake.
func (b *tcpBench) speak(d *dialogue) {
	b.exchange(d, server, ack, 100)
	b.exchange(d, client, ack, 10)
	b.exchange(d, server, ack, 0)
}

// TestForgedSYNs forges so many SYNs as a cap has slots, and again as soon as they may be of
// use: an honest client finds no slot once, for as long as a handshake may take, and not again.
func TestForgedSYNs(t *testing.T) {
	const most = 3
	b := newTCPVariant(t, Police, map[string]any{kernelVarUnderTest: uint32(1), kernelVarSweepInterval: uint64(time.Millisecond)}, testIdle)
	for _, c := range []struct {
		name  string
		every time.Duration // each has its say
		say   func(b *tcpBench, d *dialogue, n int)
	}{
		{"again and again", 3 * time.Second, func(b *tcpBench, d *dialogue, n int) {
			*d = *dial(fmt.Sprint("10.9.0.1:", 20000+n))
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
		}},
		{"never answered", 3 * time.Second, func(b *tcpBench, d *dialogue, n int) {
			*d = *dial(fmt.Sprint("10.9.0.1:", 20000+n))
			b.open(d)
		}},
		{"sent again", time.Second, func(b *tcpBench, d *dialogue, n int) {
			*d = *dial(d.ends[client].String())
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
		}},
		{"sent again, with other numbers", time.Second, func(b *tcpBench, d *dialogue, n int) {
			*d = *dial(d.ends[client].String())
			d.next[client] += uint32(n) << 16
			b.open(d)
		}},
		{"followed by data", time.Second, func(b *tcpBench, d *dialogue, n int) {
			if n < most {
				b.open(d)
				b.exchange(d, server, syn|ack, 0)
			}
			b.send(d.segment(client, ack, d.next[client], 1, 10))
		}},
		{"taken back in time", time.Second, func(b *tcpBench, d *dialogue, n int) {
			if n >= most {
				b.exchange(d, client, rst, 0)
			}
			*d = *dial(d.ends[client].String())
			b.open(d)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.t = t
			b.forget()
			b.limit(shaper.Limit{Name: "all", Connections: most})
			other := dial("10.0.0.2:40000") // the server has answered before
			b.establish(other)
			b.exchange(other, client, rst, 0)
			var forged [most]*dialogue
			for i := range forged {
				forged[i] = dial(fmt.Sprint("10.9.0.1:", 10000+i))
			}
			start, n, denied, tries := b.now, 0, 0, 0
			const step = time.Second
			for at := time.Duration(0); at < 80*time.Second; at += step {
				b.now = start + uint64(at)
				b.settle()
				if at%c.every == 0 {
					for i := range forged {
						c.say(b, forged[i], n)
						n++
					}
				}
				d := dial(fmt.Sprint("10.0.0.1:", 40000+int(at/step)))
				tries++
				if b.open(d) != passed {
					denied++
					continue
				}
				b.exchange(d, server, syn|ack, 0)
				if action := b.exchange(d, client, ack, 0); action != passed {
					t.Errorf("after %v: the handshake's ACK met action %d", at, int32(action))
				}
				b.speak(d)
				b.exchange(d, client, rst, 0)
			}
			if most := int(testHalfOpen / uint64(step)); denied > most {
				t.Errorf("%d of %d connections were refused, want at most %d", denied, tries, most)
			}
		})
	}
}

// TestSlotAtACK leads connections through handshakes in which SYNs reserve no slots.
func TestSlotAtACK(t *testing.T) {
	b := newTCP(t, Police)
	const a = "10.0.0.1:40000"
	for _, c := range []struct {
		name string
		run  func(b *tcpBench, d *dialogue)
		want int // in flight afterwards
	}{
		{"a SYN takes nothing", func(b *tcpBench, d *dialogue) { b.open(d) }, 0},
		{"nor does its answer", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
		}, 0},
		{"established", func(b *tcpBench, d *dialogue) { b.establish(d) }, 1},
		{"established by data, late", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			d.say(client, ack, 0)
			b.now += uint64(119 * time.Second) // a SYN cookie may be as old
			b.exchange(d, client, ack|fin, 10)
		}, 1},
		{"closed", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, client, ack, 0)
		}, 0},
		{"a number that was made up", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			if got := b.send1(d.segment(client, ack, d.next[client], d.next[server]+1, 10)); got != dropped {
				b.t.Errorf("action %d", int32(got))
			}
		}, 0},
		{"no answer that acknowledges it", func(b *tcpBench, d *dialogue) {
			b.open(d)
			if got := b.exchange(d, client, ack, 10); got != passed { // it may come by another way
				b.t.Errorf("action %d", int32(got))
			}
		}, 0},
		{"another SYN behind the answer", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			for _, seq := range []uint32{1, d.next[client] - 1} {
				b.send(d.segment(client, syn, seq, 0, 0))
			}
			b.exchange(d, client, ack, 0)
		}, 1},
		{"another SYN behind the answer, much later", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			b.now += uint64(30 * time.Second)
			b.send(d.segment(client, syn, 1, 0, 0))
			b.exchange(d, client, ack, 0)
		}, 1},
		{"another SYN behind the answer, which reserves", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			b.now += uint64(30 * time.Second)
			b.suspectAll(b.t, 0)
			b.send(d.segment(client, syn, 1, 0, 0))
			b.suspectAll(b.t, 0)
			b.exchange(d, client, ack, 0)
			b.now += testIdle - 1
			b.exchange(d, client, ack, 1)
		}, 1},
		{"two answers, and the first is acknowledged", func(b *tcpBench, d *dialogue) {
			b.open(d)
			first := d.next[server]
			b.exchange(d, server, syn|ack, 0)
			b.reply(d.segment(server, syn|ack, first+1<<20, d.next[client], 0))
			b.exchange(d, client, ack, 0)
		}, 1},
		{"two answers, and the second is acknowledged", func(b *tcpBench, d *dialogue) {
			b.open(d)
			first := d.next[server]
			b.exchange(d, server, syn|ack, 0)
			b.reply(d.segment(server, syn|ack, first+1<<20, d.next[client], 0))
			b.send(d.segment(client, ack, d.next[client], first+1<<20+1, 0))
		}, 1},
		{"its ACK came by another way, and the server sends", func(b *tcpBench, d *dialogue) {
			d.ends[server], d.ends[client] = d.ends[client], d.ends[server] // ports tell nothing
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			d.say(client, ack, 10)
			b.exchange(d, server, ack, 0)
		}, 1},
		{"reset by the server", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			b.exchange(d, client, ack, 10)
			b.reply(d.segment(server, rst, d.next[server], 0, 0))
		}, 0},
		{"reset by the client, and established by a SYN cookie", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			b.suspectAll(b.t, 0)
			b.exchange(d, client, rst, 0)
			b.exchange(d, client, ack, 0)
		}, 1},
		{"an ACK that the server resets, and then the right one", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			b.send(d.segment(client, ack, d.next[client]+28, d.next[server], 8))
			b.exchange(d, client, ack|fin, 0)
			b.reply(d.segment(server, rst, d.next[server], 0, 0))
			b.exchange(d, server, ack, 0)
			b.now += testIdle - 1
			b.exchange(d, server, ack, 10)
		}, 1},
		{"an ACK that gets lost, one that the server resets, and the right one", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			b.send(d.segment(client, ack, d.next[client], d.next[server], 0))
			b.send(d.segment(client, ack, d.next[client]+28, d.next[server], 8))
			b.exchange(d, client, ack, 0)
			b.reply(d.segment(server, rst, d.next[server], 0, 0))
		}, 1},
		{"replies by another way", func(b *tcpBench, d *dialogue) {
			b.asymmetric()
			b.open(d)
		}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.t = t
			b.forget()
			b.limit(capped(1), shaper.Limit{Name: "seen", Connections: 1, Observe: true})
			b.repliedAll(t, true)
			b.suspectAll(t, math.MaxUint64)
			c.run(b, dial(a))
			b.expectInFlight(2 * c.want)
			b.expectConsistent()
		})
	}
}

// TestAsymmetricHandshakeTakesLong has an ACK come late where nothing tells of an answer.
func TestAsymmetricHandshakeTakesLong(t *testing.T) {
	b := newTCPVariant(t, Police, map[string]any{kernelVarUnderTest: uint32(1), kernelVarSweepInterval: uint64(time.Millisecond)}, testIdle, capped(1))
	d := dial("10.0.0.1:40000")
	b.open(d)
	d.say(server, syn|ack, 0)
	for range 20 {
		b.pass(time.Second)
	}
	b.expectInFlight(0)
	if got := b.exchange(d, client, ack, 0); got != passed {
		t.Errorf("it met action %d", int32(got))
	}
	b.expectInFlight(1)
}

// send1 sends a packet, and tells the action alone.
func (b *tcpBench) send1(packet []byte) uint32 {
	b.t.Helper()
	action, _, _ := b.send(packet)
	return action
}

// TestHerdAtACK has many clients complete their handshakes at once, without slots that are
// reserved: no more are established than there may be, and who waits gets the next slot.
func TestHerdAtACK(t *testing.T) {
	const most, clients = 3, 10
	b := newTCP(t, Police, shaper.Limit{Name: "all", Connections: most, NewConnections: shaper.Frequency{N: 10, Per: time.Hour}, MaxWait: clients * 6 * time.Minute})
	b.repliedAll(t, true)
	b.suspectAll(t, math.MaxUint64)
	var open []*dialogue
	for i := range clients {
		d := dial(fmt.Sprint("10.0.0.1:", 40000+i))
		if got := b.open(d); got != passed {
			t.Fatalf("SYN %d met action %d", i, int32(got))
		}
		b.exchange(d, server, syn|ack, 0)
		open = append(open, d)
	}
	for i, d := range open {
		want := map[bool]uint32{true: passed, false: dropped}[i < most]
		if got := b.exchange(d, client, ack, 0); got != want {
			t.Errorf("ACK %d met action %d, want %d", i, int32(got), int32(want))
		}
	}
	b.expectInFlight(most)
	b.speak(open[0])
	b.speak(open[1])
	if got := b.open(dial("10.0.0.2:40000")); got != answered {
		t.Errorf("with all slots taken, a SYN met action %d", int32(got))
	}
	b.exchange(open[0], client, rst, 0)
	if got := b.exchange(open[most], client, ack, 10); got != passed {
		t.Errorf("with a slot free, data met action %d", int32(got))
	}
	b.expectInFlight(most)
	if s := b.counters(); s.Connections[0] != clients || s.OverConnections != clients-most+1 {
		t.Errorf("%v let through, %d refused", s.Connections, s.OverConnections)
	}
	b.exchange(open[1], client, rst, 0)
	if got := b.open(dial("10.0.0.2:40000")); got != passed {
		t.Errorf("the last one that is let through met action %d", int32(got))
	}
	if got := b.open(dial("10.0.0.2:40001")); got != answered {
		t.Errorf("one more met action %d", int32(got))
	}
}

// TestReservesAgain waits until no handshake has failed for long: SYNs reserve slots again.
func TestReservesAgain(t *testing.T) {
	b := newTCPVariant(t, Police, map[string]any{kernelVarUnderTest: uint32(1), kernelVarSweepInterval: uint64(time.Hour)}, testIdle, capped(1))
	b.repliedAll(t, true)
	b.open(dial("10.0.0.1:40000"))
	b.now += testHalfOpen
	b.exchange(dial("10.0.0.1:40000"), client, ack, 0) // finds that it has expired
	b.now += uint64(time.Minute) - 1
	b.open(dial("10.0.0.1:40001"))
	b.expectInFlight(0)
	b.now++
	b.open(dial("10.0.0.1:40002"))
	b.expectInFlight(1)
}

// TestFastOpen sends SYNs that a server may take for a connection at once. Where SYNs reserve
// no slots they are dropped: clients go on without.
func TestFastOpen(t *testing.T) {
	b := newTCP(t, Police, capped(100))
	b.repliedAll(t, true)
	n := 0
	plain := []byte{2, 4, 5, 180, 4, 2, 8, 10, 34, 254, 249, 137, 0, 0, 0, 0, 1, 3, 3, 7}
	for _, c := range []struct {
		name    string
		options []byte
		payload int
		want    uint32
	}{
		{"none", nil, 0, passed},
		{"those of Linux", plain, 0, passed},
		{"data", plain, 5, dropped},
		{"a cookie", append([]byte{34, 10, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1}, plain...), 0, dropped},
		{"a cookie behind others", append(append([]byte{}, plain...), 1, 1, 34, 10, 1, 2, 3, 4, 5, 6, 7, 8), 0, dropped},
		{"an experimental cookie", append([]byte{254, 12, 0xf9, 0x89, 1, 2, 3, 4, 5, 6, 7, 8}, plain...), 0, dropped},
		{"another experiment", append([]byte{254, 12, 0xe2, 0xd4, 1, 2, 3, 4, 5, 6, 7, 8}, plain...), 0, passed},
		{"behind the end", []byte{0, 34, 10, 0}, 0, passed},
		{"behind one that has no length", []byte{9, 0, 34, 10}, 0, passed},
	} {
		for _, suspected := range []bool{false, true} {
			n++
			until, want, held := uint64(0), uint32(passed), 1
			if suspected {
				until, want, held = math.MaxUint64, c.want, 0
			}
			b.suspectAll(t, until)
			before := b.inFlight()
			p := dial(fmt.Sprint("10.0.0.1:", n)).say(client, syn, 0)[:14+20+20]
			p = append(append(p, c.options...), make([]byte, c.payload)...)
			p[14+20+12] = byte(5+len(c.options)/4) << 4
			binary.BigEndian.PutUint16(p[14+2:], uint16(len(p)-14))
			if got := b.send1(p); got != want {
				t.Errorf("%s, suspected %v: action %d, want %d", c.name, suspected, int32(got), int32(want))
			}
			b.expectInFlight(before + held)
		}
	}
}
