package bpf

import "time"

// modelConn is a connection in the model.
type modelConn struct {
	syn, fin, doubtfulRST [2]bool
	established           bool
	proven                bool // by the server's segments
	pathUnknown           bool // adopted: unknown which segments reach the server
	clientData            bool // data was seen from the client
	adopted               bool
	noData                [2]bool // adopted: no data since
	maybeFIN              [2]bool // an earlier segment was missed, which may be a FIN
	outOfOrder            bool    // the client sent out of order before the connection was proven
	closed, expired       bool
	seen                  uint64
	next, ack, end        [2]uint32
	slots                 []string // keys of the slots
}

// unproven reports whether it may still be opening, or an RST may not have ended it.
func (c *modelConn) unproven() bool {
	return !c.established || (c.doubtfulRST[0] || c.doubtfulRST[1]) && !c.proven
}

// lapsed reports whether it has no slots, and may still be established.
func (c *modelConn) lapsed() bool { return c.closed && c.expired && c.unproven() }

// acksServerSYN reports whether a number acknowledges a SYN+ACK of the server.
func (c *modelConn) acksServerSYN(acked uint32) bool {
	return acked == c.next[server] || acked == c.ack[client]
}

func (c *modelConn) closing() bool { return c.fin[0] && c.fin[1] && c.ack[server] == c.end[client] }

func (c *modelConn) timeout() uint64 {
	switch {
	case c.unproven():
		return testHalfOpenTimeout
	case c.doubtfulRST[0] || c.doubtfulRST[1] || c.closing() || c.fin[client] && !c.syn[server]:
		return testClosingTimeout
	}
	hint, both := false, true
	for side := range 2 {
		hint = hint || c.maybeFIN[side] || c.fin[side] && (c.noData[0] || c.noData[1])
		both = both && (c.fin[side] || c.noData[side] || c.maybeFIN[side])
	}
	if hint && both {
		return testClosingTimeout
	}
	return testIdleTimeout
}

func seqAfter(a, b uint32) bool { return int32(a-b) > 0 }

// acceptsRST reports whether an RST of n bytes ends it.
func (c *modelConn) acceptsRST(side int, flags byte, seq, acked uint32, n int) bool {
	switch {
	case side == server && !c.syn[server]:
		return flags&ack != 0 && acked == c.next[client]
	case side == server:
		return seq == c.next[server]
	}
	return n == 0 && !c.pathUnknown && seq == c.ack[server] && !seqAfter(c.next[client], c.ack[server]) &&
		(c.proven || flags&ack == 0 || acked == c.next[server])
}

// model is a sequential model of a table of TCP connections with caps. Like the programs
// without their timer, it notices that a connection has expired when the next segment comes.
type model struct {
	caps  map[string]int // by the name of the limit, for each source
	conns map[int]*modelConn
	slots map[string]int

	replied    bool         // the server has replied to a SYN
	deferUntil uint64       // time before which SYNs reserve no slots
	reversed   map[int]bool // connections from the other direction
}

func (m *model) close(c *modelConn, now uint64) {
	c.closed, c.seen = true, now
	for _, key := range c.slots {
		m.slots[key]--
	}
	c.slots = nil
}

// deferReservations defers reservations after a connection that was not established.
func (m *model) deferReservations(c *modelConn, now uint64) {
	if !c.established && !c.pathUnknown {
		m.deferUntil = now + uint64(time.Minute)
	}
}

// admit inserts a connection under all limits, if they have free slots or it is forced.
func (m *model) admit(id int, keys map[string]string, forced bool) *modelConn {
	var held []string
	for limit, key := range keys {
		if !forced && m.slots[key] >= m.caps[limit] {
			return nil
		}
		held = append(held, key)
	}
	for _, key := range held {
		m.slots[key]++
	}
	c := &modelConn{slots: held}
	m.conns[id] = c
	return c
}

// Verdicts on a segment.
const (
	passes = iota
	refused
	unestablished // refused, as it may establish a connection without slots
)

// packet returns the verdict on a segment.
func (m *model) packet(id, side int, flags byte, seq, acked uint32, n int, keys map[string]string, now uint64) int {
	c := m.conns[id]
	begins := flags&(syn|ack|rst) == syn
	again := side == client && begins
	end := seq + uint32(n)
	if flags&syn != 0 {
		end++
	}
	if flags&fin != 0 {
		end++
	}
	if c != nil && !c.closed {
		switch {
		case now-c.seen >= c.timeout():
			m.deferReservations(c, now)
			m.close(c, now)
			c.expired = true
		case again && c.closing():
			m.close(c, now)
		}
	}
	was := c
	if c != nil && c.lapsed() {
		late := flags&(syn|ack|rst) == ack && (c.syn[server] && c.acksServerSYN(acked) && (seq == c.ack[server] || c.adopted) || !c.syn[server] && !m.replied)
		switch {
		case again:
			m.deferReservations(c, now)
			if end == c.next[client] && now-c.seen < testHalfOpenTimeout {
				return passes
			}
		case side == server:
			if flags&(syn|ack|rst) == syn|ack {
				c.seen, c.next[server], c.ack[server], m.replied = now, end, acked, true
				if !c.syn[server] {
					c.ack[client], c.syn[server] = end, true
				}
			}
			if flags&(syn|ack|rst) != ack || n == 0 && !seqAfter(acked, c.ack[server]) {
				return passes
			}
		case late:
			if c = m.admit(id, keys, false); c == nil {
				return unestablished
			}
			c.syn, c.established, c.pathUnknown, c.seen = [2]bool{true, m.replied}, true, true, now
			proven := seq
			if was.syn[server] {
				proven = was.ack[server]
			}
			c.noData, c.maybeFIN = was.noData, was.maybeFIN
			c.next, c.ack = [2]uint32{end, acked}, [2]uint32{acked, proven}
			if !seqAfter(end, proven) {
				c.next[client] = proven
			}
			c.fin[client], c.end[client] = flags&fin != 0 && end-proven-1 < 1<<30, end
			return passes
		case flags&(syn|ack|rst) == ack && c.syn[server] && !c.adopted:
			return unestablished
		}
	}
	if c != nil && c.closed && (again || c.expired) {
		c = nil
	}
	switch {
	case c == nil && again:
		unreserved := m.replied && now < m.deferUntil
		if c = m.admit(id, keys, false); c == nil {
			return refused
		}
		if unreserved {
			m.close(c, now)
			c.expired = true
			if n > 0 { // the server may accept it (Fast Open)
				m.conns[id] = was
				return refused
			}
		}
		delete(m.reversed, id)
		c.syn[client], c.seen = true, now
		c.next[client], c.ack[server] = end, end
		if was != nil && was.lapsed() && was.syn[server] {
			c.syn[server], c.next[server], c.ack = true, was.next[server], was.ack
		}
		return passes
	case c == nil && side == server && begins:
		m.reversed[id] = true
		return passes
	case c == nil && side == server && flags&(syn|ack|rst|fin) == ack && !m.reversed[id]:
		c = m.admit(id, keys, true)
		c.syn, c.seen, c.pathUnknown, c.adopted = [2]bool{true, true}, now, true, true
		c.next = [2]uint32{acked, end}
		c.ack = [2]uint32{end, acked}
		c.noData = [2]bool{true, true}
		return passes
	case c == nil || c.closed:
		return passes
	}
	m.track(c, side, flags, seq, acked, end, n, now)
	return passes
}

// track updates a live connection by a segment.
func (m *model) track(c *modelConn, side int, flags byte, seq, acked, end uint32, n int, now uint64) {
	const window = 1 << 30
	other := 1 - side
	if c.established || side == client && c.pathUnknown {
		c.seen = now
	}
	if flags&rst != 0 {
		if side == server && c.syn[server] && !c.proven && c.outOfOrder {
			c.doubtfulRST[server] = true
		} else if c.acceptsRST(side, flags, seq, acked, n) {
			if side == client {
				m.deferReservations(c, now)
			}
			m.close(c, now)
			if (side == client || c.syn[server]) && !c.proven {
				c.expired, c.doubtfulRST[side] = true, true
			}
		} else if side == server || seq-c.ack[server] <= window {
			c.doubtfulRST[side] = true
		}
		return
	}
	if side == client && !c.proven && flags&syn == 0 && seq != c.ack[server] {
		c.outOfOrder = true
	}
	both, answered, established, proven := c.syn[0] && c.syn[1], c.syn[server], c.established, n > 0
	inside := end-c.ack[other] <= window && seqAfter(end, c.next[side])
	if c.fin[side] && n > 0 && flags&fin == 0 && !seqAfter(c.end[side], end) {
		c.fin[side] = false
	}
	if flags&syn != 0 {
		if side == server {
			m.replied = true
			another := flags&ack != 0 && acked != c.ack[server]
			if another {
				c.next[client], c.ack[server] = acked, acked
				c.noData, c.maybeFIN, c.fin = [2]bool{}, [2]bool{}, [2]bool{}
			}
			if another || !c.syn[server] {
				c.next[server], c.ack[client] = end, end
			} else if !c.established {
				c.next[server] = end
			}
		}
		c.syn[side] = true
	} else if inside && (n > 0 || flags&fin != 0 || side == server && !c.established) {
		c.next[side] = end
	}
	switch {
	case inside && n > 0:
		c.noData[side], c.maybeFIN[side] = false, false
	case !inside && flags&fin != 0 && c.noData[side]:
		c.maybeFIN[side] = true
	}
	if flags&ack != 0 && (c.noData[0] || c.noData[1]) && seqAfter(acked, c.next[other]) {
		c.maybeFIN[other] = true
	}
	c.clientData = c.clientData || side == client && n > 0
	if side == client && flags&(syn|ack) == ack && both && !established && c.acksServerSYN(acked) {
		c.established, c.next[server], c.ack[client] = true, acked, acked
	} else if flags&ack != 0 && seqAfter(acked, c.ack[side]) && (side == server || established && !seqAfter(acked, c.next[server])) {
		c.ack[side] = acked
		proven = true
		if side == server && c.clientData {
			c.pathUnknown, c.adopted = false, false
		}
	}
	if flags&fin != 0 && inside {
		c.fin[side], c.end[side] = true, end
	}
	if side == client && flags&ack != 0 && !answered && !m.replied {
		c.established = true
	}
	if both && flags&syn == 0 && side == server && proven {
		c.established, c.proven = true, true
	}
	if c.established {
		c.seen = now
	}
	c.doubtfulRST[side] = false
	if c.closing() && c.ack[client] == c.end[server] {
		m.close(c, now)
	}
}
