package bpf

import "testing"

// TestAdoptedConnections has connections that were there before the programs were.
func TestAdoptedConnections(t *testing.T) {
	const a = "10.0.0.1:40000"
	b := newTCP(t, Police, capped(1))
	for _, c := range []struct {
		name string
		run  func(b *tcpBench, d *dialogue)
		want int // in flight afterwards
	}{
		{"the initiator's segments tell nothing", func(b *tcpBench, d *dialogue) {
			b.exchange(d, client, ack, 10)
		}, 0},
		{"the responder's do", func(b *tcpBench, d *dialogue) {
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, ack, 10)
			b.now += testIdle - 1
			b.exchange(d, client, ack, 10)
			if n := b.counters().Adopted; n != 1 {
				b.t.Errorf("%d adopted", n)
			}
		}, 1},
		{"an ACK that nobody answers", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 0)
			b.expectInFlight(1)
			b.now += testUnsettled
			d.next[server] += 77
			b.exchange(d, client, ack, 10)
		}, 0},
		{"it closes", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 10)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, fin|ack, 0)
			b.expectInFlight(1)
			b.exchange(d, client, ack, 0)
		}, 0},
		{"the client has closed", func(b *tcpBench, d *dialogue) {
			d.say(client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, client, ack, 0)
			b.expectInFlight(1)
			b.now += testUnsettled
			b.exchange(d, client, ack, 0)
		}, 0},
		{"the server has closed", func(b *tcpBench, d *dialogue) {
			d.say(server, fin|ack, 0)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 0)
			b.now += testIdle - 1
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			b.expectInFlight(1)
			b.now += testUnsettled
			b.exchange(d, client, ack, 0)
		}, 0},
		{"the server has closed, and then no segment for as long as a handshake takes", func(b *tcpBench, d *dialogue) {
			d.say(server, fin|ack, 0)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 0)
			b.now += testHalfOpen
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			b.expectInFlight(1)
			b.now += testUnsettled
			b.exchange(d, client, ack, 0)
		}, 0},
		{"the server sends data again, and has closed behind it", func(b *tcpBench, d *dialogue) {
			data := d.say(server, ack, 100)
			d.say(server, fin|ack, 0) // the client has got both
			b.reply(data)             // its ACK was lost
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			b.expectInFlight(1)
			b.now += testUnsettled
			b.exchange(d, client, ack, 0)
		}, 0},
		{"both have closed, and the server acknowledges in two steps", func(b *tcpBench, d *dialogue) {
			d.say(server, fin|ack, 0)
			last := d.say(client, fin|ack, 0)
			b.reply(d.segment(server, ack, d.next[server], d.next[client]-1, 0))
			b.send(last)
			b.exchange(d, server, ack, 0)
			b.expectInFlight(1)
			b.now += testUnsettled
			b.exchange(d, client, ack, 0)
		}, 0},
		{"both have closed, and the ports are used again", func(b *tcpBench, d *dialogue) {
			d.say(server, fin|ack, 0)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			again := dial(a)
			again.next[client] -= 1 << 20
			again.next[server] += 1 << 20
			b.open(again)
			b.exchange(again, server, syn|ack, 0)
			b.exchange(again, client, ack, 0)
			b.exchange(again, client, ack, 10)
			b.exchange(again, server, ack, 0)
			b.now += testIdle - 1
			b.exchange(again, client, ack, 0)
		}, 1},
		{"an old FIN takes a slot, and the server closes alone", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 0)
			b.now += testHalfOpen
			b.send(d.segment(client, fin|ack, d.next[client]-1, d.next[server], 0))
			b.exchange(d, server, ack, 0)
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, client, ack, 0)
		}, 1},
		{"taken in by a keepalive, and it goes on without data", func(b *tcpBench, d *dialogue) {
			b.reply(d.segment(server, ack, d.next[server]-1, d.next[client], 0))
			b.exchange(d, client, ack, 0)
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, ack, 0)
			b.now += testHalfOpen
			b.exchange(d, client, 0, 0)
		}, 1},
		{"the server closes, and the client goes on", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, fin|ack, 0)
			b.now += testIdle - 1
			b.exchange(d, client, ack, 10)
		}, 1},
		{"the client closes, and the server goes on", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 10)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			b.now += testIdle - 1
			b.exchange(d, server, ack, 10)
		}, 1},
		{"it is reset by the client", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 10)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, rst, 0)
		}, 0},
		{"it is reset by one whose way nobody knows", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 10)
			b.exchange(d, client, ack, 0)
			b.exchange(d, client, rst, 0)
		}, 1},
		{"it is reset by one who takes two ways", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 10)
			data := d.say(client, ack, 10)
			b.send(data)
			data[5] ^= 1
			b.send(data)
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, rst, 0)
		}, 1},
		{"it is reset", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 10)
			b.exchange(d, server, rst, 0)
		}, 0},
		{"a FIN, an RST or a SYN take nothing in", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, server, rst|ack, 0)
			b.exchange(d, server, syn|ack, 0)
			b.exchange(d, server, syn, 0)
			b.exchange(d, server, rst, 0)
		}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.t = t
			b.forget()
			b.live(c.run, dial(a), c.want)
		})
	}
}
