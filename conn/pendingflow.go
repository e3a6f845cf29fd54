// Owner: the loop's thread.

package conn

import (
	"bytes"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// pendingFlow is a UDP flow that waits for admission, with its first datagrams. It takes turns as a
// TCP connection does, except that unverified sources, which may be forged, count as one source, as in
// queues.
type pendingFlow struct {
	waiter
	registryEntry
	udp           *udpFlow
	downstream    *downstream // set when the pool's gate was passed
	buffered      [][]byte    // datagrams, oldest first
	bufferedBytes int         // total
	firstSize     int         // of the first datagram
}

const (
	// maxPendingDatagrams and maxPendingBytes bound what is buffered of one flow.
	maxPendingDatagrams = 4
	maxPendingBytes     = 16 << 10

	// maxAllPendingBytes bounds what is buffered of all flows; unverified ones may use half of it.
	maxAllPendingBytes = 32 << 20
)

// waitForAdmission makes f wait. m is its first message.
func (f *udpFlow) waitForAdmission(m sock.Message, now leaky.Time) {
	p := f.proxy
	w := &pendingFlow{udp: f, firstSize: m.Size}
	w.owner, w.listen, w.flow, w.started, w.since = w, f.listener.name, f.flow, now, now
	w.unverified = !f.source.flows.hasAnswered()
	p.pendingByKey[f.key] = w
	p.pendingFlows.add(w, f.flow.Connection)
	lost := w.buffer(m)
	p.admission.acquire(&w.waiter, now)
	w.addDropped(lost)
}

// buffer stores datagrams of m as space allows, and returns the number of the others.
func (w *pendingFlow) buffer(m sock.Message) (lost int) {
	p, maxBytes := w.udp.proxy, w.udp.proxy.maxPending
	if w.unverified {
		maxBytes /= 2
	}
	for data := m.Data; ; {
		one := data[:min(m.Size, len(data))]
		data = data[len(one):]
		if len(w.buffered) < maxPendingDatagrams && w.bufferedBytes+len(one) <= maxPendingBytes && p.pendingBytes+len(one) <= maxBytes {
			w.buffered = append(w.buffered, bytes.Clone(one))
			w.bufferedBytes += len(one)
			p.pendingBytes += len(one)
		} else {
			lost++
		}
		if len(data) == 0 {
			return lost
		}
	}
}

// addDropped counts n datagrams as dropped during or after the wait of w.
func (w *pendingFlow) addDropped(n int) { w.udp.listener.counts.SendErrors.Add(uint64(max(n, 0))) }

func (w *pendingFlow) pool() *gate { return w.udp.listener.pool(w.udp.target(), nil) }

func (w *pendingFlow) assignDownstream(now leaky.Time) {
	if w.downstream, _ = w.udp.listener.pick(w.udp.target(), nil, now); w.downstream != nil {
		w.downstream.inFlight++
	}
	w.udp.listener.letIn(nil, now)
}

// admitted opens the flow, if the flow table still has room, and sends what was buffered.
func (w *pendingFlow) admitted(now leaky.Time) {
	w.remove()
	f, p := w.udp, w.udp.proxy
	f.slots = w.slots
	f.account.waited, f.account.longestAt, f.account.longestWait = w.waited, w.longestAt, w.longestWait
	f.source = f.listener.sourceOf(f.flow.Source)
	p.evictions = p.evictions[:0]
	if !f.listener.hasRoom(f, func(lru *flowLRU) bool { return p.evictions.include(lru, f.source, now) }, now) {
		w.undo(now)
		return
	}
	p.evict(f.listener.counts, now)
	if err := f.dial(w.downstream, now); err != nil {
		w.undo(now)
		f.dialFailed(err)
		return
	}
	f.open(now)
	for _, data := range w.buffered {
		if f.closed {
			return
		}
		f.receive(sock.Message{Data: data, Size: len(data)}, now)
	}
	p.loop.train.flush()
}

// undo releases what w was granted and cannot use.
func (w *pendingFlow) undo(now leaky.Time) {
	if w.downstream != nil {
		w.downstream.release()
	}
	w.udp.slots.release(now)
}

func (w *pendingFlow) refused(why refusal, _ leaky.Time) {
	w.remove()
	w.addDropped(len(w.buffered) - 1) // the gate has counted the first
	switch f := w.udp; {
	case why.poolFull:
		f.dialFailed(errDownstreamsFull)
	case why.limit.RefuseWith == shaper.RefuseReject && !f.broadcast:
		f.proxy.reject(&f.key, f.flow.Port, w.firstSize)
	}
}

// rebind ends w if its port belongs to another listener now.
func (w *pendingFlow) rebind(now leaky.Time) {
	if w.udp.key.port.binding.listener != w.udp.listener {
		w.close(now)
	}
}

// close ends the wait of w.
func (w *pendingFlow) close(now leaky.Time) {
	w.addDropped(len(w.buffered))
	w.slots.admission.withdraw(&w.waiter, now)
	w.remove()
}

// remove removes w from the pending flows.
func (w *pendingFlow) remove() {
	p := w.udp.proxy
	delete(p.pendingByKey, w.udp.key)
	p.pendingFlows.remove(w)
	p.pendingBytes -= w.bufferedBytes
}
