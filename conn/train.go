// Owner: the loop's thread.

package conn

import (
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
)

// train is the datagrams of one flow and direction that are sent together.
type train struct {
	flow     *udpFlow // nil when empty
	down     bool     // from-downstream
	segments sock.Segments
}

// add adds datagrams to t, and reports whether they fit: t must be empty, or of the same flow
// and direction.
func (t *train) add(f *udpFlow, down bool, data []byte, size int) bool {
	if t.flow == nil {
		t.flow, t.down = f, down
	} else if t.flow != f || t.down != down || f.noGSO {
		return false
	}
	return t.segments.Add(data, size)
}

// append adds datagrams to t, and flushes it first if they do not fit.
func (t *train) append(f *udpFlow, down bool, data []byte, size int) {
	if !t.add(f, down, data, size) {
		t.flush()
		t.add(f, down, data, size)
	}
}

// flush sends t and empties it. It reports whether the kernel accepted any of it.
func (t *train) flush() bool {
	if t.flow == nil {
		return false
	}
	f, down := t.flow, t.down
	counts := f.listener.counts
	moved, of := &counts.ToDownstream, &f.up
	if down {
		moved, of = &counts.FromDownstream, &f.down
	}
	count := t.segments.Count()
	bytes, lost := t.send()
	t.flow = nil
	t.segments.Clear()
	moved.Add(uint64(bytes))
	of.moved += uint64(bytes)
	if state := f.downstream.state; down {
		state.FromDownstream.Add(uint64(bytes))
	} else {
		state.ToDownstream.Add(uint64(bytes))
		f.turns.asked(f.proxy.loop.now)
	}
	counts.SendErrors.Add(uint64(lost))
	return lost < count
}

func (t *train) send() (bytes, lost int) {
	f := t.flow
	fd, to, prefix := f.fd, (*sock.ReplyAddr)(nil), f.prefix
	if t.down {
		fd, to, prefix = f.key.port.fd, &f.to, nil
	}
	several := t.segments.Count() > 1
	if f.noGSO && several || prefix != nil {
		return t.segments.SendEach(fd, to, prefix)
	}
	switch errno := t.segments.Send(fd, to); {
	case errno == 0:
		return t.segments.Bytes(), 0
	case several && errno != unix.EAGAIN:
		// The datagrams exceed the path MTU, or the network card or an IPsec policy on the
		// path cannot split them.
		f.noGSO = true
		return t.segments.SendEach(fd, to, prefix)
	}
	return 0, t.segments.Count()
}
