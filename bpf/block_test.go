package bpf

import (
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// blocking returns a limit that blocks a prefix.
func blocking(prefix string) shaper.Limit {
	return shaper.Limit{
		Name: "block", Block: true,
		Match: shaper.Match{Attach: []string{"here"}, Source: []netip.Prefix{netip.MustParsePrefix(prefix)}},
	}
}

// TestBlock_RefusesEverything blocks a source that other limits match too: they are not charged for its
// packets, and neither count its connections nor track its segments.
func TestBlock_RefusesEverything(t *testing.T) {
	t.Parallel()
	others := []shaper.Limit{
		{Name: "rate", Packets: shaper.Frequency{N: 1, Per: time.Hour}, BurstPackets: 1},
		capped(1),
	}
	silent := blocking("10.0.0.1/32")
	silent.RefuseWith = shaper.RefuseDrop
	observed := blocking("10.0.0.1/32")
	observed.Observe = true
	byOperator := blocking("10.0.0.1/32")
	byOperator.Observe, byOperator.Always = true, true
	benches := map[shaper.AttachMode]*tcpBench{}
	for _, mode := range []shaper.AttachMode{shaper.AttachPolice, shaper.AttachShape, shaper.AttachObserve} {
		benches[mode] = newTCP(t, mode)
	}
	for _, c := range []struct {
		name    string
		mode    shaper.AttachMode
		block   shaper.Limit
		syn     uint32 // action on a SYN
		other   uint32 // action on another segment
		counted uint64
		flying  int
	}{
		{"police", shaper.AttachPolice, blocking("10.0.0.1/32"), answered, dropped, 11, 0},
		{"shape", shaper.AttachShape, blocking("10.0.0.1/32"), answered, dropped, 11, 0},
		{"silently", shaper.AttachPolice, silent, dropped, dropped, 11, 0},
		{"of another source", shaper.AttachPolice, blocking("10.0.0.7/32"), passed, passed, 0, 1},
		{"observed", shaper.AttachPolice, observed, passed, passed, 2, 1},
		{"at an attachment that observes", shaper.AttachObserve, blocking("10.0.0.1/32"), passed, passed, 2, 0},
		{"always", shaper.AttachPolice, byOperator, answered, dropped, 11, 0},
		{"always, at an attachment that observes", shaper.AttachObserve, byOperator, answered, dropped, 11, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := benches[c.mode]
			b.t = t
			b.clearMaps()
			b.setLimits(append([]shaper.Limit{c.block}, others...)...)
			d := dial(testClient)
			if action, got, _ := b.send(d.nextSegment(client, syn, 0)); action != c.syn {
				t.Errorf("a SYN: action %d, %+v", int32(action), got)
			}
			if action, _, _ := b.send(d.segment(client, ack, d.next[client], 0, 10)); action != c.other {
				t.Errorf("another segment: action %d", int32(action))
			}
			if c.other == dropped {
				for range 9 {
					b.send(d.segment(client, syn, 7, 0, 0))
				}
			}
			b.expectInFlight(c.flying)
			var refused, full uint64
			for number := range uint32(3) {
				s, err := b.readState(number)
				if err != nil {
					t.Fatal(err)
				}
				refused += s.Refused[1]
				full += s.MemoryFull[1] + s.ConnsMemoryFull
			}
			if refused != c.counted || full != 0 {
				t.Errorf("%d packets counted as refused, want %d, and %d for lack of memory", refused, c.counted, full)
			}
			if c.other == dropped {
				for range 2 { // another source still has its whole burst
					if action, got, _ := b.send(dial("10.0.0.2:40000").segment(client, ack, 1, 1, 10)); action != passed {
						t.Errorf("another source: action %d, %+v", int32(action), got)
					}
				}
			}
		})
	}
}

// TestBlock_Counters checks the counters of blocked packets that metrics show.
func TestBlock_Counters(t *testing.T) {
	w := newWire(t, "block")
	p := openPlane(t)
	l := blocking("10.0.0.1/32")
	a := shaper.Attachment{Name: "here", Interfaces: []string{"block0"}, Mode: shaper.AttachPolice}
	p.apply([]shaper.Limit{l, tenAnHour("here")}, a)
	w.want(p, 1, 5, 0)
	w.want(p, 2, 5, 5)
	if _, err := p.Status(); err != nil {
		t.Fatal(err)
	}
	for i := range p.policy.Len() {
		s := p.policy.State(i)
		want := map[bool][2]uint64{true: {5, 500}, false: {}}[p.policy.Limit(i).Block]
		got := [2]uint64{s.Packets[shaper.Refuse][shaper.Blocked].Load(), s.Bytes[shaper.Refuse][shaper.Blocked].Load()}
		if got != want || s.Packets[shaper.Refuse][shaper.QueueFull].Load() != 0 {
			t.Errorf("limit %s counted %d packets, bytes as blocked, want %d", s.Name, got, want)
		}
	}
	p.apply([]shaper.Limit{tenAnHour("here")}, a)
	w.want(p, 1, 5, 5)
	a.Mode = shaper.AttachObserve
	p.apply([]shaper.Limit{l, tenAnHour("here")}, a)
	w.want(p, 1, 5, 5)
	l.Always = true
	p.apply([]shaper.Limit{l, tenAnHour("here")}, a)
	w.want(p, 1, 5, 0)
	w.want(p, 2, 5, 5)
}

// TestBlock_ByDSCP blocks packets of one codepoint: connections are counted for their others, also one that began before it
// was tracked and that the responder's segments, which have this codepoint, tell of.
func TestBlock_ByDSCP(t *testing.T) {
	t.Parallel()
	b := newTCP(t, shaper.AttachPolice, capped(1), shaper.Limit{Name: "block", Block: true, Match: shaper.Match{DSCP: []shaper.DSCP{46}}})
	d := dial(testClient)
	marked := d.nextSegment(client, ack, 10)
	setDSCP(marked[14:], 46)
	if action, _, _ := b.send(marked); action != dropped {
		t.Errorf("a packet that is blocked met action %d", int32(action))
	}
	if action := b.exchange(d, client, ack, 10); action != passed {
		t.Errorf("another packet met action %d", int32(action))
	}
	b.expectInFlight(0)
	answer := d.nextSegment(server, ack, 0)
	setDSCP(answer[14:], 46)
	b.reply(answer)
	b.expectInFlight(1)
}
