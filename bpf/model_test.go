package bpf

import (
	"flag"
	"fmt"
	"math"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

var steps = flag.Int("steps", 60_000, "random segments of the model test")

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

// TestModel feeds random segments of few connections, mostly as TCP would send them, to the
// programs and to the model, which must agree on each.
func TestModel(t *testing.T) {
	rnd := testutil.Rand(t)
	b := newTCPVariant(t, shaper.AttachPolice, map[string]any{
		kernelVarUnderTest: uint32(1), kernelVarSweepInterval: uint64(time.Hour),
	}, testIdleTimeout)
	all := shaper.Limit{Name: "all", MaxConnections: 6}
	one := capped(3)
	b.setLimits(all, one)
	m := &model{caps: map[string]int{"all": 6, "capped": 3}, conns: map[int]*modelConn{}, slots: map[string]int{}, reversed: map[int]bool{}}
	// The server's port is the lower one, as adoption expects.
	var dialogues []*dialogue
	for i := range 12 {
		dialogues = append(dialogues, dial(fmt.Sprintf("10.0.0.%d:%d", 1+i%3, 40000+i)))
	}
	var refusals, lates, closes, expiries, adoptions int
	for step := range *steps {
		id := rnd.IntN(len(dialogues))
		d := dialogues[id]
		keys := map[string]string{"all": "all", "capped": d.ends[client].Addr().String()}
		side := rnd.IntN(2)
		was := m.conns[id]
		lives := was != nil && !was.closed
		opens := was != nil && was.lapsed()
		if rnd.IntN(1000) == 0 {
			b.setAllDeferUntil(t, 0)
			m.deferUntil = 0
		}
		flags := []byte{ack, ack, ack, ack | fin, ack | fin, rst, rst | ack, syn, syn | ack, 0, fin, syn | fin}[rnd.IntN(12)]
		if !lives && !opens && rnd.IntN(3) > 0 {
			side, flags = client, syn
		} else if opens && rnd.IntN(3) > 0 {
			side, flags = server, syn|ack
			if was.syn[server] {
				side, flags = client, ack
			}
		} else if lives && !(was.syn[0] && was.syn[1]) && rnd.IntN(2) == 0 {
			side, flags = server, syn|ack
		} else if lives && rnd.IntN(3) > 0 {
			flags = []byte{ack, ack | fin}[rnd.IntN(2)]
		}
		if begins := side == client && flags == syn; begins && !lives && (!opens || rnd.IntN(3) == 0) {
			d.next = [2]uint32{rnd.Uint32(), rnd.Uint32()}
		}
		n := rnd.IntN(3) * rnd.IntN(100)
		seq, acked := d.next[side], d.next[1-side]
		switch rnd.IntN(12) {
		case 0:
			seq += uint32(rnd.IntN(5)) - 2
		case 1:
			acked += uint32(rnd.IntN(5)) - 2
		case 2:
			seq, acked = rnd.Uint32(), rnd.Uint32()
		default:
			d.next[side] = seq + uint32(n)
			if flags&syn != 0 {
				d.next[side]++
			}
			if flags&fin != 0 {
				d.next[side]++
			}
		}
		if flags&ack == 0 {
			acked = 0
		}
		switch rnd.IntN(200) {
		case 0:
			b.now += rnd.Uint64N(3 * testIdleTimeout)
		case 1, 2, 3:
			b.now += rnd.Uint64N(2 * testClosingTimeout)
		case 4:
			b.now += []uint64{testIdleTimeout, testIdleTimeout - 1, testClosingTimeout, testClosingTimeout - 1, testHalfOpenTimeout, testHalfOpenTimeout - 1}[rnd.IntN(6)]
		default:
			b.now += rnd.Uint64N(uint64(time.Millisecond))
		}
		packet := d.segment(side, flags, seq, acked, n)
		fate := m.packet(id, side, flags, seq, acked, n, keys, b.now)
		action := uint32(passed)
		if side == client {
			action, _, _ = b.send(packet)
		} else {
			b.reply(packet)
		}
		want := uint32(passed)
		switch fate {
		case unestablished:
			want = dropped
			lates++
		case refused:
			want = answered
			if n > 0 {
				want = dropped
			}
			refusals++
		}
		held := 0
		for _, n := range m.slots {
			held += n
		}
		one, _ := b.readState(0)
		two, _ := b.readState(1)
		if action != want || int(one.InFlight+two.InFlight) != held || step%5000 == 0 && b.inFlight() != held {
			t.Fatalf("step %d: side %d, flags %x, seq %d, ack %d, %d bytes at %d: action %d, want %d; %d and %d in flight, want %d\nbefore: %+v",
				step, side, flags, seq, acked, n, b.now, int32(action), int32(want), one.InFlight, two.InFlight, held, was)
		}
		is := m.conns[id]
		switch {
		case lives && was.expired:
			expiries++
		case lives && was.closed:
			closes++
		case is != was && side == server:
			adoptions++
		}
	}
	t.Logf("%d refused, %d late, %d closed, %d expired, %d adopted", refusals, lates, closes, expiries, adoptions)
	if least := *steps / 1000; refusals < least || lates < least/10 || closes < least || expiries < least || adoptions < least {
		t.Error("too few cases of some kind")
	}
}

// TestNewConnectionsParity sends SYNs at random times: the programs and package leaky must
// agree on each, to the tick.
func TestNewConnectionsParity(t *testing.T) {
	rnd := testutil.Rand(t)
	b := newTCP(t, shaper.AttachShape)
	var delays, refusals int
	for round := range 30 {
		b.clearMaps()
		var limits []shaper.Limit
		for i := range 1 + rnd.IntN(5) {
			l := shaper.Limit{
				Name: fmt.Sprint("l", i), Key: []shaper.Fields{0, shaper.KeySource, shaper.KeyPort, shaper.KeySource | shaper.KeyAttach}[rnd.IntN(4)],
				IPv4Prefix: 1 + rnd.IntN(32), IPv6Prefix: 64,
				NewConnections: shaper.Frequency{N: 1 + rnd.Uint64N(1000), Per: time.Duration(1 + rnd.Int64N(int64(10*time.Second)))},
				QueueTimeout:   time.Duration(rnd.Int64N(int64(time.Second))) * time.Duration(rnd.IntN(2)),
				Match:          shaper.Match{Attach: []string{"here"}},
			}
			limits = append(limits, l)
		}
		b.setLimits(limits...)
		s := shaper.New(1)
		p, err := s.Compile(limits, nil, []shaper.Attachment{{Name: "here"}}, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		buckets := map[shaper.Key]*leaky.Bucket{}
		mean := float64(limits[0].NewConnections.Per) / float64(limits[0].NewConnections.N)
		for i := range 500 {
			b.now += uint64(rnd.ExpFloat64() * mean * math.Exp(rnd.NormFloat64()))
			now := leaky.Time(b.now) * leaky.FromDuration(1)
			d := dial(fmt.Sprintf("10.0.%d.%d:%d", rnd.IntN(2), rnd.IntN(3), 20000+i))
			f := shaper.Flow{Source: d.ends[client].Addr(), Destination: testServer.Addr(), Port: testServer.Port(), Origin: p.AttachmentIndex("here"), Protocol: shaper.TCP}
			r := p.Route(&f)
			want := shaper.Decision{Depart: now, Limit: -1}
			var charged []int
			bucket := func(i int) *leaky.Bucket {
				key := p.Key(i, &f, r)
				if buckets[key] == nil {
					buckets[key] = &leaky.Bucket{}
				}
				return buckets[key]
			}
			for i := range p.Len() {
				depart, ok := bucket(i).Offer(p.NewConnections(i), 0, 1, now)
				if !ok {
					want = shaper.Decision{Verdict: shaper.Refuse, Reason: shaper.ByNewConnections, Depart: depart, Limit: i}
					for _, i := range charged {
						bucket(i).Refund(p.NewConnections(i), 0, 1)
					}
					break
				}
				charged = append(charged, i)
				if depart > want.Depart {
					want = shaper.Decision{Verdict: shaper.Delay, Reason: shaper.ByNewConnections, Depart: depart, Limit: i}
				}
			}
			action, got, stamp := b.send(d.nextSegment(client, syn, 0))
			wantAction, wantStamp := uint32(passed), uint64(want.Depart.Duration())
			switch want.Verdict {
			case shaper.Delay:
				delays++
			case shaper.Refuse:
				wantAction, wantStamp = answered, 0
				refusals++
			}
			if action != wantAction || stamp != wantStamp || got.Verdict != uint32(want.Verdict) || got.Reason != uint32(want.Reason) ||
				leaky.Time(got.Depart) != want.Depart || got.Limit != uint32(want.Limit) {
				t.Fatalf("round %d, SYN %d at %d: action %d, %+v, stamp %d; want %+v, stamp %d\n%+v", round, i, now, int32(action), got, stamp, want, wantStamp, limits)
			}
		}
	}
	t.Logf("%d delayed, %d refused", delays, refusals)
	if delays < 500 || refusals < 500 {
		t.Error("too few cases of some kind")
	}
}
