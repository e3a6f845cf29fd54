// Owner: the loop's thread.

package conn

import (
	"errors"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// turns measures how long a downstream takes to answer the questions of one client: from the last byte that it was
// sent to the first byte that comes back. A question that is sent while an answer arrives is not measured. What a
// question or an answer waits for inside the proxy does not count, but that the loop is busy does: a fraction of a
// millisecond in general.
type turns struct {
	took      leaky.Time // duration of the last one, or of the first bytes
	askedAt   leaky.Time // 0 while nothing is to be answered
	arrivedAt leaky.Time // when an event announced the answer, which is yet to be read; 0 before
	question  bool       // the client has sent something, and did not just connect

	connect   leaky.Time // duration
	firstByte leaky.Time // duration; 0 before it
	count     uint64
	answering leaky.Time // sum
}

// connected records that the downstream has accepted a connection. It may speak first.
func (t *turns) connected(state *shaper.DownstreamState, took, now leaky.Time) {
	t.connect = took
	state.Connect.Observe(took.Duration())
	t.askedAt = now
}

// asked records that bytes were sent to the downstream.
func (t *turns) asked(now leaky.Time) { t.askedAt, t.arrivedAt, t.question = now, 0, true }

// arrives records that the downstream may have answered.
func (t *turns) arrives(now leaky.Time) {
	if t.askedAt != 0 && t.arrivedAt == 0 {
		t.arrivedAt = now
	}
}

// answered records that bytes of the downstream were read. It reports whether they are an answer, or the first ones.
func (t *turns) answered(state *shaper.DownstreamState) bool {
	if t.arrivedAt == 0 {
		return false
	}
	t.took = t.arrivedAt.Sub(t.askedAt)
	if t.firstByte == 0 {
		t.firstByte = max(t.took, 1)
		state.FirstByte.Observe(t.took.Duration())
	}
	if t.question {
		t.count++
		t.answering += t.took
		state.Answer.Observe(t.took.Duration())
	}
	t.askedAt, t.arrivedAt, t.question = 0, 0, false
	return true
}

// fill sets what an access log says of t.
func (t *turns) fill(c *shaper.ConnectionStatus) {
	c.Connect, c.FirstByte = t.connect.Duration(), t.firstByte.Duration()
	c.Turns, c.Answering = t.count, t.answering.Duration()
}

// countFailedDial counts a failed dial, which is not due to this host.
func countFailedDial(state *shaper.DownstreamState, err error) {
	switch {
	case errors.Is(err, unix.ECONNREFUSED):
		state.DialsRefused.Add(1)
	case errors.Is(err, unix.ETIMEDOUT):
		state.DialsTimedOut.Add(1)
	default:
		state.DialsFailed.Add(1)
	}
}
