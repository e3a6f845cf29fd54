package bpf

import (
	"encoding/binary"
	"testing"
	"time"

	"shaperd/shaper"
)

// crowd is a table that is too small for the sources of a flood.
type crowd struct {
	*bench
	t   *testing.T
	now uint64
}

func newCrowd(t *testing.T, limits ...shaper.Limit) *crowd {
	c := &crowd{bench: newSized(t, 256, kernelAttachment{Mode: uint32(Police), Ethernet: 1, Keep: 1}, map[string]any{kernelVarUnderTest: uint32(1)}), t: t, now: uint64(10 * time.Hour)}
	c.use(t, attached(limits...), nil)
	return c
}

// passes sends a packet of a source to a port.
func (c *crowd) passes(source, port uint16) bool {
	c.t.Helper()
	p := datagram(0)
	binary.BigEndian.PutUint16(p[28:], source)
	binary.BigEndian.PutUint16(p[36:], port)
	action, _, _ := c.run(c.t, &sample{data: p}, c.now, (*bench).tc)
	return action == tcNext
}

// passing counts the sources of a hundred that pass a packet to a port.
func (c *crowd) passing(first, port uint16) (n int) {
	c.t.Helper()
	for i := range uint16(100) {
		if c.passes(first+i, port) {
			n++
		}
	}
	return n
}

// flood sends a packet each of sources that nobody has seen before to a port, and fills
// the table with what they owe.
func (c *crowd) flood(first, n, port uint16, every time.Duration) {
	c.t.Helper()
	before, err := c.tableCounts()
	if err != nil {
		c.t.Fatal(err)
	}
	for i := range n {
		c.now += uint64(every)
		c.passes(first+i, port)
	}
	after, err := c.tableCounts()
	if err != nil {
		c.t.Fatal(err)
	}
	if after.EvictedIndebted == before.EvictedIndebted {
		c.t.Fatal("the table had room for all")
	}
}

func toPort(l shaper.Limit, port uint16) shaper.Limit {
	l.Match.Port = []shaper.PortRange{{First: port, Last: port}}
	return l
}

// TestDebtsOfOthers floods the table under a limit whose units take half an hour: who is
// under another limit never owes for that.
func TestDebtsOfOthers(t *testing.T) {
	c := newCrowd(t,
		toPort(shaper.Limit{Name: "slow", Key: shaper.KeySource, Packets: shaper.Frequency{N: 2, Per: time.Hour}}, 53),
		toPort(shaper.Limit{Name: "fast", Key: shaper.KeySource, Rate: 10e6, MaxDelay: 200 * time.Millisecond}, 443))
	for _, round := range []struct {
		name        string
		known, next uint16 // sources
	}{{"before", 40000, 40000}, {"after", 40000, 50000}, {"ten minutes later", 50000, 60000}} {
		for _, first := range []uint16{round.known, round.next} {
			c.now += uint64(time.Second)
			if n := c.passing(first, 443); n != 100 {
				t.Errorf("%s the flood %d of 100 sources from %d on pass", round.name, n, first)
			}
		}
		if round.name == "before" {
			c.flood(1, 2048, 53, time.Millisecond)
		} else {
			c.now += uint64(10 * time.Minute)
		}
	}
}

// TestDebtsOfOthersAndOneForAll is the same for a limit with one bucket, which has its place
// even when it has drained.
func TestDebtsOfOthersAndOneForAll(t *testing.T) {
	c := newCrowd(t,
		toPort(shaper.Limit{Name: "slow", Key: shaper.KeySource, Packets: shaper.Frequency{N: 5, Per: time.Minute}}, 22),
		toPort(shaper.Limit{Name: "total", Rate: 1e9}, 443)) // strict: one packet at a time
	for ms := range uint16(3000) {
		c.now += uint64(time.Millisecond)
		if ms == 1000 {
			c.flood(1, 2000, 22, 0)
		}
		if !c.passes(60000, 443) {
			t.Fatalf("the only packet within a millisecond is refused, of 1 Gbit/s, %d ms after the flood", ms-1000)
		}
	}
	if !c.passes(60000, 443) {
		return
	}
	for c.passes(60000, 443) { // and it limits
		if c.now++; c.now > uint64(11*time.Hour) {
			t.Fatal("nothing is refused")
		}
	}
}

// TestFloodBuysNothing has sources that owe half an hour lose their places to a flood:
// none of them passes sooner for that.
func TestFloodBuysNothing(t *testing.T) {
	for _, c := range []struct {
		name  string
		limit shaper.Limit
	}{
		{"no queue", shaper.Limit{Packets: shaper.Frequency{N: 2, Per: time.Hour}}},
		{"a short queue", shaper.Limit{Packets: shaper.Frequency{N: 2, Per: time.Hour}, MaxDelay: 200 * time.Millisecond}},
		{"bytes", shaper.Limit{Rate: 8, MaxDelay: 200 * time.Millisecond}}, // 100 s a packet
	} {
		t.Run(c.name, func(t *testing.T) {
			c.limit.Name, c.limit.Key = "slow", shaper.KeySource
			w := newCrowd(t, toPort(c.limit, 53))
			if n := w.passing(60000, 53); n != 100 {
				t.Fatalf("%d of 100 sources pass one packet", n)
			}
			w.flood(1, 2048, 53, 0)
			w.now += uint64(90 * time.Second)
			if n := w.passing(60000, 53); n != 0 {
				t.Errorf("%d of 100 sources pass another", n)
			}
		})
	}
}
