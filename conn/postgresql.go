// Owner: the loop's thread.

package conn

// readyForQuery watches what a server of PostgreSQL sends for the message ReadyForQuery, with which every answer ends. It
// tells whether a transaction is open. (PostgreSQL documentation, "Message Formats".)
type readyForQuery struct {
	speaks bool    // the message has come
	last   [6]byte // of the answer so far
	n      int
}

// begin begins a new answer.
func (q *readyForQuery) begin() { q.n = 0 }

// see takes in the next bytes.
func (q *readyForQuery) see(b []byte) {
	size := len(q.last)
	if len(b) >= size {
		q.n = copy(q.last[:], b[len(b)-size:])
		return
	}
	if over := q.n + len(b) - size; over > 0 {
		q.n = copy(q.last[:], q.last[over:q.n])
	}
	q.n += copy(q.last[q.n:], b)
}

// idle reports whether the answer is over, and no transaction is open. known is false if the server has not spoken the
// protocol so far, or not in clear.
func (q *readyForQuery) idle() (idle, known bool) {
	if q.n == len(q.last) && string(q.last[:5]) == "Z\x00\x00\x00\x05" {
		switch q.last[5] {
		case 'I':
			q.speaks = true
			return true, true
		case 'T', 'E':
			q.speaks = true
		}
	}
	return false, q.speaks
}
