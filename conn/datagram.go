// Owner: the loop's thread.

package conn

import (
	"shaperd.dev/shaperd/conn/internal/fairq"
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

func (dg *datagram) chargedBytes() uint64 { return dg.flow.chargedBytes(dg.data, dg.down) }

// chargedBytes returns the bytes that a datagram is charged for. An empty one counts as one
// byte, or a limit in bytes would let any number of them wait.
func chargedBytes(data []byte) uint64 { return max(uint64(len(data)), 1) }
