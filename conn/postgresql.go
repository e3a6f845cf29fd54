// Owner: the loop's thread.

package conn

import "encoding/binary"

// pgConversation follows the messages of a connection of PostgreSQL, of which it reads no more than types and lengths, to
// tell whether all that was asked is answered and no transaction is open. (PostgreSQL documentation, "Message Formats",
// protocol 3.)
type pgConversation struct {
	up, down  pgFrames
	asked     int  // ReadyForQuery is to come so many times
	ready     bool // it has come
	status    byte // what the last one said: 'I' is outside of a transaction
	encrypted int  // answers of one byte to requests for encryption that are to come
	lost      bool // not the protocol, or encrypted
}

// pgFrames cuts a stream into messages.
type pgFrames struct {
	untyped bool    // the next message has no type: the first ones of a client
	head    [9]byte // type, length, and the first bytes after it
	n       int     // bytes of it
	left    uint32  // of the rest of the message
}

const (
	pgSSLRequest    = 80877103
	pgGSSENCRequest = 80877104
	pgCancelRequest = 80877102

	pgMaxMessage = 1 << 30
)

// next takes a message, or the part of one that is there, from b. It returns what is left of b, and whether the head of a
// message is complete: its type, or 0 without, its length, and where it is long enough 4 bytes of what follows, or 1 after a
// type.
func (f *pgFrames) next(b []byte) (rest []byte, complete, ok bool) {
	if f.left > 0 {
		n := min(uint32(len(b)), f.left)
		f.left -= n
		return b[n:], false, true
	}
	start := 1
	if f.untyped {
		start = 0
	}
	for ; f.n < start+4 && len(b) > 0; b = b[1:] {
		f.head[f.n] = b[0]
		f.n++
	}
	if f.n < start+4 {
		return b, false, true
	}
	length := binary.BigEndian.Uint32(f.head[start:])
	if length < 4 || length > pgMaxMessage {
		return nil, false, false
	}
	want := start + 4 + int(min(length-4, uint32(4-3*start)))
	for ; f.n < want && len(b) > 0; b = b[1:] {
		f.head[f.n] = b[0]
		f.n++
	}
	if f.n < want {
		return b, false, true
	}
	f.left, f.n = length-uint32(want-start), 0
	return b, true, true
}

// begin begins to follow a connection: from its start, or from between two questions.
func (c *pgConversation) begin(fromStart bool) {
	*c = pgConversation{up: pgFrames{untyped: fromStart}}
}

// sent takes in bytes of the client.
func (c *pgConversation) sent(b []byte) {
	for len(b) > 0 && !c.lost {
		rest, complete, ok := c.up.next(b)
		b, c.lost = rest, !ok
		switch {
		case !complete:
		case c.up.untyped:
			switch binary.BigEndian.Uint32(c.up.head[4:]) {
			case pgSSLRequest, pgGSSENCRequest:
				c.encrypted++
			default:
				c.up.untyped = false
				c.asked++
			}
		default:
			switch c.up.head[0] {
			case 'Q', 'S', 'F': // Query, Sync, FunctionCall
				c.asked++
			}
		}
	}
}

// received takes in bytes of the server.
func (c *pgConversation) received(b []byte) {
	for len(b) > 0 && !c.lost {
		if c.encrypted > 0 && c.down.n == 0 && c.down.left == 0 {
			c.encrypted--
			c.lost = b[0] != 'N'
			b = b[1:]
			continue
		}
		rest, complete, ok := c.down.next(b)
		b, c.lost = rest, !ok
		if complete && c.down.head[0] == 'Z' {
			c.ready, c.status = true, c.down.head[5]
			c.asked = max(c.asked-1, 0)
		}
	}
}

// idle reports whether all is answered and no transaction is open. known is false if the server has not spoken the
// protocol so far, or not in clear.
func (c *pgConversation) idle() (idle, known bool) {
	known = c.ready && !c.lost
	return known && c.asked == 0 && c.status == 'I', known
}

// needsNoSlot reports whether b, the first bytes of what a client sends next, are a request to cancel what another
// connection has asked, or the end of the connection.
func (c *pgConversation) needsNoSlot(b []byte) bool {
	switch {
	case c.lost:
		return false
	case c.up.untyped:
		return len(b) >= 8 && binary.BigEndian.Uint32(b[4:]) == pgCancelRequest
	}
	return len(b) == 5 && b[0] == 'X'
}
