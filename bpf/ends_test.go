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
)

// endpoint is an honest end of a TCP connection that has some segments to send, and closes.
type endpoint struct {
	side     int
	segments []piece // all that it sends; the last one has its FIN
	sent     int     // so many of them, at least once
	acked    uint32  // by the other one
	expected uint32  // of the other one
	early    []piece // of that one, out of order
	closed   bool    // that one has closed
	gone     bool    // it has no socket any more
	writes   uint64  // when it sends the next one
	resends  uint64  // when it sends one again,
	timeout  uint64  // after so long
}

// piece is a segment's part of the sequence.
type piece struct {
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

// over reports whether both have closed, and e knows that the other one does.
func (e *endpoint) over() bool {
	return e.gone || e.closed && e.acked == e.segments[len(e.segments)-1].to
}

// flying is a segment on its way, behind the programs.
type flying struct {
	at    uint64
	side  int
	flags byte
	acked uint32
	piece
}

// talk is a connection between two ends, of which the programs see what passes once counting has begun.
type talk struct {
	*tcpBench
	d       *dialogue
	rnd     *rand.Rand
	ends    [2]*endpoint
	flying  []flying
	counts  uint64  // when counting begins
	blocked bool    // the client, until then
	loss    float64 // of segments, before the programs, and behind them
	pauses  uint64  // at most
	held    bool    // it is established, and has its slot,
	lost    int     // and so often had it no more
	log     strings.Builder
}

const (
	roundTrip = uint64(40 * time.Millisecond)
	resend    = uint64(400 * time.Millisecond)
)

// newTalk has a connection between two ends that send up to three segments each.
func newTalk(b *tcpBench, rnd *rand.Rand, d *dialogue) *talk {
	k := &talk{tcpBench: b, d: d, rnd: rnd}
	for side := range k.ends {
		e := &endpoint{side: side, acked: d.next[side], expected: d.next[1-side], timeout: resend}
		at := d.next[side]
		for range rnd.IntN(4) {
			e.segments = append(e.segments, piece{at, at + 10, 10, false})
			at += 10
		}
		n := rnd.IntN(2) * 10
		e.segments = append(e.segments, piece{at, at + uint32(n) + 1, n, true})
		k.ends[side] = e
	}
	return k
}

func (k *talk) pause() uint64 {
	return [...]uint64{0, k.rnd.Uint64N(uint64(100 * time.Millisecond)), k.rnd.Uint64N(k.pauses)}[k.rnd.IntN(3)]
}

// flight returns the programs' own state, of the connection, and whether it has its slot.
func (k *talk) flight() (f kernelFlight, counted bool) {
	key := kernelTuple{
		Initiator: words(k.d.ends[client].Addr()), InitiatorPort: k.d.ends[client].Port(),
		Responder: words(testServer.Addr()), ResponderPort: testServer.Port(),
	}
	err := k.Connections.Lookup(&key, &f)
	return f, err == nil && f.Word&flightClosed == 0 && f.SlotPlace[0] != nowhere
}

// transmit has a segment pass the programs, unless it is lost or blocked.
func (k *talk) transmit(e *endpoint, flags byte, p piece) {
	fate := "arrives"
	defer func() {
		f, _ := k.flight()
		fmt.Fprintf(&k.log, "%v side %d, flags %x, %d to %d, acknowledges %d: %s; %x %x\n", time.Duration(k.now), e.side, flags, p.from, p.to, e.expected, fate, f.Word&0xfff, f.Heard)
	}()
	counts := k.now >= k.counts
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
		f, counted := k.flight()
		if e := k.ends[server]; k.held && !counted && !(e.closed && e.sent == len(e.segments)) {
			k.lost++
		}
		k.held = counted && f.Word&flightEstablished != 0
	}
	if k.rnd.Float64() < k.loss {
		fate = "is lost behind"
		return
	}
	k.flying = append(k.flying, flying{k.now + roundTrip/2 + k.rnd.Uint64N(roundTrip/8), e.side, flags, e.expected, p})
}

func (k *talk) transmitPiece(e *endpoint, p piece) {
	flags := byte(ack)
	if p.fin {
		flags |= fin
	}
	k.transmit(e, flags, p)
}

// receive has an end take a segment in.
func (k *talk) receive(s flying) {
	e := k.ends[1-s.side]
	if s.flags&rst != 0 {
		e.gone = true
		return
	}
	if e.gone {
		k.transmit(e, rst, piece{from: s.acked, to: s.acked})
		return
	}
	if ahead(s.acked, e.acked) && !ahead(s.acked, e.next()) {
		e.acked, e.timeout, e.resends = s.acked, resend, k.now+resend
	}
	if s.from != s.to {
		e.early = append(e.early, s.piece)
		slices.SortFunc(e.early, func(a, b piece) int { return int(int32(a.from - b.from)) })
		for len(e.early) > 0 && !ahead(e.early[0].from, e.expected) {
			if p := e.early[0]; ahead(p.to, e.expected) {
				e.expected, e.closed = p.to, e.closed || p.fin
			}
			e.early = e.early[1:]
		}
		k.transmit(e, ack, piece{from: e.next(), to: e.next()})
	}
}

// run has both ends talk until they are over, or give up.
func (k *talk) run() {
	for range 400 {
		const arrives, writes, resends = 0, 1, 2
		next, what, who := ^uint64(0), arrives, (*endpoint)(nil)
		slices.SortStableFunc(k.flying, func(a, b flying) int { return int(int64(a.at - b.at)) })
		if len(k.flying) > 0 {
			next = k.flying[0].at
		}
		for _, e := range k.ends {
			if !e.gone && e.sent < len(e.segments) && e.writes < next {
				next, what, who = e.writes, writes, e
			}
			if !e.gone && e.acked != e.next() && e.resends < next {
				next, what, who = e.resends, resends, e
			}
		}
		if next == ^uint64(0) {
			return
		}
		k.now = max(k.now, next)
		switch what {
		case arrives:
			s := k.flying[0]
			k.flying = k.flying[1:]
			k.receive(s)
		case writes:
			p := who.segments[who.sent]
			who.sent++
			who.writes, who.resends = k.now+k.pause(), k.now+who.timeout
			k.transmitPiece(who, p)
		case resends:
			who.timeout *= 2
			who.resends = k.now + who.timeout
			i := slices.IndexFunc(who.segments, func(p piece) bool { return ahead(p.to, who.acked) })
			k.transmitPiece(who, who.segments[i])
		}
	}
}

// TestEnds has honest ends talk and close, over a way that loses segments: a connection has its slot
// until it is over, and not for longer than a doubt lasts.
func TestEnds(t *testing.T) {
	const trials = 1500
	for _, c := range []struct {
		name    string
		before  bool // it was there before it is counted, and its client may be blocked until then
		blocked bool
		loss    float64
		pauses  time.Duration
		stuck   int // in 100 at most of those that are known
		lost    int // in 100 of them that may lose their slots too soon
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
			b := newTCPVariant(t, Police, map[string]any{kernelVarUnderTest: uint32(1), kernelVarSweepInterval: uint64(time.Hour)}, testIdle, all)
			rnd := newRand(t)
			known, stuck, lost := 0, 0, 0
			var first string
			for i := range trials {
				d := dial(fmt.Sprintf("10.0.%d.%d:%d", i>>8, i&255, 40000+i%1000))
				if !c.before {
					b.establish(d)
				}
				k := newTalk(b, rnd, d)
				k.loss, k.pauses = c.loss*rnd.Float64(), uint64(c.pauses)
				for _, e := range k.ends {
					e.writes = b.now + k.pause()
				}
				if c.before {
					k.counts = b.now + rnd.Uint64N(uint64(12*time.Second))
					k.blocked = c.blocked && rnd.IntN(3) == 0
				}
				k.run()
				if k.lost > 0 {
					lost++
				}
				f, _ := k.flight()
				if f.Word == 0 || !k.ends[0].over() || !k.ends[1].over() {
					continue
				}
				known++
				b.now += testUnsettled
				b.send(d.segment(client, 0, d.next[client], 0, 0))
				if _, counted := k.flight(); counted {
					stuck++
					first = k.log.String()
				}
				b.now += uint64(time.Minute)
			}
			t.Logf("of %d connections, %d keep their slots, and %d lost them too soon", known, stuck, lost)
			if known < trials/10 || stuck*100 > c.stuck*known || lost*100 > c.lost*known {
				t.Errorf("want %d and %d of 100; one that keeps it:\n%s", c.stuck, c.lost, first)
			}
		})
	}
}

// TestWaysAtOnce has a SYN take another way on one CPU while the responder sends on another: an RST that
// goes that way does not end the connection.
func TestWaysAtOnce(t *testing.T) {
	all := capped(100_000)
	all.Key = 0
	b := newTCPVariant(t, Police, map[string]any{kernelVarUnderTest: uint32(1), kernelVarSweepInterval: uint64(time.Hour)}, testIdle, all)
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
			replies = append(replies, d.say(server, ack, 10))
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
		if _, counted := (&talk{tcpBench: b, d: d}).flight(); !counted {
			t.Errorf("try %d: ended by an RST that the responder did not get", tries)
			break
		}
	}
	begun.Store(-1)
	other.Wait()
	t.Logf("%d tries", tries)
}
