package conn

import (
	"container/heap"
	"net/netip"
	"slices"
	"unsafe"

	"shaperd/leaky"
)

// memory is that of datagrams that wait. Those that do not wait take none. When there is
// no more the source that holds most of it loses its newest datagram, over all limits and
// listeners. Flows that nobody has answered yet are one source together, as in lines.
//
// What datagrams leave is kept for the next ones: at most spareBytes of each size; what is
// beyond is left to the garbage collector.
type memory struct {
	used, most int // bytes
	holders    map[netip.Addr]*holder
	ranked     ranking[holder, byMemory]

	datagrams []*datagram // to be used again
	buffers   [len(bufferSizes)][][]byte
}

// holder is a source whose datagrams wait; the zero address stands for strangers.
type holder struct {
	source netip.Addr
	used   int       // bytes
	newest *datagram // of a list
	place  int       // in memory.ranked
}

// byMemory has the source that holds most first.
type byMemory struct{}

func (byMemory) before(a, b *holder) bool { return a.used > b.used }
func (byMemory) place(h *holder) *int     { return &h.place }

// bufferSizes are those of buffers: from Ethernet's jumbo frames on none is twice what it
// holds.
var bufferSizes = [...]int{256, 640, 2048, 9216, 18432, 36864, 65536}

const (
	// maxQueued bounds the memory of datagrams that wait: their buffers and what is noted
	// of them.
	maxQueued = 128 << 20

	spareBytes     = 4 << 20
	spareDatagrams = 1 << 16
)

// bufferClass returns the size class that holds n bytes.
func bufferClass(n int) int {
	class := 0
	for bufferSizes[class] < n {
		class++
	}
	return class
}

// size is what dg takes while it waits.
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

// hold gives dg, which waits, a buffer of its own for the data it was lent. It may be that
// dg itself does not wait any more when it returns.
func (l *loop) hold(dg *datagram, now leaky.Time) {
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
	for m.used > m.most {
		newest := m.ranked[0].newest
		for newest != nil && !newest.queued { // it is on its way to other lines
			newest = newest.older
		}
		if newest == nil {
			return
		}
		l.lines.forgo(&newest.unit, now)
	}
}

// charge puts dg on the account of its source.
func (m *memory) charge(dg *datagram) {
	var source netip.Addr
	if !dg.flow.mute {
		source = turnAddr(dg.flow.flow.Source)
	}
	h := m.holders[source]
	if h == nil {
		h = &holder{source: source}
		m.holders[source] = h
		heap.Push(&m.ranked, h)
	}
	dg.holder, dg.older = h, h.newest
	if h.newest != nil {
		h.newest.newer = dg
	}
	h.newest = dg
	h.used += dg.size()
	heap.Fix(&m.ranked, h.place)
}

// discharge is the opposite of charge.
func (m *memory) discharge(dg *datagram) {
	h := dg.holder
	if dg.newer == nil {
		h.newest = dg.older
	} else {
		dg.newer.older = dg.older
	}
	if dg.older != nil {
		dg.older.newer = dg.newer
	}
	dg.holder, dg.older, dg.newer = nil, nil, nil
	if h.used -= dg.size(); h.used > 0 {
		heap.Fix(&m.ranked, h.place)
		return
	}
	heap.Remove(&m.ranked, h.place)
	delete(m.holders, h.source)
}

// transfer puts what f has queued on the account of the source that it is of now.
func (m *memory) transfer(f *udpFlow) {
	var queued []*datagram
	for dg := f.queued; dg != nil; dg = dg.next {
		m.discharge(dg)
		queued = append(queued, dg)
	}
	for _, dg := range slices.Backward(queued) { // the oldest is the last one
		m.charge(dg)
	}
}

// free takes back dg and its buffer.
func (m *memory) free(dg *datagram) {
	if dg.holder != nil {
		m.used -= dg.size()
		m.discharge(dg)
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
