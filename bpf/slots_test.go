package bpf

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"shaperd/shaper"
)

// flood sends a packet from all CPUs at once, n times in all, until done.
func (b *tcpBench) flood(packet []byte, n int) {
	var wg sync.WaitGroup
	cpus := max(runtime.NumCPU(), 2)
	for range cpus {
		wg.Go(func() {
			if _, err := b.ShaperdTc.Run(&ebpf.RunOptions{Data: packet, Repeat: uint32(n / cpus)}); err != nil {
				b.t.Error(err)
			}
		})
	}
	wg.Wait()
}

// watch looks at the counts all the time and returns the largest sum of those with
// one tag, and how often it looked, when stop is called. A count may have moved while it
// looked, so it looks at a sum again.
func (b *tcpBench) watch() (stop func() (most, looks int)) {
	var end atomic.Bool
	var most, looks int
	var done sync.WaitGroup
	count := func(place int) (tag uint64, n int) {
		word := atomic.LoadUint64(&b.slots[place])
		if n = int(word & slotCount); n > slotMost {
			n = 0
		}
		return word >> slotBits, n
	}
	sum := func(of uint64, places []int) (sum int) {
		for _, place := range places {
			if tag, n := count(place); tag == of {
				sum += n
			}
		}
		return sum
	}
	done.Go(func() {
		for !end.Load() {
			places := map[uint64][]int{}
			for i := range b.slots {
				if tag, n := count(i); n > 0 {
					places[tag] = append(places[tag], i)
				}
			}
			for tag, at := range places {
				most = max(most, min(sum(tag, at), sum(tag, at), sum(tag, at)))
			}
			looks++
		}
	})
	return func() (int, int) {
		end.Store(true)
		done.Wait()
		return most, looks
	}
}

// patient makes the programs wait for an answer to a SYN for as long as a test takes.
func patient(variables map[string]any) map[string]any {
	variables[kernelVarUnsettled] = uint64(time.Hour)
	variables[kernelVarHalfOpen] = uint64(time.Hour)
	return variables
}

// TestParallelSYNs opens connections of random sources from all CPUs at once: just as
// many pass as the cap allows, and there are never more.
func TestParallelSYNs(t *testing.T) {
	b := newTCPVariant(t, Police, patient(map[string]any{kernelVarTestSources: uint32(1<<32 - 1)}), testIdle)
	const n = 100_000
	for _, most := range []int{1, 2, 1000, 20_000} {
		t.Run(fmt.Sprint(most), func(t *testing.T) {
			b.t = t
			b.forget()
			b.limit(silently(shaper.Limit{Name: "all", Connections: most}))
			stop := b.watch()
			b.flood(dial("10.0.0.1:40000").say(client, syn, 0), n)
			seen, looks := stop()
			if seen > most || looks == 0 {
				t.Errorf("up to %d were counted at once, in %d looks", seen, looks)
			}
			s := b.counters()
			if s.Connections[0] != uint64(most) || s.OverConnections < n-1000-uint64(most) || s.ConnectionsMemoryFull > 0 {
				t.Errorf("%d passed, %d were refused, %d for lack of room", s.Connections[0], s.OverConnections, s.ConnectionsMemoryFull)
			}
			b.expectInFlight(most)
		})
	}
}

// TestParallelNewcomers has all CPUs take the first slot of a key at the same time:
// one gets it.
func TestParallelNewcomers(t *testing.T) {
	const rounds = 3_000
	b := newTCPVariant(t, Police, patient(map[string]any{}), testIdle, capped(1))
	cpus := max(runtime.NumCPU(), 2)
	var barrier, passes atomic.Int64
	var wg sync.WaitGroup
	for cpu := range cpus {
		wg.Go(func() {
			d := dial("10.0.0.1:40000")
			for round := range rounds {
				d.ends[client] = netip.AddrPortFrom(ipv4(uint32(0x0a000000+round)), uint16(40000+cpu))
				packet := d.segment(client, syn, 1, 0, 0)
				options := &ebpf.RunOptions{Data: packet}
				barrier.Add(1)
				for barrier.Load() < int64((round+1)*cpus) {
					if cpus > runtime.NumCPU() {
						runtime.Gosched()
					}
				}
				action, err := b.ShaperdTc.Run(options)
				if err != nil {
					t.Error(err)
				}
				if action == passed {
					passes.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if n := passes.Load(); n != rounds {
		t.Errorf("%d passed, want one in each of %d rounds", n, rounds)
	}
	b.expectInFlight(rounds)
	for place, word := range b.slots {
		if word&slotCount > 1 {
			t.Errorf("place %d counts %d", place, word&slotCount)
		}
	}
}

// TestParallelChurn opens and resets connections of few keys from all CPUs at once,
// so that words are taken and given up all the time.
func TestParallelChurn(t *testing.T) {
	for _, c := range []struct {
		most  int
		lines uint32 // of the table: in one line all keys meet
	}{{1, 0}, {2, 0}, {1, 1}, {3, 2}} {
		t.Run(fmt.Sprint(c.most, " of ", c.lines), func(t *testing.T) {
			variables := patient(map[string]any{kernelVarTestSources: uint32(4)})
			if c.lines > 0 {
				variables[kernelVarSlotLines] = c.lines
			}
			b := newTCPVariant(t, Police, variables, testIdle, silently(capped(c.most)))
			var done atomic.Bool
			stop := b.watch()
			var wg sync.WaitGroup
			for i := range 2 * c.most {
				// Of two numbers, as one that is the last one's is sent again and counts no more.
				d, other := dial(fmt.Sprint("0.0.0.0:", 40000+i)), dial(fmt.Sprint("0.0.0.0:", 40000+i))
				other.next[client] += 1 << 20
				for _, packet := range [][]byte{
					d.say(client, syn, 0), d.say(client, rst, 0), other.say(client, syn, 0), other.say(client, rst, 0),
				} {
					wg.Go(func() {
						for !done.Load() {
							if _, err := b.ShaperdTc.Run(&ebpf.RunOptions{Data: packet, Repeat: 50}); err != nil {
								t.Error(err)
							}
						}
					})
				}
			}
			enough := func() bool {
				s := b.counters()
				return s.Connections[0] >= 100 && s.OverConnections >= 1000
			}
			for began := time.Now(); time.Since(began) < 400*time.Millisecond || !enough() && time.Since(began) < time.Minute; {
				time.Sleep(20 * time.Millisecond)
			}
			done.Store(true)
			wg.Wait()
			seen, looks := stop()
			s := b.counters()
			t.Logf("%d passed, %d were refused; in %d looks up to %d at once", s.Connections[0], s.OverConnections, looks, seen)
			if seen > c.most || s.Connections[0] < 100 || s.OverConnections < 1000 || s.ConnectionsMemoryFull > s.Connections[0]/1000 {
				t.Errorf("%d for lack of room", s.ConnectionsMemoryFull)
			}
			b.inFlight()
		})
	}
}

// TestNoRoom fills what can be full: a SYN is refused, and nothing of it stays.
func TestNoRoom(t *testing.T) {
	b := newTCP(t, Police, capped(1))
	expect := func() {
		t.Helper()
		before := b.counters().ConnectionsMemoryFull
		action, d, _ := b.send(dial("10.0.0.1:40000").say(client, syn, 0))
		if action != answered || d.Reason != uint32(shaper.MemoryFull) || b.counters().ConnectionsMemoryFull != before+1 {
			t.Errorf("action %d, %+v", int32(action), d)
		}
	}
	t.Run("slots", func(t *testing.T) {
		for i := range b.slots {
			b.slots[i] = uint64(i)<<slotBits | 1
		}
		expect()
		if live, gone := b.entries(); live != 0 || gone != 0 {
			t.Errorf("%d connections, %d gone", live, gone)
		}
	})
	t.Run("connections", func(t *testing.T) {
		b.forget()
		keys := make([]kernelTuple, b.Connections.MaxEntries())
		for i := range keys {
			keys[i].Initiator[0] = uint32(i)
		}
		if _, err := b.Connections.BatchUpdate(keys, make([]kernelFlight, len(keys)), nil); err != nil {
			t.Fatal(err)
		}
		expect()
		for place, word := range b.slots {
			if word&slotCount > 0 {
				t.Errorf("place %d counts %d", place, word&slotCount)
			}
		}
		if err := b.Connections.Delete(&keys[0]); err != nil {
			t.Fatal(err)
		}
		if got := b.open(dial("10.0.0.1:40000")); got != passed {
			t.Errorf("action %d", int32(got))
		}
	})
}

func TestReconcile(t *testing.T) {
	b := newTCP(t, Police, capped(5))
	for i := range 3 {
		b.establish(dial(fmt.Sprint("10.0.0.1:", 40000+i)))
	}
	var place int
	for i, word := range b.slots {
		if word&slotCount > 0 {
			place = i
		}
	}
	leak := func(n uint64) { b.slots[place] += n }
	reconcile := func(want int) {
		t.Helper()
		got, inFlight, err := b.reconcile(b.now)
		if err != nil || got != want || inFlight[0] != 3 {
			t.Errorf("%d repaired, %v in flight, %v; want %d", got, inFlight, err, want)
		}
	}
	reconcile(0)
	leak(2)
	reconcile(0)
	leak(1)
	reconcile(2)
	reconcile(1)
	reconcile(0)
	b.slots[place^1] = 77<<slotBits | (slotMost + 5) // a claim that nobody will follow up
	reconcile(0)
	reconcile(1)
	b.expectInFlight(3)
}

// TestReconcileAmidSweep has connections close while it looks at the counts, by programs
// that looked at the clock before: it takes nothing away.
func TestReconcileAmidSweep(t *testing.T) {
	b := newTCP(t, Police, capped(5))
	d := dial("10.0.0.1:40000")
	b.establish(d)
	counts := slices.Clone(b.slots)
	b.reply(d.segment(server, rst, d.next[server], 0, 0))
	b.expectInFlight(0)
	copy(b.slots, counts) // as it stood a moment before
	for range 3 {
		b.now += uint64(settling / 2)
		if n, _, err := b.reconcile(b.now); n != 0 || err != nil {
			t.Fatalf("%d repaired, %v", n, err)
		}
		b.now -= uint64(settling / 2)
	}
	b.now += uint64(2 * settling)
	for _, want := range []int{0, 1, 0} {
		if n, _, err := b.reconcile(b.now); n != want || err != nil {
			t.Errorf("%d repaired, %v; want %d", n, err, want)
		}
	}
}

// TestReconcileAmidTraffic finds nothing to repair while connections come and go.
func TestReconcileAmidTraffic(t *testing.T) {
	b := newTCPVariant(t, Police, patient(map[string]any{kernelVarTestSources: uint32(300)}), testIdle, silently(capped(3)), silently(shaper.Limit{Name: "all", Connections: 500}))
	var end atomic.Bool
	var wg sync.WaitGroup
	for i := range 4 {
		d := dial(fmt.Sprint("0.0.0.0:", 40000+i))
		for _, packet := range [][]byte{d.say(client, syn, 0), d.say(client, rst, 0)} {
			wg.Go(func() {
				for !end.Load() {
					if _, err := b.ShaperdTc.Run(&ebpf.RunOptions{Data: packet, Repeat: 20}); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	for range 50 {
		if n, _, err := b.reconcile(uint64(monotonic() / 64)); n != 0 || err != nil {
			t.Errorf("%d repaired, %v", n, err)
		}
	}
	end.Store(true)
	wg.Wait()
	b.inFlight()
	if s := b.counters(); s.Connections[0] < 1000 {
		t.Errorf("only %d connections", s.Connections[0])
	}
}
