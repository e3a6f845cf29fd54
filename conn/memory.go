// Owner: the loop's thread.

package conn

import (
	"cmp"
	"net/netip"
	"slices"
	"unsafe"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/leaky"
)

// memory is the memory of queued datagrams of one worker. Those that do not wait need none. When it is used up, the
// source that uses the most loses its newest datagram, across all limits and listeners. Unverified
// flows count as one source, as in queues.
//
// Freed buffers are kept for reuse: at most spareBytes of each size, the rest is garbage collected.
type memory struct {
	used, max int // bytes
	holders   map[netip.Addr]*holder
	largest   fairq.Heap[holder, byMemory]

	datagrams []*datagram // for reuse
	buffers   [len(bufferSizes)][][]byte
}

// holder is a source with queued datagrams; the zero address is that of unverified flows.
type holder struct {
	source    netip.Addr
	used      int                  // bytes
	datagrams fairq.List[datagram] // oldest first
	heapIndex int                  // in memory.largest
}

// byMemory puts the source that uses the most memory first.
type byMemory struct{}

func (byMemory) Less(a, b *holder) bool { return a.used > b.used }
func (byMemory) Index(h *holder) *int   { return &h.heapIndex }

// bufferSizes are the buffer sizes. A datagram larger than an Ethernet jumbo frame fills more than
// half of its buffer.
var bufferSizes = [...]int{256, 640, 2048, 9216, 18432, 36864, 65536}

const (
	// maxQueuedBytes bounds the memory of queued datagrams of all workers: buffers and records.
	maxQueuedBytes = 128 << 20

	spareBytes     = 4 << 20
	spareDatagrams = 1 << 16
)

// bufferClass returns the size class for n bytes.
func bufferClass(n int) int {
	class := 0
	for bufferSizes[class] < n {
		class++
	}
	return class
}

// size is the memory that dg uses while it waits.
func (dg *datagram) size() int { return cap(dg.data) + int(unsafe.Sizeof(*dg)) }

func (m *memory) newDatagram() *datagram {
	n := len(m.datagrams)
	if n == 0 {
		return new(datagram)
	}
	dg := m.datagrams[n-1]
	m.datagrams = m.datagrams[:n-1]
	return dg
}

// store gives dg, which is queued, its own buffer for the data that it borrows. dg itself may have
// been dropped when store returns.
func (l *loop) store(dg *datagram, now leaky.Time) {
	m := &l.memory
	class := bufferClass(len(dg.data))
	var b []byte
	if n := len(m.buffers[class]); n > 0 {
		b = m.buffers[class][n-1]
		m.buffers[class] = m.buffers[class][:n-1]
	} else {
		b = make([]byte, bufferSizes[class])
	}
	dg.data = b[:copy(b, dg.data)]
	m.used += dg.size()
	m.charge(dg)
	l.evictExcess(now)
}

// evictExcess makes the sources that use the most lose datagrams, as long as too much memory is in use.
func (l *loop) evictExcess(now leaky.Time) {
	m := &l.memory
	for m.used > m.max {
		newest := m.largest[0].newestQueued()
		if newest == nil {
			return
		}
		l.scheduler.evict(&newest.unit, now)
	}
}

// divideMemory divides the memory for datagrams evenly among the workers, so that none takes that of another.
func (p *Proxy) divideMemory(now leaky.Time) {
	for _, w := range p.workers {
		w.loop.memory.max, w.maxPending = maxQueuedBytes/len(p.workers), maxAllPendingBytes/len(p.workers)
		w.loop.evictExcess(now)
	}
}

// absorb takes over the datagrams of o, in the order of arrival.
func (m *memory) absorb(o *memory) {
	m.used += o.used
	for source, from := range o.holders {
		into := m.holders[source]
		if into == nil {
			m.holders[source] = from
			m.largest.Push(from)
			continue
		}
		all := slices.AppendSeq(slices.Collect(into.datagrams.All()), from.datagrams.All())
		slices.SortStableFunc(all, func(a, b *datagram) int { return cmp.Compare(a.arrived, b.arrived) })
		into.datagrams, into.used = fairq.List[datagram]{}, into.used+from.used
		for _, dg := range all {
			dg.holder, dg.holderLink = into, fairq.Link[datagram]{}
			into.datagrams.Push(&dg.holderLink, dg)
		}
		m.largest.Fix(into)
	}
	*o = memory{}
}

// newestQueued returns the newest datagram of h that is not just moving to other queues, or nil.
func (h *holder) newestQueued() *datagram {
	for dg := range h.datagrams.Backward() {
		if dg.queued {
			return dg
		}
	}
	return nil
}

// charge accounts dg to its source.
func (m *memory) charge(dg *datagram) {
	var source netip.Addr
	if !dg.flow.unanswered {
		source = sourceKey(dg.flow.flow.Source)
	}
	h := m.holders[source]
	if h == nil {
		h = &holder{source: source}
		m.holders[source] = h
		m.largest.Push(h)
	}
	dg.holder = h
	h.datagrams.Push(&dg.holderLink, dg)
	h.used += dg.size()
	m.largest.Fix(h)
}

// uncharge undoes charge.
func (m *memory) uncharge(dg *datagram) {
	h := dg.holder
	h.datagrams.Remove(&dg.holderLink)
	dg.holder = nil
	if h.used -= dg.size(); h.used > 0 {
		m.largest.Fix(h)
		return
	}
	m.largest.Remove(h)
	delete(m.holders, h.source)
}

// transfer moves the queued datagrams of f to the account of the source that it counts as now.
func (m *memory) transfer(f *udpFlow) {
	for dg := range f.queued.Backward() {
		m.uncharge(dg)
	}
	for dg := range f.queued.All() {
		m.charge(dg)
	}
}

// free reclaims dg and its buffer.
func (m *memory) free(dg *datagram) {
	if dg.holder != nil {
		m.used -= dg.size()
		m.uncharge(dg)
		class := bufferClass(cap(dg.data))
		if len(m.buffers[class]) < spareBytes/bufferSizes[class] {
			m.buffers[class] = append(m.buffers[class], dg.data[:cap(dg.data)])
		}
	}
	*dg = datagram{}
	if len(m.datagrams) < spareDatagrams {
		m.datagrams = append(m.datagrams, dg)
	}
}
