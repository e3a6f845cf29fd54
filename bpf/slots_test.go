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

	"shaperd.dev/shaperd/shaper"
)

// flood runs a packet n times in total, on all CPUs at once.
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

// monitorCounts reads the slot counts continuously. stop returns the largest sum of the counts
// with one tag, and the number of readings. As a count may have moved during a reading, each sum
// is read several times.
func (b *tcpBench) monitorCounts() (stop func() (most, looks int)) {
	var end atomic.Bool
	var most, looks int
	var done sync.WaitGroup
	count := func(index int) (tag uint64, n int) {
		word := atomic.LoadUint64(&b.slots[index])
		if n = int(word & slotCount); n > slotMax {
			n = 0
		}
		return word >> slotBits, n
	}
	sum := func(of uint64, indexes []int) (sum int) {
		for _, index := range indexes {
			if tag, n := count(index); tag == of {
				sum += n
			}
		}
		return sum
	}
	done.Go(func() {
		for !end.Load() {
			indexes := map[uint64][]int{}
			for i := range b.slots {
				if tag, n := count(i); n > 0 {
					indexes[tag] = append(indexes[tag], i)
				}
			}
			for tag, at := range indexes {
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

// longTimeouts makes the programs keep handshakes for as long as a test takes.
func longTimeouts(variables map[string]any) map[string]any {
	variables[kernelVarClosingTimeout] = uint64(time.Hour)
	variables[kernelVarHalfOpenTimeout] = uint64(time.Hour)
	return variables
}

// TestCap_ConcurrentSYNs opens connections of random sources on all CPUs at once: exactly as
// many pass as the cap allows, and it is never exceeded.
func TestCap_ConcurrentSYNs(t *testing.T) {
	b := newTCPVariant(t, shaper.AttachPolice, longTimeouts(map[string]any{kernelVarTestSources: uint32(1<<32 - 1)}), testIdleTimeout)
	const n = 100_000
	for _, most := range []int{1, 2, 1000, 20_000} {
		t.Run(fmt.Sprint(most), func(t *testing.T) {
			b.t = t
			b.clearMaps()
			b.setLimits(dropSilently(shaper.Limit{Name: "all", MaxConnections: most}))
			stop := b.monitorCounts()
			b.flood(dial(testClient).nextSegment(client, syn, 0), n)
			seen, looks := stop()
			if seen > most || looks == 0 {
				t.Errorf("up to %d were counted at once, in %d readings", seen, looks)
			}
			s := b.counters()
			if s.ConnsAdmitted[0] != uint64(most) || s.ConnsOverCap < n-1000-uint64(most) || s.ConnsMemoryFull > 0 {
				t.Errorf("%d passed, %d were refused, %d as the table was full", s.ConnsAdmitted[0], s.ConnsOverCap, s.ConnsMemoryFull)
			}
			b.expectInFlight(most)
		})
	}
}

// TestCap_ConcurrentFirstSlot takes the first slot of a key on all CPUs at the same time: one
// gets it.
func TestCap_ConcurrentFirstSlot(t *testing.T) {
	const rounds = 3_000
	b := newTCPVariant(t, shaper.AttachPolice, longTimeouts(map[string]any{}), testIdleTimeout, capped(1))
	cpus := max(runtime.NumCPU(), 2)
	var barrier, passes atomic.Int64
	var wg sync.WaitGroup
	for cpu := range cpus {
		wg.Go(func() {
			d := dial(testClient)
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
	for index, word := range b.slots {
		if word&slotCount > 1 {
			t.Errorf("slot word %d counts %d", index, word&slotCount)
		}
	}
}

// TestCap_ConcurrentChurn opens and resets connections of few keys on all CPUs at once, so that
// slot words are taken and released all the time.
func TestCap_ConcurrentChurn(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		most  int
		lines uint32 // of the table; in a single line all keys collide
	}{{1, 0}, {2, 0}, {1, 1}, {3, 2}} {
		t.Run(fmt.Sprint(c.most, " of ", c.lines), func(t *testing.T) {
			variables := longTimeouts(map[string]any{kernelVarTestSources: uint32(4)})
			if c.lines > 0 {
				variables[kernelVarSlotLines] = c.lines
			}
			b := newTCPVariant(t, shaper.AttachPolice, variables, testIdleTimeout, dropSilently(capped(c.most)))
			var done atomic.Bool
			stop := b.monitorCounts()
			var wg sync.WaitGroup
			for i := range 2 * c.most {
				// Two sequence numbers, as a repeated one is a retransmission and is not counted again.
				d, other := dial(fmt.Sprint("0.0.0.0:", 40000+i)), dial(fmt.Sprint("0.0.0.0:", 40000+i))
				other.next[client] += 1 << 20
				for _, packet := range [][]byte{
					d.nextSegment(client, syn, 0), d.nextSegment(client, rst, 0), other.nextSegment(client, syn, 0), other.nextSegment(client, rst, 0),
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
				return s.ConnsAdmitted[0] >= 100 && s.ConnsOverCap >= 1000
			}
			for began := time.Now(); time.Since(began) < 400*time.Millisecond || !enough() && time.Since(began) < time.Minute; {
				time.Sleep(20 * time.Millisecond)
			}
			done.Store(true)
			wg.Wait()
			seen, looks := stop()
			s := b.counters()
			t.Logf("%d passed, %d were refused; in %d readings up to %d at once", s.ConnsAdmitted[0], s.ConnsOverCap, looks, seen)
			if seen > c.most || s.ConnsAdmitted[0] < 100 || s.ConnsOverCap < 1000 || s.ConnsMemoryFull > s.ConnsAdmitted[0]/1000 {
				t.Errorf("%d as the table was full", s.ConnsMemoryFull)
			}
			b.inFlight()
		})
	}
}

// TestSYN_TablesFull fills each table: a SYN is refused, and leaves no state.
func TestSYN_TablesFull(t *testing.T) {
	t.Parallel()
	b := newTCP(t, shaper.AttachPolice, capped(1))
	expect := func() {
		t.Helper()
		before := b.counters().ConnsMemoryFull
		action, d, _ := b.send(dial(testClient).nextSegment(client, syn, 0))
		if action != answered || d.Reason != uint32(shaper.MemoryFull) || b.counters().ConnsMemoryFull != before+1 {
			t.Errorf("action %d, %+v", int32(action), d)
		}
	}
	t.Run("slots", func(t *testing.T) {
		for i := range b.slots {
			b.slots[i] = uint64(i)<<slotBits | 1
		}
		expect()
		if live, gone := b.entries(); live != 0 || gone != 0 {
			t.Errorf("%d connections, %d closed", live, gone)
		}
	})
	t.Run("connections", func(t *testing.T) {
		b.clearMaps()
		keys := make([]kernelTuple, b.Connections.MaxEntries())
		for i := range keys {
			keys[i].Initiator[0] = uint32(i)
		}
		if _, err := b.Connections.BatchUpdate(keys, make([]kernelConn, len(keys)), nil); err != nil {
			t.Fatal(err)
		}
		expect()
		for index, word := range b.slots {
			if word&slotCount > 0 {
				t.Errorf("slot word %d counts %d", index, word&slotCount)
			}
		}
		if err := b.Connections.Delete(&keys[0]); err != nil {
			t.Fatal(err)
		}
		if got := b.open(dial(testClient)); got != passed {
			t.Errorf("action %d", int32(got))
		}
	})
}

func TestReconcile(t *testing.T) {
	t.Parallel()
	b := newTCP(t, shaper.AttachPolice, capped(5))
	for i := range 3 {
		b.establish(dial(fmt.Sprint("10.0.0.1:", 40000+i)))
	}
	var index int
	for i, word := range b.slots {
		if word&slotCount > 0 {
			index = i
		}
	}
	leak := func(n uint64) { b.slots[index] += n }
	reconcile := func(want int) {
		t.Helper()
		if got, err := b.reconcile(b.now); err != nil || got != want {
			t.Errorf("%d repaired, %v; want %d", got, err, want)
		}
	}
	reconcile(0)
	leak(2)
	reconcile(0)
	leak(1)
	reconcile(2)
	reconcile(1)
	reconcile(0)
	b.slots[index^1] = 77<<slotBits | (slotMax + 5) // an abandoned claim
	reconcile(0)
	reconcile(1)
	b.expectInFlight(3)
}

// TestReconcile_ConcurrentClose closes connections during reconcile, by programs that read the clock
// before: nothing is repaired.
func TestReconcile_ConcurrentClose(t *testing.T) {
	b := newTCP(t, shaper.AttachPolice, capped(5))
	d := dial(testClient)
	b.establish(d)
	counts := slices.Clone(b.slots)
	b.reply(d.segment(server, rst, d.next[server], 0, 0))
	b.expectInFlight(0)
	copy(b.slots, counts) // as a moment before
	for range 3 {
		b.now += uint64(settlingTime / 2)
		if n, err := b.reconcile(b.now); n != 0 || err != nil {
			t.Fatalf("%d repaired, %v", n, err)
		}
		b.now -= uint64(settlingTime / 2)
	}
	b.now += uint64(2 * settlingTime)
	for _, want := range []int{0, 1, 0} {
		if n, err := b.reconcile(b.now); n != want || err != nil {
			t.Errorf("%d repaired, %v; want %d", n, err, want)
		}
	}
}

// TestReconcile_ConcurrentTraffic finds nothing to repair while connections begin and end.
func TestReconcile_ConcurrentTraffic(t *testing.T) {
	t.Parallel()
	b := newTCPVariant(t, shaper.AttachPolice, longTimeouts(map[string]any{kernelVarTestSources: uint32(300)}), testIdleTimeout, dropSilently(capped(3)), dropSilently(shaper.Limit{Name: "all", MaxConnections: 500}))
	var end atomic.Bool
	var wg sync.WaitGroup
	for i := range 4 {
		d := dial(fmt.Sprint("0.0.0.0:", 40000+i))
		for _, packet := range [][]byte{d.nextSegment(client, syn, 0), d.nextSegment(client, rst, 0)} {
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
		if n, err := b.reconcile(uint64(monotonic() / 64)); n != 0 || err != nil {
			t.Errorf("%d repaired, %v", n, err)
		}
	}
	end.Store(true)
	wg.Wait()
	b.inFlight()
	if s := b.counters(); s.ConnsAdmitted[0] < 1000 {
		t.Errorf("only %d connections", s.ConnsAdmitted[0])
	}
}
