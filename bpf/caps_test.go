package bpf

import (
	"fmt"
	"testing"
	"time"

	"shaperd.dev/shaperd/shaper"
)

func TestCap_PerKey(t *testing.T) {
	t.Parallel()
	all := shaper.Limit{Name: "all", MaxConnections: 5}
	b := newTCP(t, shaper.AttachPolice, capped(3), all)
	var open []*dialogue
	for i, want := range []uint32{passed, passed, passed, answered, answered} {
		d := dial(fmt.Sprint("10.0.0.1:", 40000+i))
		if got := b.open(d); got != want {
			t.Errorf("connection %d met action %d, want %d", i, int32(got), int32(want))
		}
		open = append(open, d)
	}
	b.expectInFlight(6)
	for i, want := range []uint32{passed, passed, answered} {
		if got := b.open(dial(fmt.Sprint("10.0.0.2:", 40000+i))); got != want {
			t.Errorf("connection %d of the second source met action %d, want %d", i, int32(got), int32(want))
		}
	}
	b.expectInFlight(10)
	if action, d, _ := b.send(dial("10.0.0.3:40000").nextSegment(client, syn, 0)); action != answered || d.Reason != uint32(shaper.ByConnections) || d.Verdict != uint32(shaper.Refuse) || d.Limit != 1 {
		t.Errorf("action %d, %+v", int32(action), d)
	}
	b.exchange(open[0], client, rst, 0)
	b.expectInFlight(8)
	if got := b.open(dial("10.0.0.3:40001")); got != passed {
		t.Errorf("action %d", int32(got))
	}
}

func TestSilentRefusal(t *testing.T) {
	t.Parallel()
	l := capped(1)
	l.RefuseWith = shaper.RefuseDrop
	b := newTCP(t, shaper.AttachPolice, l)
	b.establish(dial(testClient))
	if got := b.open(dial("10.0.0.1:40001")); got != dropped {
		t.Errorf("action %d", int32(got))
	}
}

// TestRefusal_LeavesNoState refuses SYNs for each reason: none leaves a slot, an entry or a
// charge.
func TestRefusal_LeavesNoState(t *testing.T) {
	t.Parallel()
	b := newTCP(t, shaper.AttachPolice)
	hourly := shaper.Frequency{N: 1, Per: time.Hour}
	for _, c := range []struct {
		name   string
		limits []shaper.Limit
		reason shaper.Reason
	}{
		{"rate", []shaper.Limit{{Name: "p", Packets: hourly}, {Name: "c", MaxConnections: 10, NewConnections: shaper.Frequency{N: 1e6, Per: time.Second}}}, shaper.QueueFull},
		{"connections", []shaper.Limit{{Name: "c", MaxConnections: 1}, {Name: "p", Packets: shaper.Frequency{N: 1000, Per: time.Second}, MaxDelay: time.Hour}, {Name: "n", NewConnections: shaper.Frequency{N: 1000, Per: time.Second}, QueueTimeout: time.Hour}}, shaper.ByConnections},
		{"new connections", []shaper.Limit{{Name: "n", NewConnections: hourly}, {Name: "c", MaxConnections: 10}, {Name: "p", Packets: shaper.Frequency{N: 1000, Per: time.Second}, MaxDelay: time.Hour}}, shaper.ByNewConnections},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.t = t
			b.clearMaps()
			b.setLimits(c.limits...)
			if action := b.open(dial(testClient)); action != passed {
				t.Fatalf("the first met action %d", int32(action))
			}
			flying := b.inFlight()
			before := fmt.Sprint(b.drainTimes())
			for i := range 20 {
				action, d, _ := b.send(dial(fmt.Sprint("10.0.0.1:", 40001+i)).nextSegment(client, syn, 0))
				if want := map[bool]uint32{true: dropped, false: answered}[c.reason == shaper.QueueFull]; action != want || d.Reason != uint32(c.reason) {
					t.Errorf("SYN %d: action %d, want %d; %+v", i, int32(action), int32(want), d)
				}
			}
			b.expectInFlight(flying)
			if after := fmt.Sprint(b.drainTimes()); after != before {
				t.Errorf("buckets were charged:\n%s\n%s", before, after)
			}
			if live, gone := b.entries(); live != 1 || gone != 0 {
				t.Errorf("%d connections, %d closed", live, gone)
			}
		})
	}
}

// drainTimes returns the drain times of non-empty buckets by tag.
func (b *bench) drainTimes() map[uint64]uint64 {
	all := map[uint64]uint64{}
	for i := range b.buckets {
		for j, tag := range b.buckets[i].Tag {
			if until := b.buckets[i].DrainedAt[j]; until > 0 {
				all[tag] = until
			}
		}
	}
	return all
}

func TestNewConnectionsWait(t *testing.T) {
	t.Parallel()
	paced := shaper.Limit{Name: "n", NewConnections: shaper.Frequency{N: 10, Per: time.Second}, QueueTimeout: time.Second}
	const step = uint64(100 * time.Millisecond)
	for _, mode := range []shaper.AttachMode{shaper.AttachShape, shaper.AttachPolice} {
		t.Run(mode.String(), func(t *testing.T) {
			b := newTCP(t, mode, paced)
			for i := range uint64(12) {
				packet := dial(fmt.Sprint("10.0.0.1:", 40000+i)).nextSegment(client, syn, 0)
				action, d, stamp := b.send(packet)
				if i == 11 {
					if action != answered || d.Reason != uint32(shaper.ByNewConnections) {
						t.Errorf("SYN %d: action %d, %+v", i, int32(action), d)
					}
					break
				}
				want := b.now + i*step
				if action != passed || (d.Depart+63)/64 != want {
					t.Errorf("SYN %d: action %d, departs at %d, want %d", i, int32(action), (d.Depart+63)/64, want)
				}
				// A retransmission does not overtake the waiting SYN.
				_, _, again := b.send(packet)
				if mode == shaper.AttachShape && (stamp != want || again != want) || mode == shaper.AttachPolice && (stamp != 0 || again != 0) {
					t.Errorf("SYN %d: stamps %d and %d, want %d", i, stamp, again, want)
				}
			}
			want := [2]uint64{1, 10}
			if mode == shaper.AttachPolice {
				want = [2]uint64{11, 0} // nothing is delayed
			}
			if s := b.counters(); s.ConnsAdmitted != want || s.ConnsOverRate != 1 {
				t.Errorf("admitted at once and later: %v, want %v; refused %d", s.ConnsAdmitted, want, s.ConnsOverRate)
			}
		})
	}
}

func TestWaitingSYNDoesNotExpire(t *testing.T) {
	t.Parallel()
	b := newTCP(t, shaper.AttachShape, shaper.Limit{Name: "n", NewConnections: shaper.Frequency{N: 1, Per: 30 * time.Second}, QueueTimeout: time.Minute}, capped(5))
	b.open(dial(testClient))
	d := dial("10.0.0.1:40001")
	b.open(d)
	b.now += uint64(30*time.Second) + testHalfOpenTimeout - 1
	b.exchange(d, server, syn|ack, 0)
	b.exchange(d, client, ack, 0)
	b.now += testIdleTimeout - 1
	b.exchange(d, client, ack, 1)
	b.exchange(dial(testClient), client, ack, 0) // lets the programs notice that it has expired
	b.expectInFlight(1)
}

func TestCapAcrossReload(t *testing.T) {
	t.Parallel()
	b := newTCP(t, shaper.AttachPolice, capped(2))
	first, second := dial(testClient), dial("10.0.0.1:40001")
	b.establish(first)
	b.establish(second)
	next := 50000
	try := func(want uint32) {
		t.Helper()
		next++
		if got := b.open(dial(fmt.Sprint("10.0.0.1:", next))); got != want {
			t.Errorf("action %d, want %d", int32(got), int32(want))
		}
	}
	try(answered)
	b.setLimits(capped(3))
	try(passed) // 3
	try(answered)
	b.setLimits(capped(1))
	try(answered)
	b.exchange(first, client, rst, 0)
	try(answered)
	b.expectInFlight(2)
	b.setLimits(capped(3), shaper.Limit{Name: "another", MaxConnections: 1})
	try(passed) // 3, and 1 under the other limit
	b.expectInFlight(4)
	try(answered)
	b.setLimits() // no limit counts connections
	try(passed)
	b.setLimits(capped(3))
	b.exchange(second, client, rst, 0)
	b.expectInFlight(3)
	try(passed)
	try(answered)
}

func TestAdoption_AboveCap(t *testing.T) {
	t.Parallel()
	b := newTCP(t, shaper.AttachPolice, capped(2))
	var there []*dialogue
	for i := range 5 {
		d := dial(fmt.Sprint("10.0.0.1:", 40000+i))
		b.exchange(d, server, ack, 1)
		b.exchange(d, client, ack, 1)
		there = append(there, d)
	}
	b.expectInFlight(5)
	for i, d := range there {
		want := uint32(answered)
		if i >= 4 {
			want = passed
		}
		if got := b.open(dial(fmt.Sprint("10.0.0.1:", 50000+i))); got != want {
			t.Errorf("with %d there, a SYN met action %d, want %d", 5-i, int32(got), int32(want))
		}
		b.exchange(d, server, rst, 0)
	}
	b.expectInFlight(1)
}

func TestObserve_Cap(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		mode   shaper.AttachMode
		limits []shaper.Limit
	}{
		{"mode", shaper.AttachObserve, []shaper.Limit{{Name: "c", MaxConnections: 2}}},
		{"limit", shaper.AttachPolice, []shaper.Limit{{Name: "c", MaxConnections: 2, Observe: true}}},
		{"next to another", shaper.AttachPolice, []shaper.Limit{{Name: "c", MaxConnections: 2, Observe: true}, {Name: "d", MaxConnections: 100}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newTCP(t, c.mode, c.limits...)
			for i := range 6 {
				if got := b.open(dial(fmt.Sprint("10.0.0.1:", 40000+i))); got != passed {
					t.Errorf("action %d", int32(got))
				}
			}
			b.expectInFlight(6 * len(c.limits))
			if s := b.counters(); s.ConnsOverCap != 4 || s.ConnsAdmitted[0] != 2 {
				t.Errorf("%d would have been refused, %v admitted", s.ConnsOverCap, s.ConnsAdmitted)
			}
			b.exchange(dial(testClient), client, rst, 0)
		})
	}
}

// A limit that observes holds no slot for a connection that another limit refuses.
func TestObserve_NoSlotOfRefusedConnection(t *testing.T) {
	t.Parallel()
	b := newTCP(t, shaper.AttachPolice, shaper.Limit{Name: "seen", MaxConnections: 1, Observe: true}, shaper.Limit{Name: "held", MaxConnections: 1})
	for i := range 5 {
		want := uint32(answered)
		if i == 0 {
			want = passed
		}
		if got := b.open(dial(fmt.Sprint("10.0.0.1:", 40000+i))); got != want {
			t.Errorf("action %d, want %d", int32(got), int32(want))
		}
	}
	b.expectInFlight(2)
}
