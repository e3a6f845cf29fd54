package bpf

import (
	"testing"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// connectionCase is a connection, and how many are in flight afterwards.
type connectionCase struct {
	name string
	run  func(b *tcpBench, d *dialogue)
	want int
}

// testConnections runs connections of testClient one by one, under a cap of one for each source:
// whether another connection is admitted tells whether the first is counted.
func testConnections(t *testing.T, cases []connectionCase) {
	b := newTCP(t, shaper.AttachPolice, capped(1))
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			b.t = t
			b.clearMaps()
			b.runConnection(c.run, dial(testClient), c.want)
		})
	}
}

// runConnection runs a connection and tries to open another one after it.
func (b *tcpBench) runConnection(run func(*tcpBench, *dialogue), d *dialogue, want int) {
	b.t.Helper()
	run(b, d)
	b.expectInFlight(want)
	b.expectConsistent()
	next, action := dial("10.0.0.1:50000"), uint32(passed)
	if want > 0 {
		action = answered
	}
	if got := b.open(next); got != action {
		b.t.Errorf("the next SYN of the source met action %d, want %d", int32(got), int32(action))
	}
	if got := b.open(dial("10.0.0.2:50000")); got != passed {
		b.t.Errorf("a SYN of another source met action %d", int32(got))
	}
}

// expectConsistent fails the test if the slot counts need repair.
func (b *tcpBench) expectConsistent() {
	b.t.Helper()
	for range 2 {
		if n, err := b.reconcile(b.now); n != 0 || err != nil {
			b.t.Errorf("%d counts were repaired, %v", n, err)
		}
	}
}

// forgetReplies makes the programs forget that they have seen a reply.
func (b *tcpBench) forgetReplies() {
	b.t.Helper()
	b.setAllReplySeen(b.t, false)
}

// TestConnections takes connections through their life cycle.
func TestConnections(t *testing.T) {
	t.Parallel()
	testConnections(t, []connectionCase{
		{"a SYN is counted", func(b *tcpBench, d *dialogue) { b.open(d) }, 1},
		{"established", func(b *tcpBench, d *dialogue) { b.establish(d) }, 1},
		{"a retransmitted SYN passes and is counted once", func(b *tcpBench, d *dialogue) {
			first := d.nextSegment(client, syn, 0)
			for range 3 {
				if action, _, _ := b.send(first); action != passed {
					b.t.Errorf("action %d", int32(action))
				}
				b.now += uint64(time.Second) - 1
			}
			if n := b.counters().ConnsAdmitted[0]; n != 1 {
				b.t.Errorf("%d connections admitted", n)
			}
		}, 1},
		{"an unanswered SYN expires", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.now += testClosingTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"a blind ACK establishes nothing", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			d.next[server] += 77
			b.exchange(d, client, ack, 0)
			b.now += testClosingTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"closed by the client", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			b.exchange(d, server, fin|ack, 0)
			b.expectInFlight(1)
			b.exchange(d, client, ack, 0)
		}, 0},
		{"closed by the server, with data", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, server, fin|ack, 500)
			b.exchange(d, client, fin|ack, 7)
			b.exchange(d, server, ack, 0)
		}, 0},
		{"closed by both at once", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			acked := d.next
			b.exchange(d, server, fin|ack, 0)
			packet := d.segment(client, fin|ack, d.next[client], acked[server], 0)
			d.next[client]++
			b.send(packet)
			b.exchange(d, server, ack, 0)
			b.expectInFlight(1)
			b.exchange(d, client, ack, 0)
		}, 0},
		{"half closed stays counted", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			b.now += testIdleTimeout - 1
			b.exchange(d, server, ack, 1000)
			b.now += testIdleTimeout - 1
			b.exchange(d, server, ack, 1000)
		}, 1},
		{"half closed expires by silence", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, fin|ack, 0)
			b.now += testIdleTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"the last ACK lost", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, fin|ack, 0)
			d.nextSegment(client, ack, 0)
			b.now += testClosingTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"a FIN lost", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			d.nextSegment(client, fin|ack, 0)
			d.nextSegment(server, fin|ack, 0)
			b.now += testIdleTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"segments after the end open nothing", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, client, ack, 0)
			b.exchange(d, server, ack, 0)
			b.exchange(d, server, ack, 10)
			b.exchange(d, client, ack, 10)
			b.now += testClosingTimeout - 1
			b.exchange(d, server, ack, 0)
		}, 0},
		{"a FIN that comes before data", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			at := d.next[client]
			b.exchange(d, client, ack, 1)
			b.exchange(d, server, ack, 0)
			b.send(d.segment(client, fin|ack, at, d.next[server], 0))
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, client, ack, 0)
		}, 1},
		{"a FIN that was lost, and data in its place", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.send(d.segment(client, fin|ack, d.next[client], d.next[server], 0))
			b.exchange(d, client, ack, 1)
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, client, ack, 0)
		}, 1},
		{"a FIN lost before the programs, and an ACK after it", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			lost := d.nextSegment(client, fin|ack, 0)
			b.exchange(d, server, ack, 10)
			b.exchange(d, client, ack, 0)
			b.send(lost)
			b.exchange(d, server, fin|ack, 0)
			b.expectInFlight(1)
			b.exchange(d, client, ack, 0)
		}, 0},
		{"the server's FIN lost before the programs, and an ACK after it", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			lost := d.nextSegment(server, fin|ack, 0)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 0)
			b.reply(lost)
			b.exchange(d, client, fin|ack, 0)
			b.expectInFlight(1)
			b.exchange(d, server, ack, 0)
		}, 0},
		{"a FIN that was lost, and data in its place in fragments", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.send(d.segment(client, fin|ack, d.next[client]+50, d.next[server], 0))
			first := d.segment(client, ack, d.next[client], d.next[server], 4)
			first[14+6] = 0x20 // there are more
			d.next[client] += 51
			b.send(first)
			b.exchange(d, server, ack, 0)
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, client, ack, 0)
		}, 1},
		{"data, and an invalid FIN in its place", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, ack, 0)
			b.exchange(d, client, ack, 1)
			b.send(d.segment(client, fin|ack, d.next[client]-1, d.next[server], 0))
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, client, ack, 0)
		}, 1},
		{"half open for almost the timeout", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			b.now += testHalfOpenTimeout - 1
			b.exchange(d, client, ack, 0)
			b.now += testIdleTimeout - 1
			b.exchange(d, client, ack, 1)
		}, 1},
		{"the server's SYN+ACKs do not keep it open", func(b *tcpBench, d *dialogue) {
			b.open(d)
			answer := d.nextSegment(server, syn|ack, 0)
			for range 3 {
				b.reply(answer)
				b.now += testHalfOpenTimeout / 3
			}
			b.reply(answer)
		}, 0},
		{"established late", func(b *tcpBench, d *dialogue) {
			b.open(d)
			answer := d.nextSegment(server, syn|ack, 0)
			b.now += testHalfOpenTimeout
			b.reply(answer)
			b.expectInFlight(0)
			b.now += 2 * testHalfOpenTimeout
			b.exchange(d, client, ack, 0)
			b.now += testIdleTimeout - 1
			b.exchange(d, server, ack, 1)
		}, 1},
		{"established late, with another in its slot", func(b *tcpBench, d *dialogue) {
			b.open(d)
			answer := d.nextSegment(server, syn|ack, 0)
			b.now += testHalfOpenTimeout
			b.reply(answer)
			other := dial("10.0.0.1:40001")
			b.establish(other)
			if got := b.exchange(d, client, ack, 0); got != dropped {
				b.t.Errorf("action %d", int32(got))
			}
			b.exchange(other, client, rst, 0)
			if got := b.exchange(d, client, ack, 10); got != passed {
				b.t.Errorf("action %d", int32(got))
			}
		}, 1},
		{"established late by its FIN", func(b *tcpBench, d *dialogue) {
			b.open(d)
			answer := d.nextSegment(server, syn|ack, 0)
			b.now += testHalfOpenTimeout
			b.reply(answer)
			b.exchange(d, client, fin|ack, 0)
			b.expectInFlight(1)
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, client, ack, 0)
		}, 0},
		{"replies by another path", func(b *tcpBench, d *dialogue) {
			b.forgetReplies()
			b.open(d)
			d.nextSegment(server, syn|ack, 0)
			b.exchange(d, client, ack, 0)
			b.now += testIdleTimeout - 1
			d.nextSegment(server, ack, 10)
			b.exchange(d, client, ack, 10)
		}, 1},
		{"replies by another path, and it closes", func(b *tcpBench, d *dialogue) {
			b.forgetReplies()
			b.open(d)
			d.nextSegment(server, syn|ack, 0)
			b.exchange(d, client, ack, 0)
			b.exchange(d, client, fin|ack, 0)
			b.expectInFlight(1)
			b.now += testClosingTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"no reply where others are seen", func(b *tcpBench, d *dialogue) {
			b.forgetReplies()
			other := dial("10.0.0.2:40000")
			b.establish(other)
			b.exchange(other, client, rst, 0)
			b.open(d)
			b.exchange(d, client, ack, 0)
			b.now += testHalfOpenTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"silence", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.now += testIdleTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"almost silence", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			for range 5 {
				b.now += testIdleTimeout - 1
				b.exchange(d, client, ack, 1)
				b.now += testIdleTimeout - 1
				b.exchange(d, server, ack, 1)
			}
		}, 1},
		{"back after silence", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.now += testIdleTimeout
			b.exchange(d, client, ack, 1)
			b.expectInFlight(0)
			b.exchange(d, server, ack, 1)
		}, 1},
		{"simultaneous open is one connection", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn, 0)
			b.send(d.segment(client, syn|ack, d.next[client]-1, d.next[server], 0))
			b.reply(d.segment(server, syn|ack, d.next[server]-1, d.next[client], 0))
			b.exchange(d, client, ack, 1)
			b.now += testIdleTimeout - 1
			b.exchange(d, client, ack, 1)
			if live, gone := b.entries(); live != 1 || gone != 0 {
				b.t.Errorf("%d connections, %d closed", live, gone)
			}
		}, 1},
		{"simultaneous open, the other SYN first", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, syn, 0)
			b.expectInFlight(0)
			b.open(d)
			b.reply(d.segment(server, syn|ack, d.next[server]-1, d.next[client], 0))
			b.exchange(d, client, ack, 1)
		}, 1},
		{"ports reused after the end", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, rst, 0)
			again := dial(testClient)
			again.next[client] += 1 << 20
			b.establish(again)
			if live, gone := b.entries(); live != 1 || gone != 0 {
				b.t.Errorf("%d connections, %d closed", live, gone)
			}
		}, 1},
		{"ports reused while it closes", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, fin|ack, 0)
			again := dial(testClient)
			again.next[client] += 1 << 20
			b.establish(again)
		}, 1},
		{"ports reused after the server's FIN, and the new connection is half closed", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, client, ack, 0)
			again := dial(testClient)
			again.next[client] += 1 << 20
			again.next[server] += 1 << 20
			b.open(again)
			b.exchange(again, server, syn|ack, 0)
			b.exchange(again, client, ack, 0)
			b.exchange(again, client, fin|ack, 0)
			b.exchange(again, server, ack, 0)
			b.now += testClosingTimeout
			b.exchange(again, client, ack, 0)
		}, 1},
		{"ports reused after silence", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.now += testIdleTimeout
			b.establish(dial(testClient))
		}, 1},
		{"from the other direction, by the client's SYN+ACK", func(b *tcpBench, d *dialogue) {
			b.exchange(d, client, syn|ack, 0)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 10)
		}, 1},
		{"from the other direction, by its ports", func(b *tcpBench, d *dialogue) {
			d.ends[0], d.ends[1] = d.ends[1], d.ends[0]
			b.exchange(d, server, ack, 10)
		}, 0},
		{"from the other direction, and a SYN that is refused", func(b *tcpBench, d *dialogue) {
			b.establish(dial("10.0.0.1:40001"))
			b.exchange(d, server, syn, 0)
			b.send(d.segment(client, syn, 77, 0, 0))
			b.exchange(d, server, ack, 10)
		}, 1},
		{"from the other direction, by its SYN", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, syn, 0)
			b.exchange(d, client, syn|ack, 0)
			b.exchange(d, server, ack, 0)
			b.exchange(d, server, ack, 10)
		}, 0},
		{"a SYN+ACK does not make the SYN after it pass", func(b *tcpBench, d *dialogue) {
			b.exchange(d, client, syn|ack, 0)
			b.open(d)
		}, 1},
	})
}
