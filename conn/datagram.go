package conn

import (
	"shaperd/leaky"
	"shaperd/shaper"
)

// datagram is a queued datagram.
type datagram struct {
	unit
	flow *udpFlow
	down bool
	data []byte // lent, unless it has a holder

	next, prev   *datagram // of the flow
	holder       *holder   // whose memory it takes
	older, newer *datagram // of the holder
}

// udpCredit is how many datagrams a late wake-up gives back.
const udpCredit = 1

// forward sends datagrams on, at once, later, or not at all. Their data are only lent.
func (f *udpFlow) forward(m message, down bool, now leaky.Time) {
	d := &f.up
	if down {
		d = &f.down
	}
	if now.Sub(f.settled) > tellEvery {
		f.settle(now)
	}
	if d.observed == 0 && len(d.path) == 0 {
		f.proxy.loop.batch.load(f, down, m.data, m.size)
		return
	}
	for data := m.data; ; {
		one := data[:min(m.size, len(data))]
		data = data[len(one):]
		f.submit(d, one, down, now)
		if len(data) == 0 {
			return
		}
	}
}

// submit puts a datagram under the limits of its direction.
func (f *udpFlow) submit(d *udpDirection, data []byte, down bool, now leaky.Time) {
	p := f.proxy
	n := f.charged(data, down)
	if d.observed != 0 && f.routed == p.shaper.Policy() {
		p.observe(&f.flow, f.route, d.observed, n, 1, now)
	}
	if len(d.path) == 0 {
		p.loop.batch.load(f, down, data, len(data))
		return
	}
	dg := p.loop.memory.newDatagram()
	dg.flow, dg.down, dg.data = f, down, data
	dg.unit = unit{owner: dg, path: d.path, bytes: n, packets: 1, credit: udpCredit, grain: n, droppable: true}
	if dg.next = f.queued; dg.next != nil {
		dg.next.prev = dg
	}
	f.queued = dg
	p.loop.lines.submit(&dg.unit, now)
	if dg.unit.queued {
		p.loop.hold(dg, now)
	}
}

// charged is what a datagram costs in bytes. An empty one costs one, or a limit in
// bytes would let any number of them wait.
func charged(data []byte) uint64 { return max(uint64(len(data)), 1) }

// charged is what a datagram of f costs in bytes on one of its ways: with its header, where
// the downstream gets one.
func (f *udpFlow) charged(data []byte, down bool) uint64 {
	n := charged(data)
	if !down {
		n += uint64(len(f.prefix))
	}
	return n
}

func (dg *datagram) charged() uint64 { return dg.flow.charged(dg.data, dg.down) }

func (dg *datagram) send(now leaky.Time) (bytes, packets uint64, again bool) {
	n := dg.charged()
	t := &dg.flow.proxy.loop.batch.one
	t.add(dg.flow, dg.down, dg.data, len(dg.data))
	sent := t.leave()
	dg.flow.touch(now)
	dg.free()
	if !sent {
		return 0, 0, false
	}
	return n, 1, false
}

func (dg *datagram) refused(by *line, why shaper.Reason) {
	by.state.Bytes.Add(shaper.Refuse, why, dg.charged())
	by.state.Packets.Add(shaper.Refuse, why, 1)
	dg.flow.reject(by, dg.down, dg.data)
	dg.free()
}

// reject tells the source of a datagram that a line has refused it, if it is to.
func (f *udpFlow) reject(by *line, down bool, data []byte) {
	if by.reject && !down && !f.many {
		f.proxy.reject(&f.key, f.flow.Port, len(data))
	}
}

// lose drops dg, whose flow has ended.
func (dg *datagram) lose() {
	at, n := &dg.path[dg.pos], dg.charged()
	at.state.Bytes.Add(shaper.Refuse, shaper.FlowClosed, n)
	at.state.Packets.Add(shaper.Refuse, shaper.FlowClosed, 1)
	at.did.dropped++
	dg.free()
}

// free takes dg out of its flow. It may be used again for another one.
func (dg *datagram) free() {
	if dg.prev == nil {
		dg.flow.queued = dg.next
	} else {
		dg.prev.next = dg.next
	}
	if dg.next != nil {
		dg.next.prev = dg.prev
	}
	f := dg.flow
	f.proxy.loop.memory.free(dg)
	if f.queued == nil && f.rank == engaged {
		f.file(f.seen)
	}
}

func (dg *datagram) resubmit(now leaky.Time) {
	dg.path = dg.flow.up.path
	if dg.down {
		dg.path = dg.flow.down.path
	}
	if len(dg.path) == 0 {
		dg.send(now)
		return
	}
	dg.admitted = true
	arrived := dg.arrived
	dg.flow.proxy.loop.lines.submit(&dg.unit, now)
	if dg.queued {
		dg.arrived = arrived
	}
}
