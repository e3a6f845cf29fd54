// Owner: the loop's thread.

package conn

import (
	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// datagram is a datagram that waits for its departure, or is about to be sent.
type datagram struct {
	unit
	flow *udpFlow
	down bool   // from-downstream
	data []byte // borrowed from the caller, unless holder is set

	link       fairq.Link[datagram] // in its flow
	holder     *holder              // the source that its memory is accounted to
	holderLink fairq.Link[datagram] // in holder
}

// udpCredit is the lateness, in datagrams, that is given back after a late wake-up.
const udpCredit = 1

// forward sends, queues or drops the datagrams of m. The data are valid only during the
// call.
func (f *udpFlow) forward(m sock.Message, down bool, now leaky.Time) {
	d := &f.up
	if down {
		d = &f.down
	}
	if now.Sub(f.reportedAt) > reportInterval {
		f.reportUsage(now)
	}
	if d.observed == 0 && len(d.path) == 0 {
		f.proxy.loop.train.append(f, down, m.Data, m.Size)
		return
	}
	for data := m.Data; ; {
		one := data[:min(m.Size, len(data))]
		data = data[len(one):]
		f.submit(d, one, down, now)
		if len(data) == 0 {
			return
		}
	}
}

// submit puts a datagram through the limits of its direction.
func (f *udpFlow) submit(d *udpDirection, data []byte, down bool, now leaky.Time) {
	p := f.proxy
	n := f.chargedBytes(data, down)
	if d.observed != 0 && f.policy == p.shaper.Policy() {
		p.observe(&f.flow, f.route, d.observed, n, 1, now)
	}
	if len(d.path) == 0 {
		p.loop.train.append(f, down, data, len(data))
		return
	}
	dg := p.loop.memory.newDatagram()
	dg.flow, dg.down, dg.data = f, down, data
	dg.unit = unit{owner: dg, path: d.path, bytes: n, packets: 1, credit: udpCredit, grain: n, droppable: true}
	f.queued.Push(&dg.link, dg)
	p.loop.scheduler.submit(&dg.unit, now)
	if dg.unit.queued {
		p.loop.store(dg, now)
	}
}

// chargedBytes returns the bytes that a datagram is charged for. An empty one counts as one
// byte, or a limit in bytes would let any number of them wait.
func chargedBytes(data []byte) uint64 { return max(uint64(len(data)), 1) }

// chargedBytes returns the bytes that a datagram of f is charged for, including the PROXY
// header that the downstream gets.
func (f *udpFlow) chargedBytes(data []byte, down bool) uint64 {
	n := chargedBytes(data)
	if !down {
		n += uint64(len(f.prefix))
	}
	return n
}

func (dg *datagram) chargedBytes() uint64 { return dg.flow.chargedBytes(dg.data, dg.down) }

func (dg *datagram) send(now leaky.Time) (bytes, packets uint64, requeue bool) {
	n := dg.chargedBytes()
	t := &dg.flow.proxy.loop.single
	t.add(dg.flow, dg.down, dg.data, len(dg.data))
	sent := t.flush()
	dg.flow.touch(now)
	dg.free()
	if !sent {
		return 0, 0, false
	}
	return n, 1, false
}

func (dg *datagram) refused(by *queue, why shaper.Reason) {
	by.state.Bytes.Add(shaper.Refuse, why, dg.chargedBytes())
	by.state.Packets.Add(shaper.Refuse, why, 1)
	dg.flow.reject(by, dg.down, dg.data)
	dg.free()
}

// reject sends the source of a refused datagram an ICMP error, if the limit asks for it.
func (f *udpFlow) reject(by *queue, down bool, data []byte) {
	if by.sendReject && !down && !f.broadcast {
		f.proxy.reject(&f.key, f.flow.Port, len(data))
	}
}

// drop counts and frees dg, because its flow has ended.
func (dg *datagram) drop() {
	h, n := &dg.path[dg.pos], dg.chargedBytes()
	h.state.Bytes.Add(shaper.Refuse, shaper.FlowClosed, n)
	h.state.Packets.Add(shaper.Refuse, shaper.FlowClosed, 1)
	h.usage.dropped++
	dg.free()
}

// free removes dg from its flow and returns it to the pool.
func (dg *datagram) free() {
	f := dg.flow
	f.queued.Remove(&dg.link)
	f.proxy.loop.memory.free(dg)
	if f.queued.Empty() && f.rank == rankQueued {
		f.refile(f.lastActive)
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
	dg.accepted = true
	arrived := dg.arrived
	dg.flow.proxy.loop.scheduler.submit(&dg.unit, now)
	if dg.queued {
		dg.arrived = arrived
	}
}
