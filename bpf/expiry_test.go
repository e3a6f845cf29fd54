package bpf

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"shaperd/shaper"
)

// newSoon is a bench by the kernel's clock, with short times.
func newSoon(t *testing.T, limits ...shaper.Limit) *tcpBench {
	b := newTCPVariant(t, Police, map[string]any{
		kernelVarUnsettled:     uint64(soon),
		kernelVarLate:          uint64(soon),
		kernelVarHalfOpen:      uint64(soon),
		kernelVarTurnInterval:  uint64(soon),
		kernelVarSweepInterval: uint64(2 * time.Millisecond),
	}, uint64(3*soon), limits...)
	b.now = 0
	return b
}

const soon = 100 * time.Millisecond

// flightLocked is LOCKED of conns.h.
const flightLocked = 1 << 9

// eventually waits until what is there is so many connections, live and gone.
func (b *tcpBench) eventually(live, gone int) {
	b.t.Helper()
	end := time.Now().Add(20 * time.Second)
	for {
		l, g := b.entries()
		if l == live && g == gone {
			return
		}
		if time.Now().After(end) {
			b.t.Fatalf("%d connections, %d gone; want %d and %d", l, g, live, gone)
		}
		time.Sleep(time.Millisecond)
	}
}

// TestExpiry waits for what the timer does by itself.
func TestExpiry(t *testing.T) {
	for _, c := range []struct {
		name  string
		run   func(b *tcpBench, d *dialogue)
		least time.Duration // before its slot is given back
	}{
		{"half open", func(b *tcpBench, d *dialogue) { b.open(d) }, soon},
		{"idle", func(b *tcpBench, d *dialogue) { b.establish(d) }, 3 * soon},
		{"half closed", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, fin|ack, 0)
		}, 3 * soon},
		{"the last ACK lost", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, fin|ack, 0)
		}, soon},
		{"reset, maybe", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.reply(d.segment(server, rst, 1, 0, 0))
		}, soon},
		{"reset", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, server, rst, 0)
		}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newSoon(t, capped(1))
			start := time.Now()
			c.run(b, dial("10.0.0.1:40000"))
			for b.counters().InFlight > 0 {
				time.Sleep(time.Millisecond)
			}
			if took := time.Since(start); took < c.least {
				t.Errorf("its slot was given back after %v", took)
			}
			b.expectInFlight(0)
			b.eventually(0, 0)
			if got := b.open(dial("10.0.0.1:50000")); got != passed {
				t.Errorf("action %d", int32(got))
			}
		})
	}
}

// TestTimerForWhichThereIsNoMemory starts the timer more often than the kernel has memory for it
// at once: each time it runs in the end.
func TestTimerForWhichThereIsNoMemory(t *testing.T) {
	b := newSoon(t, capped(1))
	for range 500 {
		if err := errors.Join(b.Keepers.Put(uint32(0), kernelKeeper{}), startSweeper(b.ShaperdSweep)); err != nil {
			t.Fatal(err)
		}
	}
	b.open(dial("10.0.0.1:40000"))
	b.eventually(0, 0)
}

// TestSweepLeavesLocked has the timer look at a connection that is closed for long, and in
// whose place another begins just now: it stays.
func TestSweepLeavesLocked(t *testing.T) {
	b := newSoon(t, capped(1))
	d := dial("10.0.0.1:40000")
	b.establish(d)
	b.exchange(d, server, rst, 0)
	var tuple kernelTuple
	var f kernelFlight
	if err := b.eachConnection(func(t *kernelTuple, found *kernelFlight) { tuple, f = *t, *found }); err != nil {
		t.Fatal(err)
	}
	f.Word |= flightLocked
	f.Seen = 0
	if err := b.Connections.Put(tuple, f); err != nil {
		t.Fatal(err)
	}
	for looks := 0; looks < 2; time.Sleep(time.Millisecond) {
		check := f.Check
		if err := b.Connections.Lookup(tuple, &f); err != nil {
			t.Fatalf("after %d looks: %v", looks, err)
		}
		if f.Check != check {
			looks++
		}
	}
	f.Word &^= flightLocked
	if err := b.Connections.Put(tuple, f); err != nil {
		t.Fatal(err)
	}
	b.eventually(0, 0)
}

// TestExpiryWithoutDaemon closes all but the maps: connections end all the same.
func TestExpiryWithoutDaemon(t *testing.T) {
	b := newSoon(t, capped(1))
	b.establish(dial("10.0.0.1:40000"))
	if err := b.kernelPrograms.Close(); err != nil {
		t.Fatal(err)
	}
	b.eventually(0, 0)
	b.expectInFlight(0)
}

// TestTrafficKeepsConnection lets a connection live on for longer than its silence
// may last.
func TestTrafficKeepsConnection(t *testing.T) {
	for again := 5; !trafficKeepsConnection(t); again-- {
		if again == 0 {
			t.Fatal("the machine makes long pauses each time")
		}
	}
}

// trafficKeepsConnection reports whether it did not pause for as long as silence may last.
func trafficKeepsConnection(t *testing.T) bool {
	b := newSoon(t, capped(1))
	d := dial("10.0.0.1:40000")
	longest, last := time.Duration(0), time.Now()
	b.establish(d)
	for range 30 {
		time.Sleep(soon / 4)
		b.exchange(d, server, ack, 1)
		longest, last = max(longest, time.Since(last)), time.Now()
	}
	if longest > 2*soon {
		return false
	}
	b.expectInFlight(1)
	b.eventually(0, 0)
	return true
}

// TestFlood sends SYNs of a hundred thousand sources that never answer: they are
// counted up to the cap, and forgotten.
func TestFlood(t *testing.T) {
	const most, n = 60_000, 100_000
	b := newTCPVariant(t, Police, map[string]any{
		kernelVarUnsettled: uint64(time.Second), kernelVarHalfOpen: uint64(4 * time.Second), kernelVarLate: uint64(time.Second), kernelVarTurnInterval: uint64(time.Second),
		kernelVarSweepInterval: uint64(2 * time.Millisecond), kernelVarTestSources: uint32(1<<32 - 1),
	}, testIdle, silently(capped(1)), silently(shaper.Limit{Name: "all", Connections: most}))
	stop := b.watch()
	b.flood(dial("10.0.0.1:40000").say(client, syn, 0), n)
	if seen, looks := stop(); seen > most || looks == 0 {
		t.Errorf("up to %d at once, in %d looks", seen, looks)
	}
	b.eventually(0, 0)
	b.expectInFlight(0)
	s, err := b.state(1)
	if err != nil || s.Connections[0] < most || s.OverConnections == 0 {
		t.Errorf("%d passed, %d were refused, %v", s.Connections[0], s.OverConnections, err)
	}
	for i := range 10 {
		if got := b.open(dial(fmt.Sprint("10.0.0.1:", 41000+i))); got != passed {
			t.Errorf("action %d", int32(got))
		}
	}
}
