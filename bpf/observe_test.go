package bpf

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/shaper"
)

// TestObserve_RefusalOfEnforcedLimit lets an observing limit refuse a SYN that another limit drops: it is
// dropped and counted as without the first.
func TestObserve_RefusalOfEnforcedLimit(t *testing.T) {
	t.Parallel()
	b := newTCP(t, shaper.AttachPolice,
		shaper.Limit{Name: "rate", Packets: shaper.Frequency{N: 1, Per: time.Hour}},
		shaper.Limit{Name: "seen", Observe: true, NewConnections: shaper.Frequency{N: 1, Per: time.Hour}})
	b.open(dial(testClient))
	action, _, _ := b.send(dial("10.0.0.1:40001").nextSegment(client, syn, 0))
	if s := b.counters(); action != dropped || s.Refused[1] != 1 || s.ConnsMemoryFull != 0 {
		t.Errorf("action %d; %d refused, %d for lack of memory", int32(action), s.Refused[1], s.ConnsMemoryFull)
	}
}

// TestObserve_CountsLikeShape compares the counters of an attachment that observes with those of one
// that shapes, next to a limit that observes.
func TestObserve_CountsLikeShape(t *testing.T) {
	t.Parallel()
	var got [2]kernelCounters
	for i, mode := range []shaper.AttachMode{shaper.AttachShape, shaper.AttachObserve} {
		t.Run(mode.String(), func(t *testing.T) {
			b := newTCP(t, mode,
				shaper.Limit{Name: "rate", Packets: shaper.Frequency{N: 1000, Per: time.Second}, MaxDelay: time.Second},
				shaper.Limit{Name: "seen", Observe: true, Packets: shaper.Frequency{N: 1, Per: time.Hour}})
			for range 10 {
				b.run(t, &sample{data: datagram(1)}, b.now, (*bench).tc)
			}
			got[i] = b.counters()
		})
	}
	if got[0].Admitted != got[1].Admitted || got[0].Admitted[1][1] != 9 {
		t.Errorf("shape counts %v, observe %v", got[0].Admitted, got[1].Admitted)
	}
}

// TestCounters_Monotonic reads counters while SYNs are refused: none ever decreases, which
// monitoring would take for a restart.
func TestCounters_Monotonic(t *testing.T) {
	t.Parallel()
	b := newTCPVariant(t, shaper.AttachPolice, nil, testIdleTimeout,
		shaper.Limit{Name: "rate", Packets: shaper.Frequency{N: 1e9, Per: time.Second}, MaxDelay: time.Second},
		dropSilently(shaper.Limit{Name: "new", NewConnections: shaper.Frequency{N: 1, Per: time.Hour}}))
	b.open(dial(testClient))
	var end atomic.Bool
	var sending sync.WaitGroup
	sending.Go(func() {
		syn := dial("10.0.0.1:40001").nextSegment(client, syn, 0)
		for !end.Load() {
			if _, err := b.ShaperdTc.Run(&ebpf.RunOptions{Data: syn, Repeat: 10_000}); err != nil {
				t.Error(err)
			}
		}
	})
	var last uint64
	fell, reads := 0, 0
	for began := time.Now(); time.Since(began) < time.Second || reads < 100 && time.Since(began) < time.Minute; reads++ {
		s := b.counters()
		n := s.Admitted[0][1] + s.Admitted[1][1]
		if n < last {
			fell++
		}
		last = n
	}
	end.Store(true)
	sending.Wait()
	if fell > 0 || reads < 100 {
		t.Errorf("%d of %d readings were below the one before", fell, reads)
	}
}

// TestFirstConnections_Concurrent opens the first two connections on several CPUs at once.
func TestFirstConnections_Concurrent(t *testing.T) {
	t.Parallel()
	var refused atomic.Int32
	for range 5 {
		b := newTCPVariant(t, shaper.AttachPolice, nil, testIdleTimeout, capped(1000))
		var ready, done sync.WaitGroup
		ready.Add(2)
		for _, client := range []string{"10.0.0.1:40000", "10.0.0.1:40001"} {
			packet := dial(client).nextSegment(0, syn, 0)
			done.Go(func() {
				ready.Done()
				ready.Wait()
				if action, err := b.ShaperdTc.Run(&ebpf.RunOptions{Data: packet}); err != nil || action != tcNext {
					refused.Add(1)
				}
			})
		}
		done.Wait()
		b.kernel.close()
	}
	if n := refused.Load(); n > 0 {
		t.Errorf("%d were refused under a cap of 1,000", n)
	}
}
