package bpf

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// endpoint is an honest end of a TCP connection, which sends some segments and closes.
type endpoint struct {
	side          int
	segments      []segmentRange // segments to send; the last one has the FIN
	sent          int            // number of segments sent at least once
	acked         uint32         // acknowledged by the peer
	expected      uint32         // next sequence number of the peer
	outOfOrder    []segmentRange // received out of order
	closed        bool           // the peer has closed
	closedSocket  bool           // it was reset
	nextWrite     uint64         // time of the next new segment
	nextResend    uint64         // time of the next retransmission
	resendTimeout uint64         // time between retransmissions
}

// segmentRange is the sequence range of a segment.
type segmentRange struct {
	from, to uint32
	n        int // bytes
	fin      bool
}

func (e *endpoint) next() uint32 {
	if e.sent == 0 {
		return e.segments[0].from
	}
	return e.segments[e.sent-1].to
}

// finished reports whether both ends have closed, and e knows that its FIN was acknowledged.
func (e *endpoint) finished() bool {
	return e.closedSocket || e.closed && e.acked == e.segments[len(e.segments)-1].to
}

// inTransit is a segment between the programs and its receiver.
type inTransit struct {
	at    uint64
	side  int
	flags byte
	acked uint32
	segmentRange
}

// session is a connection between two ends. The programs see its segments from countFrom on.
type session struct {
	*tcpBench
	d         *dialogue
	rnd       *rand.Rand
	ends      [2]*endpoint
	inTransit []inTransit
	countFrom uint64  // time at which counting begins
	blocked   bool    // the client is blocked until then
	loss      float64 // probability of loss, before the programs and after them
	maxPause  uint64  // ns
	hadSlot   bool    // it was established and had its slot
	lostSlots int     // times that it lost its slot too soon
	log       strings.Builder
}

const (
	roundTrip = uint64(40 * time.Millisecond)
	resend    = uint64(400 * time.Millisecond)
)

// newSession returns a session whose ends send up to four segments each.
func newSession(b *tcpBench, rnd *rand.Rand, d *dialogue) *session {
	k := &session{tcpBench: b, d: d, rnd: rnd}
	for side := range k.ends {
		e := &endpoint{side: side, acked: d.next[side], expected: d.next[1-side], resendTimeout: resend}
		at := d.next[side]
		for range rnd.IntN(4) {
			e.segments = append(e.segments, segmentRange{at, at + 10, 10, false})
			at += 10
		}
		n := rnd.IntN(2) * 10
		e.segments = append(e.segments, segmentRange{at, at + uint32(n) + 1, n, true})
		k.ends[side] = e
	}
	return k
}

func (k *session) pause() uint64 {
	return [...]uint64{0, k.rnd.Uint64N(uint64(100 * time.Millisecond)), k.rnd.Uint64N(k.maxPause)}[k.rnd.IntN(3)]
}

// record returns the programs' record of the connection, and whether it has its slot.
func (k *session) record() (f kernelConn, counted bool) {
	key := kernelTuple{
		Initiator: words(k.d.ends[client].Addr()), InitiatorPort: k.d.ends[client].Port(),
		Responder: words(testServer.Addr()), ResponderPort: testServer.Port(),
	}
	err := k.Connections.Lookup(&key, &f)
	return f, err == nil && f.State&connClosed == 0 && f.SlotIndex[0] != noSlot
}

// transmit runs a segment through the programs, unless it is lost or blocked.
func (k *session) transmit(e *endpoint, flags byte, p segmentRange) {
	fate := "arrives"
	defer func() {
		f, _ := k.record()
		fmt.Fprintf(&k.log, "%v side %d, flags %x, %d to %d, acknowledges %d: %s; %x %x\n", time.Duration(k.now), e.side, flags, p.from, p.to, e.expected, fate, f.State&0xfff, f.Hints)
	}()
	counts := k.now >= k.countFrom
	if k.rnd.Float64() < k.loss || !counts && k.blocked && e.side == client {
		fate = "is lost before"
		return
	}
	if counts {
		packet := k.d.segment(e.side, flags, p.from, e.expected, p.n)
		if e.side == server {
			k.reply(packet)
		} else if action, _, _ := k.send(packet); action != passed {
			fate = "is refused"
			return
		}
		f, counted := k.record()
		if e := k.ends[server]; k.hadSlot && !counted && !(e.closed && e.sent == len(e.segments)) {
			k.lostSlots++
		}
		k.hadSlot = counted && f.State&uint64(kernelConnFlagESTABLISHED) != 0
	}
	if k.rnd.Float64() < k.loss {
		fate = "is lost after"
		return
	}
	k.inTransit = append(k.inTransit, inTransit{k.now + roundTrip/2 + k.rnd.Uint64N(roundTrip/8), e.side, flags, e.expected, p})
}

func (k *session) transmitPiece(e *endpoint, p segmentRange) {
	flags := byte(ack)
	if p.fin {
		flags |= fin
	}
	k.transmit(e, flags, p)
}

// receive delivers a segment to its receiver.
func (k *session) receive(s inTransit) {
	e := k.ends[1-s.side]
	if s.flags&rst != 0 {
		e.closedSocket = true
		return
	}
	if e.closedSocket {
		k.transmit(e, rst, segmentRange{from: s.acked, to: s.acked})
		return
	}
	if seqAfter(s.acked, e.acked) && !seqAfter(s.acked, e.next()) {
		e.acked, e.resendTimeout, e.nextResend = s.acked, resend, k.now+resend
	}
	if s.from != s.to {
		e.outOfOrder = append(e.outOfOrder, s.segmentRange)
		slices.SortFunc(e.outOfOrder, func(a, b segmentRange) int { return int(int32(a.from - b.from)) })
		for len(e.outOfOrder) > 0 && !seqAfter(e.outOfOrder[0].from, e.expected) {
			if p := e.outOfOrder[0]; seqAfter(p.to, e.expected) {
				e.expected, e.closed = p.to, e.closed || p.fin
			}
			e.outOfOrder = e.outOfOrder[1:]
		}
		k.transmit(e, ack, segmentRange{from: e.next(), to: e.next()})
	}
}

// run runs the session until both ends have finished, or a step limit.
func (k *session) run() {
	for range 400 {
		const arrives, writes, resends = 0, 1, 2
		next, what, end := ^uint64(0), arrives, (*endpoint)(nil)
		slices.SortStableFunc(k.inTransit, func(a, b inTransit) int { return int(int64(a.at - b.at)) })
		if len(k.inTransit) > 0 {
			next = k.inTransit[0].at
		}
		for _, e := range k.ends {
			if !e.closedSocket && e.sent < len(e.segments) && e.nextWrite < next {
				next, what, end = e.nextWrite, writes, e
			}
			if !e.closedSocket && e.acked != e.next() && e.nextResend < next {
				next, what, end = e.nextResend, resends, e
			}
		}
		if next == ^uint64(0) {
			return
		}
		k.now = max(k.now, next)
		switch what {
		case arrives:
			s := k.inTransit[0]
			k.inTransit = k.inTransit[1:]
			k.receive(s)
		case writes:
			p := end.segments[end.sent]
			end.sent++
			end.nextWrite, end.nextResend = k.now+k.pause(), k.now+end.resendTimeout
			k.transmitPiece(end, p)
		case resends:
			end.resendTimeout *= 2
			end.nextResend = k.now + end.resendTimeout
			i := slices.IndexFunc(end.segments, func(p segmentRange) bool { return seqAfter(p.to, end.acked) })
			k.transmitPiece(end, end.segments[i])
		}
	}
}

// TestTracking_HonestEndpoints runs honest sessions over a lossy path: a connection has its slot until
// it is closed, and not for longer than the closing timeout.
func TestTracking_HonestEndpoints(t *testing.T) {
	t.Parallel()
	const trials = 1500
	for _, c := range []struct {
		name    string
		before  bool // it begins before counting does, and its client may be blocked until then
		blocked bool
		loss    float64
		pauses  time.Duration
		stuck   int // maximum percentage of connections that keep their slots
		lost    int // maximum percentage of connections that lose their slots too soon
	}{
		{"from their beginning", false, false, 0.1, 30 * time.Second, 0, 0},
		{"there before", true, false, 0, 5 * time.Second, 1, 0},
		{"there before, with losses", true, false, 0.02, 5 * time.Second, 1, 1},
		{"there before, with pauses", true, false, 0, 30 * time.Second, 1, 15},
		{"there before, and blocked", true, true, 0, 5 * time.Second, 2, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := capped(trials)
			all.Key = 0
			b := newTCPVariant(t, shaper.AttachPolice, map[string]any{kernelVarUnderTest: uint32(1), kernelVarSweepInterval: uint64(time.Hour)}, testIdleTimeout, all)
			rnd := testutil.Rand(t)
			known, stuck, lost := 0, 0, 0
			var first string
			for i := range trials {
				d := dial(fmt.Sprintf("10.0.%d.%d:%d", i>>8, i&255, 40000+i%1000))
				if !c.before {
					b.establish(d)
				}
				k := newSession(b, rnd, d)
				k.loss, k.maxPause = c.loss*rnd.Float64(), uint64(c.pauses)
				for _, e := range k.ends {
					e.nextWrite = b.now + k.pause()
				}
				if c.before {
					k.countFrom = b.now + rnd.Uint64N(uint64(12*time.Second))
					k.blocked = c.blocked && rnd.IntN(3) == 0
				}
				k.run()
				if k.lostSlots > 0 {
					lost++
				}
				f, _ := k.record()
				if f.State == 0 || !k.ends[0].finished() || !k.ends[1].finished() {
					continue
				}
				known++
				b.now += testClosingTimeout
				b.send(d.segment(client, 0, d.next[client], 0, 0))
				if _, counted := k.record(); counted {
					stuck++
					first = k.log.String()
				}
				b.now += uint64(time.Minute)
			}
			t.Logf("of %d connections, %d kept their slots, and %d lost them too soon", known, stuck, lost)
			if known < trials/10 || stuck*100 > c.stuck*known || lost*100 > c.lost*known {
				t.Errorf("want %d and %d of 100; one that kept its slot:\n%s", c.stuck, c.lost, first)
			}
		})
	}
}

// TestTracking_ConcurrentPathChange sends a SYN by another path on one CPU while the responder sends on
// another: an RST by that path does not end the connection.
func TestTracking_ConcurrentPathChange(t *testing.T) {
	t.Parallel()
	all := capped(100_000)
	all.Key = 0
	b := newTCPVariant(t, shaper.AttachPolice, map[string]any{kernelVarUnderTest: uint32(1), kernelVarSweepInterval: uint64(time.Hour)}, testIdleTimeout, all)
	var begun, done atomic.Int64
	var replies [][]byte
	var other sync.WaitGroup
	other.Go(func() {
		for n := int64(1); ; n++ {
			for begun.Load() != n {
				if begun.Load() < 0 {
					return
				}
			}
			for _, p := range replies {
				b.reply(p)
			}
			done.Store(n)
		}
	})
	tries := int64(0)
	for end := time.Now().Add(2 * time.Second); time.Now().Before(end); {
		tries++
		d := dial(fmt.Sprintf("10.%d.%d.%d:40000", tries>>16, tries>>8&255, tries&255))
		b.establish(d)
		replies = replies[:0]
		for range 40 {
			replies = append(replies, d.nextSegment(server, ack, 10))
		}
		away := func(flags byte, seq uint32) []byte {
			p := d.segment(client, flags, seq, 0, 0)
			p[5] ^= 1
			return p
		}
		begun.Store(tries)
		for spin := tries % 64 * 40; spin > 0; spin-- {
			_ = done.Load()
		}
		b.send(away(syn, d.next[client]-11))
		for done.Load() < tries {
		}
		b.send(away(rst, d.next[client]))
		if _, counted := (&session{tcpBench: b, d: d}).record(); !counted {
			t.Errorf("try %d: ended by an RST that the responder did not get", tries)
			break
		}
	}
	begun.Store(-1)
	other.Wait()
	t.Logf("%d tries", tries)
}
