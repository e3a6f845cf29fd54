package conn

// Datagrams that wait, and their buffers, are kept for the next ones. The lists
// belong to the loop's thread. They keep at most spareBytes of each size; what
// is beyond is left to the garbage collector.

var bufferSizes = [...]int{256, 2048, 9216, 65536}

const (
	spareBytes     = 8 << 20
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

// bufferSize returns what a datagram of n bytes takes while it waits.
func bufferSize(n int) int { return bufferSizes[bufferClass(n)] }

func (l *loop) newDatagram() *datagram {
	n := len(l.datagrams)
	if n == 0 {
		return new(datagram)
	}
	dg := l.datagrams[n-1]
	l.datagrams = l.datagrams[:n-1]
	return dg
}

// hold gives dg a buffer of its own for the data it was lent.
func (l *loop) hold(dg *datagram) {
	class := bufferClass(len(dg.data))
	l.queuedBytes += bufferSizes[class]
	var b []byte
	if n := len(l.buffers[class]); n > 0 {
		b = l.buffers[class][n-1]
		l.buffers[class] = l.buffers[class][:n-1]
	} else {
		b = make([]byte, bufferSizes[class])
	}
	dg.data = b[:copy(b, dg.data)]
	dg.held = true
}

func (l *loop) freeDatagram(dg *datagram) {
	if dg.held {
		class := bufferClass(cap(dg.data))
		l.queuedBytes -= bufferSizes[class]
		if len(l.buffers[class]) < spareBytes/bufferSizes[class] {
			l.buffers[class] = append(l.buffers[class], dg.data[:cap(dg.data)])
		}
	}
	*dg = datagram{}
	if len(l.datagrams) < spareDatagrams {
		l.datagrams = append(l.datagrams, dg)
	}
}
