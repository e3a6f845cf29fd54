package bpf

import (
	"encoding/binary"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// smallTable is a bench with a table that is too small for the sources of a flood.
type smallTable struct {
	*bench
	t   *testing.T
	now uint64
}

func newSmallTable(t *testing.T, limits ...shaper.Limit) *smallTable {
	c := &smallTable{bench: newSized(t, 256, kernelConfig{Mode: programModes[shaper.AttachPolice], Ethernet: 1, Keep: 1}, map[string]any{kernelVarUnderTest: uint32(1)}), t: t, now: uint64(10 * time.Hour)}
	c.loadLimits(t, attachHere(limits...), nil)
	return c
}

// passes sends a packet of a source to a port, and reports whether it passes.
func (c *smallTable) passes(source, port uint16) bool {
	c.t.Helper()
	p := datagram(0)
	binary.BigEndian.PutUint16(p[28:], source)
	binary.BigEndian.PutUint16(p[36:], port)
	action, _, _ := c.run(c.t, &sample{data: p}, c.now, (*bench).tc)
	return action == tcNext
}

// countPassing returns how many of a hundred sources pass a packet to a port.
func (c *smallTable) countPassing(first, port uint16) (n int) {
	c.t.Helper()
	for i := range uint16(100) {
		if c.passes(first+i, port) {
			n++
		}
	}
	return n
}

// flood sends one packet from each of n new sources to a port, and fills the table with their
// backlogs.
func (c *smallTable) flood(first, n, port uint16, every time.Duration) {
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
	if after.EvictedBacklogged == before.EvictedBacklogged {
		c.t.Fatal("the table had room for all")
	}
}

func toPort(l shaper.Limit, port uint16) shaper.Limit {
	l.Match.Port = []shaper.PortRange{{First: port, Last: port}}
	return l
}

// TestEviction_NoBacklogAcrossLimits floods the table under a limit whose units take half an hour: keys
// of another limit never inherit that backlog.
func TestEviction_NoBacklogAcrossLimits(t *testing.T) {
	c := newSmallTable(t,
		toPort(shaper.Limit{Name: "slow", Key: shaper.KeySource, Packets: shaper.Frequency{N: 2, Per: time.Hour}}, 53),
		toPort(shaper.Limit{Name: "fast", Key: shaper.KeySource, Rate: 10e6, MaxDelay: 200 * time.Millisecond}, 443))
	for _, round := range []struct {
		name        string
		known, next uint16 // first sources
	}{{"before", 40000, 40000}, {"after", 40000, 50000}, {"ten minutes later", 50000, 60000}} {
		for _, first := range []uint16{round.known, round.next} {
			c.now += uint64(time.Second)
			if n := c.countPassing(first, 443); n != 100 {
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

// TestEviction_SingleBucketLimit floods the table next to a limit with a single bucket, which keeps
// its slot even when it has drained.
func TestEviction_SingleBucketLimit(t *testing.T) {
	c := newSmallTable(t,
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
	for c.passes(60000, 443) { // the limit is enforced
		if c.now++; c.now > uint64(11*time.Hour) {
			t.Fatal("nothing is refused")
		}
	}
}

// TestEviction_KeepsBacklog evicts sources with a backlog of half an hour by a flood: none of them
// passes sooner for that.
func TestEviction_KeepsBacklog(t *testing.T) {
	t.Parallel()
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
			w := newSmallTable(t, toPort(c.limit, 53))
			if n := w.countPassing(60000, 53); n != 100 {
				t.Fatalf("%d of 100 sources pass one packet", n)
			}
			w.flood(1, 2048, 53, 0)
			w.now += uint64(90 * time.Second)
			if n := w.countPassing(60000, 53); n != 0 {
				t.Errorf("%d of 100 sources pass another", n)
			}
		})
	}
}

// share lets a table's host have the whole of shared limits, the first of which has a burst of packets, one
// a second.
func (c *smallTable) share(burst uint64) {
	clear(c.buckets)
	clear(c.floors)
	boot := uint64(leaky.FromDuration(10 * time.Hour))
	rate := leaky.NewRate(1, time.Second)
	meters := map[uint64]sharedMeter{meterNumber(0, int(meterPackets)): {
		burst: uint64(rate.Cost(burst)), inheritable: uint64(rate.Cost(burst + 1)),
	}}
	c.kernel.setShares(&shareChange{lease: kernelLease{End: boot + 1<<57, AloneAt: boot + 1<<57, Cold: kernelShare{Parts: shaper.Whole}}, meters: meters}, leaky.Time(boot), boot)
	c.now += uint64(time.Hour)
}

// TestEviction_NewKeysOfSharedLimit fills the table with buckets of a shared limit and lets them drain: new
// keys have their burst, as without sharing.
func TestEviction_NewKeysOfSharedLimit(t *testing.T) {
	for _, shared := range []bool{false, true} {
		c := newSmallTable(t, shaper.Limit{Name: "burst", Key: shaper.KeySource, Packets: perSecond(1), BurstPackets: 9, Shared: shared})
		c.share(9)
		for i := range uint16(3000) {
			c.now += uint64(time.Millisecond)
			c.passes(1000+i, 53)
		}
		c.now += uint64(time.Hour)
		passed := 0
		for i := range uint16(100) {
			for range 12 {
				if c.passes(30000+i, 53) {
					passed++
				}
			}
		}
		if passed != 1000 {
			t.Errorf("shared = %v: of a hundred new sources with a burst of 10 %d packets pass", shared, passed)
		}
	}
}

// TestEviction_KeepsUsedBurst evicts the bucket of a source again and again, by a flood under another
// limit: it gets no fresh burst.
func TestEviction_KeepsUsedBurst(t *testing.T) {
	t.Parallel()
	for _, shared := range []bool{false, true} {
		c := newSmallTable(t,
			toPort(shaper.Limit{Name: "burst", Key: shaper.KeySource, Packets: perSecond(1), BurstPackets: 99, Shared: shared}, 53),
			toPort(shaper.Limit{Name: "fast", Key: shaper.KeySource, Packets: perSecond(10), MaxDelay: time.Second}, 443))
		c.share(99)
		passed := 0
		for round := range uint16(20) {
			for range 99 { // its burst, so that the next packet may leave at once
				if c.passes(7, 53) {
					passed++
				}
			}
			for i := range uint16(3000) {
				c.passes(1000+round%2*3000+i, 443)
			}
			c.now += uint64(3 * time.Second)
		}
		if passed < 99 || passed > 160 {
			t.Errorf("shared = %v: %d packets pass within a minute, of one a second with a burst of 100", shared, passed)
		}
	}
}
