package bpf

import (
	"encoding/binary"
	"fmt"
	"math"
	"testing"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// setAllDeferUntil makes SYNs reserve no slots before a time, under all limits.
func (b *bench) setAllDeferUntil(t testing.TB, until uint64) {
	t.Helper()
	for number := range maxLimits {
		if err := b.DeferUntil.Put(number, until); err != nil {
			t.Fatal(err)
		}
	}
}

// setAllReplySeen sets whether a responder has replied, at all attachments.
func (b *bench) setAllReplySeen(t testing.TB, has bool) {
	t.Helper()
	for i := range b.ReplySeen.MaxEntries() {
		if err := b.setReplySeen(i, has); err != nil {
			t.Fatal(err)
		}
	}
}

// awaitSweep waits until the sweeper has visited all connections that are due.
func (b *tcpBench) awaitSweep() {
	b.t.Helper()
	for due := true; due; time.Sleep(100 * time.Microsecond) {
		due = false
		err := b.eachConnection(func(_ *kernelTuple, f *kernelConn) { due = due || f.SweepAt <= b.now })
		if err == nil {
			err = b.TestNow.Set(b.now)
		}
		if err != nil {
			b.t.Fatal(err)
		}
	}
}

// exchangeData sends data in both directions after the handshake.
func (b *tcpBench) exchangeData(d *dialogue) {
	b.exchange(d, server, ack, 100)
	b.exchange(d, client, ack, 10)
	b.exchange(d, server, ack, 0)
}

// TestForgedSYNs forges as many SYNs as a cap has slots, and repeats them as soon as it may help:
// an honest client finds no slot for one handshake timeout, and then always does.
func TestForgedSYNs(t *testing.T) {
	t.Parallel()
	const most = 3
	b := newTCPVariant(t, shaper.AttachPolice, map[string]any{kernelVarUnderTest: uint32(1), kernelVarSweepInterval: uint64(time.Millisecond)}, testIdleTimeout)
	for _, c := range []struct {
		name  string
		every time.Duration // interval of the forged segments
		say   func(b *tcpBench, d *dialogue, n int)
	}{
		{"repeated", 3 * time.Second, func(b *tcpBench, d *dialogue, n int) {
			*d = *dial(fmt.Sprint("10.9.0.1:", 20000+n))
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
		}},
		{"unanswered", 3 * time.Second, func(b *tcpBench, d *dialogue, n int) {
			*d = *dial(fmt.Sprint("10.9.0.1:", 20000+n))
			b.open(d)
		}},
		{"retransmitted", time.Second, func(b *tcpBench, d *dialogue, n int) {
			*d = *dial(d.ends[client].String())
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
		}},
		{"retransmitted with other sequence numbers", time.Second, func(b *tcpBench, d *dialogue, n int) {
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
		{"reset in time", time.Second, func(b *tcpBench, d *dialogue, n int) {
			if n >= most {
				b.exchange(d, client, rst, 0)
			}
			*d = *dial(d.ends[client].String())
			b.open(d)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.t = t
			b.clearMaps()
			b.setLimits(shaper.Limit{Name: "all", MaxConnections: most})
			other := dial("10.0.0.2:40000") // the programs have seen a reply
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
				b.awaitSweep()
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
				b.exchangeData(d)
				b.exchange(d, client, rst, 0)
			}
			if most := int(testHalfOpenTimeout / uint64(step)); denied > most {
				t.Errorf("%d of %d connections were refused, want at most %d", denied, tries, most)
			}
		})
	}
}

// TestSlotAtACK runs handshakes in which SYNs reserve no slots.
func TestSlotAtACK(t *testing.T) {
	t.Parallel()
	b := newTCP(t, shaper.AttachPolice)
	const a = "10.0.0.1:40000"
	for _, c := range []struct {
		name string
		run  func(b *tcpBench, d *dialogue)
		want int // in flight afterwards
	}{
		{"a SYN takes nothing", func(b *tcpBench, d *dialogue) { b.open(d) }, 0},
		{"nor does its SYN+ACK", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
		}, 0},
		{"established", func(b *tcpBench, d *dialogue) { b.establish(d) }, 1},
		{"established by data, late", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			d.nextSegment(client, ack, 0)
			b.now += uint64(119 * time.Second) // the maximum age of a SYN cookie
			b.exchange(d, client, ack|fin, 10)
		}, 1},
		{"closed", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, client, ack, 0)
		}, 0},
		{"an invalid ACK number", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			if got := b.sendAction(d.segment(client, ack, d.next[client], d.next[server]+1, 10)); got != dropped {
				b.t.Errorf("action %d", int32(got))
			}
		}, 0},
		{"no SYN+ACK seen", func(b *tcpBench, d *dialogue) {
			b.open(d)
			if got := b.exchange(d, client, ack, 10); got != passed { // it may come by another path
				b.t.Errorf("action %d", int32(got))
			}
		}, 0},
		{"another SYN after the SYN+ACK", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			for _, seq := range []uint32{1, d.next[client] - 1} {
				b.send(d.segment(client, syn, seq, 0, 0))
			}
			b.exchange(d, client, ack, 0)
		}, 1},
		{"another SYN after the SYN+ACK, much later", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			b.now += uint64(30 * time.Second)
			b.send(d.segment(client, syn, 1, 0, 0))
			b.exchange(d, client, ack, 0)
		}, 1},
		{"another SYN after the SYN+ACK, which reserves", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			b.now += uint64(30 * time.Second)
			b.setAllDeferUntil(b.t, 0)
			b.send(d.segment(client, syn, 1, 0, 0))
			b.setAllDeferUntil(b.t, 0)
			b.exchange(d, client, ack, 0)
			b.now += testIdleTimeout - 1
			b.exchange(d, client, ack, 1)
		}, 1},
		{"two SYN+ACKs, and the first is acknowledged", func(b *tcpBench, d *dialogue) {
			b.open(d)
			first := d.next[server]
			b.exchange(d, server, syn|ack, 0)
			b.reply(d.segment(server, syn|ack, first+1<<20, d.next[client], 0))
			b.exchange(d, client, ack, 0)
		}, 1},
		{"two SYN+ACKs, and the second is acknowledged", func(b *tcpBench, d *dialogue) {
			b.open(d)
			first := d.next[server]
			b.exchange(d, server, syn|ack, 0)
			b.reply(d.segment(server, syn|ack, first+1<<20, d.next[client], 0))
			b.send(d.segment(client, ack, d.next[client], first+1<<20+1, 0))
		}, 1},
		{"its ACK came by another path, and the server sends", func(b *tcpBench, d *dialogue) {
			d.ends[server], d.ends[client] = d.ends[client], d.ends[server] // the port order does not matter
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			d.nextSegment(client, ack, 10)
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
			b.setAllDeferUntil(b.t, 0)
			b.exchange(d, client, rst, 0)
			b.exchange(d, client, ack, 0)
		}, 1},
		{"an ACK that the server resets, and then a valid one", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			b.send(d.segment(client, ack, d.next[client]+28, d.next[server], 8))
			b.exchange(d, client, ack|fin, 0)
			b.reply(d.segment(server, rst, d.next[server], 0, 0))
			b.exchange(d, server, ack, 0)
			b.now += testIdleTimeout - 1
			b.exchange(d, server, ack, 10)
		}, 1},
		{"an ACK that is lost, one that the server resets, and a valid one", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			b.send(d.segment(client, ack, d.next[client], d.next[server], 0))
			b.send(d.segment(client, ack, d.next[client]+28, d.next[server], 8))
			b.exchange(d, client, ack, 0)
			b.reply(d.segment(server, rst, d.next[server], 0, 0))
		}, 1},
		{"replies by another path", func(b *tcpBench, d *dialogue) {
			b.forgetReplies()
			b.open(d)
		}, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.t = t
			b.clearMaps()
			b.setLimits(capped(1), shaper.Limit{Name: "seen", MaxConnections: 1, Observe: true})
			b.setAllReplySeen(t, true)
			b.setAllDeferUntil(t, math.MaxUint64)
			c.run(b, dial(a))
			b.expectInFlight(2 * c.want)
			b.expectConsistent()
		})
	}
}

// TestSlotAtACK_NoRepliesSeen sends a late ACK where no replies are seen.
func TestSlotAtACK_NoRepliesSeen(t *testing.T) {
	t.Parallel()
	b := newTCPVariant(t, shaper.AttachPolice, map[string]any{kernelVarUnderTest: uint32(1), kernelVarSweepInterval: uint64(time.Millisecond)}, testIdleTimeout, capped(1))
	d := dial(testClient)
	b.open(d)
	d.nextSegment(server, syn|ack, 0)
	for range 20 {
		b.advance(time.Second)
	}
	b.expectInFlight(0)
	if got := b.exchange(d, client, ack, 0); got != passed {
		t.Errorf("the ACK met action %d", int32(got))
	}
	b.expectInFlight(1)
}

// sendAction sends a packet and returns the action only.
func (b *tcpBench) sendAction(packet []byte) uint32 {
	b.t.Helper()
	action, _, _ := b.send(packet)
	return action
}

// TestSlotAtACK_ManyClients completes many handshakes at once without reserved slots: no more
// than the cap are established, and a waiting client gets the next slot.
func TestSlotAtACK_ManyClients(t *testing.T) {
	t.Parallel()
	const most, clients = 3, 10
	b := newTCP(t, shaper.AttachPolice, shaper.Limit{Name: "all", MaxConnections: most, NewConnections: shaper.Frequency{N: 10, Per: time.Hour}, QueueTimeout: clients * 6 * time.Minute})
	b.setAllReplySeen(t, true)
	b.setAllDeferUntil(t, math.MaxUint64)
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
	b.exchangeData(open[0])
	b.exchangeData(open[1])
	if got := b.open(dial("10.0.0.2:40000")); got != answered {
		t.Errorf("with all slots taken, a SYN met action %d", int32(got))
	}
	b.exchange(open[0], client, rst, 0)
	if got := b.exchange(open[most], client, ack, 10); got != passed {
		t.Errorf("with a slot free, data met action %d", int32(got))
	}
	b.expectInFlight(most)
	if s := b.counters(); s.ConnsAdmitted[0] != clients || s.ConnsOverCap != clients-most+1 {
		t.Errorf("%v admitted, %d refused", s.ConnsAdmitted, s.ConnsOverCap)
	}
	b.exchange(open[1], client, rst, 0)
	if got := b.open(dial("10.0.0.2:40000")); got != passed {
		t.Errorf("the last admitted SYN met action %d", int32(got))
	}
	if got := b.open(dial("10.0.0.2:40001")); got != answered {
		t.Errorf("one more met action %d", int32(got))
	}
}

// TestReservation_ResumesAfterQuietMinute lets a minute pass without a failed handshake: SYNs reserve slots again.
func TestReservation_ResumesAfterQuietMinute(t *testing.T) {
	t.Parallel()
	b := newTCPVariant(t, shaper.AttachPolice, map[string]any{kernelVarUnderTest: uint32(1), kernelVarSweepInterval: uint64(time.Hour)}, testIdleTimeout, capped(1))
	b.setAllReplySeen(t, true)
	b.open(dial(testClient))
	b.now += testHalfOpenTimeout
	b.exchange(dial(testClient), client, ack, 0) // lets the programs notice that it has expired
	b.now += uint64(time.Minute) - 1
	b.open(dial("10.0.0.1:40001"))
	b.expectInFlight(0)
	b.now++
	b.open(dial("10.0.0.1:40002"))
	b.expectInFlight(1)
}

// TestFastOpen sends SYNs whose data a server may accept at once. Where SYNs reserve no slots they
// are dropped: clients fall back to plain SYNs.
func TestFastOpen(t *testing.T) {
	t.Parallel()
	b := newTCP(t, shaper.AttachPolice, capped(100))
	b.setAllReplySeen(t, true)
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
		for _, deferred := range []bool{false, true} {
			n++
			until, want, held := uint64(0), uint32(passed), 1
			if deferred {
				until, want, held = math.MaxUint64, c.want, 0
			}
			b.setAllDeferUntil(t, until)
			before := b.inFlight()
			p := dial(fmt.Sprint("10.0.0.1:", n)).nextSegment(client, syn, 0)[:14+20+20]
			p = append(append(p, c.options...), make([]byte, c.payload)...)
			p[14+20+12] = byte(5+len(c.options)/4) << 4
			binary.BigEndian.PutUint16(p[14+2:], uint16(len(p)-14))
			if got := b.sendAction(p); got != want {
				t.Errorf("%s, deferred %v: action %d, want %d", c.name, deferred, int32(got), int32(want))
			}
			b.expectInFlight(before + held)
		}
	}
}
