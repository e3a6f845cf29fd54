package conn

import (
	"bytes"
	"net/netip"

	"shaperd/leaky"
	"shaperd/shaper"
)

// arrival is a UDP flow that waits for its slots, or for a downstream, with the first of its
// datagrams. It takes turns as a connection does, but may be forged: those of sources that
// nobody has answered yet are one source together, as in lines.
type arrival struct {
	entrant
	enrolled
	f     *udpFlow
	to    *downstream // once it has come past the gates
	early [][]byte    // oldest first
	kept  int         // bytes of these
	size  int         // of the first one
}

const (
	// earlyDatagrams and earlyBytes bound what is kept of one arrival.
	earlyDatagrams = 4
	earlyBytes     = 16 << 10

	// maxEarly bounds what is kept of all, strangers' half of it.
	maxEarly = 32 << 20
)

// strangers is the source of flows that nobody has answered.
var strangers = netip.IPv6Unspecified()

// arrive has f wait, which m began.
func (f *udpFlow) arrive(m message, now leaky.Time) {
	p := f.proxy
	w := &arrival{f: f, size: m.size}
	w.owner, w.listen, w.flow, w.begun = w, f.site.name, f.flow, now
	w.stranger = !f.source.flows.answered()
	p.arriving[f.key] = w
	p.arrivals.add(w, f.flow.Connection)
	lost := w.keep(m)
	p.gates.enter(&w.entrant, now)
	w.lose(lost)
}

// answered reports whether a flow of r was.
func (r *roster) answered() bool {
	for rank := answered; rank < numRanks; rank++ {
		for at := r[rank].first; at != nil; at = at.next {
			if !at.flow.mute {
				return true
			}
		}
	}
	return false
}

// keep stores the datagrams of m that there is room for, and returns how many others it has.
func (w *arrival) keep(m message) (lost int) {
	p, most := w.f.proxy, maxEarly
	if w.stranger {
		most /= 2
	}
	for data := m.data; ; {
		one := data[:min(m.size, len(data))]
		data = data[len(one):]
		if len(w.early) < earlyDatagrams && w.kept+len(one) <= earlyBytes && p.early+len(one) <= most {
			w.early = append(w.early, bytes.Clone(one))
			w.kept += len(one)
			p.early += len(one)
		} else {
			lost++
		}
		if len(data) == 0 {
			return lost
		}
	}
}

// lose counts n datagrams that are dropped while w waits, or as it did in vain.
func (w *arrival) lose(n int) { w.f.site.counts.SendErrors.Add(uint64(max(n, 0))) }

// end takes w out of the arrivals.
func (w *arrival) end() {
	p := w.f.proxy
	delete(p.arriving, w.f.key)
	p.arrivals.remove(w)
	p.early -= w.kept
}

// close ends the wait of w.
func (w *arrival) close(now leaky.Time) {
	w.lose(len(w.early))
	w.slots.gates.withdraw(&w.entrant, now)
	w.end()
}

func (w *arrival) target() target {
	return target{w.f.flow.Source, w.f.flow.Port, w.f.key.port.service.samePort}
}

func (w *arrival) pool() *gate { return w.f.site.pool(w.target(), nil) }

func (w *arrival) place(now leaky.Time) {
	if w.to, _ = w.f.site.pick(w.target(), nil, now); w.to != nil {
		w.to.inFlight++
	}
}

// admitted opens the flow, if it has room in the table still, and sends what it began with.
func (w *arrival) admitted(now leaky.Time) {
	w.end()
	f, p := w.f, w.f.proxy
	f.slots = w.slots
	f.account.waited, f.account.most, f.account.mostTime = w.waited, w.most, w.mostTime
	f.source = f.site.sourceOf(f.flow.Source)
	p.clearing = p.clearing[:0]
	if !f.site.room(f, func(r *roster) bool { return p.clearing.of(r, f.source, now) }, now) {
		w.giveBack(now)
		return
	}
	p.clear(f.site.counts, now)
	if err := f.dial(w.target(), w.to, now); err != nil {
		w.giveBack(now)
		f.dialFailed(err)
		return
	}
	f.open(now)
	for _, data := range w.early {
		if f.closed {
			return
		}
		f.hear(message{data: data, size: len(data)}, now)
	}
	p.loop.batch.train.leave()
}

// giveBack frees what w has got, and has no use for.
func (w *arrival) giveBack(now leaky.Time) {
	if w.to != nil {
		w.to.giveBack()
	}
	w.f.slots.release(now)
}

func (w *arrival) refused(why refusal, _ leaky.Time) {
	w.end()
	w.lose(len(w.early) - 1) // the gate has counted the first
	switch f := w.f; {
	case why.full:
		f.dialFailed(errFull)
	case why.limit.Excess == shaper.ExcessReject && !f.many:
		f.proxy.reject(&f.key, f.flow.Port, w.size)
	}
}

// rebind ends w when its port belongs to another listener now.
func (w *arrival) rebind(now leaky.Time) {
	if w.f.key.port.service.site != w.f.site {
		w.close(now)
	}
}

// inspect fills in c.
func (w *arrival) inspect(c *shaper.ConnectionStatus, now leaky.Time) bool {
	if w.waitsIn == nil {
		return false
	}
	*c = shaper.ConnectionStatus{
		ID: w.f.flow.Connection, Protocol: shaper.UDP, Source: w.f.key.client, Listen: w.f.site.name, Port: w.f.flow.Port,
		Stage: "waiting", Age: now.Sub(w.begun).Duration(), Idle: now.Sub(w.begun).Duration(),
		HeldBy: w.waitsIn.at().gate.state.Name,
	}
	held(c, w.account)
	c.Waited += w.waiting(now).Duration()
	return true
}
