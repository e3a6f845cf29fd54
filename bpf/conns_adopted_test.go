package bpf

import "testing"

// TestConnections_Adopted tracks connections that began before the programs were attached.
func TestConnections_Adopted(t *testing.T) {
	testConnections(t, []connectionCase{
		{"not adopted by the initiator's segments", func(b *tcpBench, d *dialogue) {
			b.exchange(d, client, ack, 10)
		}, 0},
		{"adopted by the responder's segments", func(b *tcpBench, d *dialogue) {
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, ack, 10)
			b.now += testIdleTimeout - 1
			b.exchange(d, client, ack, 10)
			if n := b.counters().ConnsAdopted; n != 1 {
				b.t.Errorf("%d adopted", n)
			}
		}, 1},
		{"an unanswered ACK", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 0)
			b.expectInFlight(1)
			b.now += testClosingTimeout
			d.next[server] += 77
			b.exchange(d, client, ack, 10)
		}, 0},
		{"closed", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 10)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, fin|ack, 0)
			b.expectInFlight(1)
			b.exchange(d, client, ack, 0)
		}, 0},
		{"the client has closed", func(b *tcpBench, d *dialogue) {
			d.nextSegment(client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, client, ack, 0)
			b.expectInFlight(1)
			b.now += testClosingTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"the server has closed", func(b *tcpBench, d *dialogue) {
			d.nextSegment(server, fin|ack, 0)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 0)
			b.now += testIdleTimeout - 1
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			b.expectInFlight(1)
			b.now += testClosingTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"the server has closed, and then no segment for as long as a handshake takes", func(b *tcpBench, d *dialogue) {
			d.nextSegment(server, fin|ack, 0)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 0)
			b.now += testHalfOpenTimeout
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			b.expectInFlight(1)
			b.now += testClosingTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"the server sends data again, and has closed behind it", func(b *tcpBench, d *dialogue) {
			data := d.nextSegment(server, ack, 100)
			d.nextSegment(server, fin|ack, 0) // the client has got both
			b.reply(data)                     // its ACK was lost
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			b.expectInFlight(1)
			b.now += testClosingTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"both have closed, and the server acknowledges in two steps", func(b *tcpBench, d *dialogue) {
			d.nextSegment(server, fin|ack, 0)
			last := d.nextSegment(client, fin|ack, 0)
			b.reply(d.segment(server, ack, d.next[server], d.next[client]-1, 0))
			b.send(last)
			b.exchange(d, server, ack, 0)
			b.expectInFlight(1)
			b.now += testClosingTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"both have closed, and the ports are reused", func(b *tcpBench, d *dialogue) {
			d.nextSegment(server, fin|ack, 0)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			again := dial(testClient)
			again.next[client] -= 1 << 20
			again.next[server] += 1 << 20
			b.open(again)
			b.exchange(again, server, syn|ack, 0)
			b.exchange(again, client, ack, 0)
			b.exchange(again, client, ack, 10)
			b.exchange(again, server, ack, 0)
			b.now += testIdleTimeout - 1
			b.exchange(again, client, ack, 0)
		}, 1},
		{"an old FIN takes a slot, and the server closes alone", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 0)
			b.now += testHalfOpenTimeout
			b.send(d.segment(client, fin|ack, d.next[client]-1, d.next[server], 0))
			b.exchange(d, server, ack, 0)
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, client, ack, 0)
		}, 1},
		{"adopted by a keepalive, and continues without data", func(b *tcpBench, d *dialogue) {
			b.reply(d.segment(server, ack, d.next[server]-1, d.next[client], 0))
			b.exchange(d, client, ack, 0)
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, ack, 0)
			b.now += testHalfOpenTimeout
			b.exchange(d, client, 0, 0)
		}, 1},
		{"the server closes, and the client continues", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, fin|ack, 0)
			b.now += testIdleTimeout - 1
			b.exchange(d, client, ack, 10)
		}, 1},
		{"the client closes, and the server continues", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 10)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, ack, 0)
			b.now += testIdleTimeout - 1
			b.exchange(d, server, ack, 10)
		}, 1},
		{"reset by the client", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 10)
			b.exchange(d, client, ack, 10)
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, rst, 0)
		}, 0},
		{"reset by a client whose path is unknown", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 10)
			b.exchange(d, client, ack, 0)
			b.exchange(d, client, rst, 0)
		}, 1},
		{"reset by a client with two paths", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 10)
			data := d.nextSegment(client, ack, 10)
			b.send(data)
			data[5] ^= 1
			b.send(data)
			b.exchange(d, server, ack, 0)
			b.exchange(d, client, rst, 0)
		}, 1},
		{"reset by the server", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, ack, 10)
			b.exchange(d, server, rst, 0)
		}, 0},
		{"not adopted by a FIN, RST or SYN", func(b *tcpBench, d *dialogue) {
			b.exchange(d, server, fin|ack, 0)
			b.exchange(d, server, rst|ack, 0)
			b.exchange(d, server, syn|ack, 0)
			b.exchange(d, server, syn, 0)
			b.exchange(d, server, rst, 0)
		}, 0},
	})
}
