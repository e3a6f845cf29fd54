package bpf

import (
	"encoding/binary"
	"slices"
	"testing"
)

// TestConnections_Reset sends resets that are accepted, and others that are not.
func TestConnections_Reset(t *testing.T) {
	testConnections(t, []connectionCase{
		{"reset by the client", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, rst, 0)
		}, 0},
		{"reset by the server", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, server, rst|ack, 0)
		}, 0},
		{"reset by the client, with a timestamp", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			p := d.segment(client, rst|ack, d.next[client], d.next[server], 0)
			p = append(p, 1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8)
			p[14+3] += 12
			copy(p[14+10:], []byte{0, 0})
			binary.BigEndian.PutUint16(p[14+10:], ^checksum(p[14:34], 0))
			p[34+12] = 8 << 4
			copy(p[34+16:], []byte{0, 0})
			binary.BigEndian.PutUint16(p[34+16:], ^checksum(p[34:], pseudo(d.ends[client].Addr(), d.ends[server].Addr(), 32)))
			b.send(p)
		}, 0},
		{"reset by the client with data in flight", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			acked := d.next[server]
			d.nextSegment(server, ack, 1000)
			b.exchange(d, client, ack, 3000)
			b.exchange(d, server, ack, 0)
			b.send(d.segment(client, rst|ack, d.next[client], acked, 0))
		}, 0},
		{"reset by the client after unacknowledged data", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, ack, 3000)
			b.exchange(d, client, rst, 0)
			b.expectInFlight(1)
			b.now += testClosingTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"reset by the client before data that it has sent", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			at := d.next
			b.exchange(d, client, ack, 10)
			b.send(d.segment(client, rst, at[client], 0, 0))
			b.exchange(d, server, ack, 0)
		}, 1},
		{"reset by the client after data far out of the window", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			far := d.next[client] + 1<<30
			b.send(d.segment(client, ack, far, d.next[server], 2))
			b.send(d.segment(client, rst, far+2, 0, 0))
		}, 1},
		{"an RST that does not reach the server", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			good := d.segment(client, rst, d.next[client], 0, 0)
			for i, spoil := range []func(p []byte){
				func(p []byte) { p[14+20+16] ^= 1 },                 // TCP's checksum
				func(p []byte) { p[14+10] ^= 1 },                    // IP's
				func(p []byte) { p[14+8] = 1; p[14+10] += 60 },      // TTL
				func(p []byte) { p[5] ^= 1 },                        // another host
				func(p []byte) { p[14+3] += 8; p[14+11] -= 8 },      // longer than the packet
				func(p []byte) { p[14] = 0x46; p[14+20+12] = 0x50 }, // an option
			} {
				packet := slices.Clone(good)
				spoil(packet)
				b.send(packet)
				if n := b.inFlight(); n != 1 {
					b.t.Fatalf("%d: %d in flight", i, n)
				}
			}
		}, 1},
		{"an RST of the server to an invalid ACK of the client", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			b.send(d.segment(client, ack, d.next[client], d.next[server]+500, 0))
			b.reply(d.segment(server, rst, d.next[server]+500, 0, 0))
		}, 1},
		{"an RST+ACK that does not acknowledge the SYN+ACK", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, server, syn|ack, 0)
			b.send(d.segment(client, rst|ack, d.next[client], d.next[server]-1, 0))
		}, 1},
		{"refused by the server", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.reply(d.segment(server, rst|ack, 0, d.next[client], 0))
		}, 0},
		{"aborted by the client before a reply", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.exchange(d, client, rst, 0)
		}, 0},
		{"an out-of-window RST", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.send(d.segment(client, rst, d.next[client]+5000, 0, 0))
			b.reply(d.segment(server, rst, 0, 0, 0))
		}, 1},
		{"an out-of-window RST, and the connection continues", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.send(d.segment(client, rst, d.next[client]+5000, 0, 0))
			b.exchange(d, client, ack, 10)
			b.now += testIdleTimeout - 1
			b.exchange(d, server, ack, 10)
		}, 1},
		{"an RST beyond the data seen, which may have been accepted", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.send(d.segment(client, rst, d.next[client]+1, 0, 0))
			b.now += testClosingTimeout
			b.exchange(d, client, ack, 0)
		}, 0},
		{"an out-of-window RST during the handshake", func(b *tcpBench, d *dialogue) {
			b.open(d)
			b.send(d.segment(client, rst, 0, 0, 0))
			b.reply(d.segment(server, rst|ack, 0, 12345, 0))
		}, 1},
	})
}
