package bpf

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// newShortTimeouts returns a bench on the kernel's clock, with short timeouts.
func newShortTimeouts(t *testing.T, limits ...shaper.Limit) *tcpBench {
	return newTimeouts(t, shortTimeout, limits...)
}

// newTimeouts is newShortTimeouts with the timeout of connections that are not established.
func newTimeouts(t *testing.T, timeout time.Duration, limits ...shaper.Limit) *tcpBench {
	b := newTCPVariant(t, shaper.AttachPolice, map[string]any{
		kernelVarClosingTimeout:  uint64(timeout),
		kernelVarDeferredTimeout: uint64(timeout),
		kernelVarHalfOpenTimeout: uint64(timeout),
		kernelVarRecheckInterval: uint64(timeout),
		kernelVarSweepInterval:   uint64(2 * time.Millisecond),
	}, uint64(3*timeout), limits...)
	b.now = 0
	return b
}

const shortTimeout = 100 * time.Millisecond

// connLocked is LOCKED of conntrack.h.
const connLocked = 1 << 9

// eventually waits for the given numbers of live and closed connections in the map.
func (b *tcpBench) eventually(live, gone int) {
	b.t.Helper()
	end := time.Now().Add(20 * time.Second)
	for {
		l, g := b.entries()
		if l == live && g == gone {
			return
		}
		if time.Now().After(end) {
			b.t.Fatalf("%d connections, %d closed; want %d and %d", l, g, live, gone)
		}
		time.Sleep(time.Millisecond)
	}
}

// TestExpiry waits until the sweeper expires connections.
func TestExpiry(t *testing.T) {
	t.Parallel()
	b := newShortTimeouts(t, capped(1))
	for _, c := range []struct {
		name  string
		run   func(b *tcpBench, d *dialogue)
		least time.Duration // before its slot is released
	}{
		{"half open", func(b *tcpBench, d *dialogue) { b.open(d) }, shortTimeout},
		{"idle", func(b *tcpBench, d *dialogue) { b.establish(d) }, 3 * shortTimeout},
		{"half closed", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, fin|ack, 0)
		}, 3 * shortTimeout},
		{"the last ACK lost", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, client, fin|ack, 0)
			b.exchange(d, server, fin|ack, 0)
		}, shortTimeout},
		{"reset, maybe", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.reply(d.segment(server, rst, 1, 0, 0))
		}, shortTimeout},
		{"reset", func(b *tcpBench, d *dialogue) {
			b.establish(d)
			b.exchange(d, server, rst, 0)
		}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.t = t
			b.clearMaps()
			start := time.Now()
			c.run(b, dial(testClient))
			for b.counters().InFlight > 0 {
				time.Sleep(time.Millisecond)
			}
			if took := time.Since(start); took < c.least {
				t.Errorf("its slot was released after %v", took)
			}
			b.expectInFlight(0)
			b.eventually(0, 0)
			if got := b.open(dial("10.0.0.1:50000")); got != passed {
				t.Errorf("action %d", int32(got))
			}
		})
	}
}

// TestStartSweeper_RetriesWithoutMemory starts the timer more often than the kernel has memory for it at
// once: it runs in the end each time.
func TestStartSweeper_RetriesWithoutMemory(t *testing.T) {
	b := newShortTimeouts(t, capped(1))
	for range 500 {
		if err := errors.Join(b.Sweepers.Put(uint32(0), kernelSweeper{}), startSweeper(b.ShaperdSweep)); err != nil {
			t.Fatal(err)
		}
	}
	b.open(dial(testClient))
	b.eventually(0, 0)
}

// TestSweep_KeepsLockedEntry lets the sweeper visit a connection that closed long ago, and whose
// entry is being reused: it stays.
func TestSweep_KeepsLockedEntry(t *testing.T) {
	t.Parallel()
	b := newShortTimeouts(t, capped(1))
	d := dial(testClient)
	b.establish(d)
	b.exchange(d, server, rst, 0)
	var tuple kernelTuple
	var f kernelConn
	if err := b.eachConnection(func(t *kernelTuple, found *kernelConn) { tuple, f = *t, *found }); err != nil {
		t.Fatal(err)
	}
	f.State |= connLocked
	f.LastSeen = 0
	b.replace(tuple, &f)
	for visits := 0; visits < 2; time.Sleep(time.Millisecond) {
		check := f.SweepAt
		if err := b.Connections.Lookup(tuple, &f); err != nil {
			t.Fatalf("after %d visits: %v", visits, err)
		}
		if f.SweepAt != check {
			visits++
		}
	}
	f.State &^= connLocked
	b.replace(tuple, &f)
	b.eventually(0, 0)
}

// replace replaces a connection that the sweeper may be visiting: it is in the queue again, and the
// entry that it had is stale.
func (b *tcpBench) replace(tuple kernelTuple, f *kernelConn) {
	b.t.Helper()
	f.SweepAt++
	if err := b.Connections.Put(tuple, f); err != nil {
		b.t.Fatal(err)
	}
	if err := b.SweepQueue.Put(nil, kernelSweepEntry{Tuple: tuple, SweepAt: f.SweepAt}); err != nil {
		b.t.Fatal(err)
	}
}

// TestExpiry_WithoutDaemon closes everything but the maps: connections expire nevertheless.
func TestExpiry_WithoutDaemon(t *testing.T) {
	t.Parallel()
	b := newShortTimeouts(t, capped(1))
	b.establish(dial(testClient))
	if err := b.kernelPrograms.Close(); err != nil {
		t.Fatal(err)
	}
	b.eventually(0, 0)
	b.expectInFlight(0)
}

// TestExpiry_TrafficKeepsConnection keeps a connection busy for longer than its idle
// timeout.
func TestExpiry_TrafficKeepsConnection(t *testing.T) {
	t.Parallel()
	for again := 5; !trafficKeepsConnection(t); again-- {
		if again == 0 {
			t.Fatal("the machine stalled in each attempt")
		}
	}
}

// trafficKeepsConnection reports false if the machine stalled for about the idle timeout.
func trafficKeepsConnection(t *testing.T) bool {
	const timeout = time.Second
	b := newTimeouts(t, timeout, capped(1))
	d := dial(testClient)
	longest, last := time.Duration(0), time.Now()
	b.establish(d)
	for range 30 {
		time.Sleep(timeout / 4)
		b.exchange(d, server, ack, 1)
		longest, last = max(longest, time.Since(last)), time.Now()
	}
	if longest > 2*timeout {
		return false
	}
	b.expectInFlight(1)
	b.eventually(0, 0)
	return true
}

// TestExpiry_SYNFlood sends SYNs from a hundred thousand sources that never complete a handshake:
// they are counted up to the cap, and expire.
func TestExpiry_SYNFlood(t *testing.T) {
	t.Parallel()
	const most, n = 30_000, 100_000
	b := newTCPVariant(t, shaper.AttachPolice, map[string]any{
		kernelVarClosingTimeout: uint64(time.Second), kernelVarHalfOpenTimeout: uint64(4 * time.Second), kernelVarDeferredTimeout: uint64(time.Second), kernelVarRecheckInterval: uint64(time.Second),
		kernelVarSweepInterval: uint64(2 * time.Millisecond), kernelVarTestSources: uint32(1<<32 - 1),
	}, testIdleTimeout, dropSilently(capped(1)), dropSilently(shaper.Limit{Name: "all", MaxConnections: most}))
	stop := b.monitorCounts()
	b.flood(dial(testClient).nextSegment(client, syn, 0), n)
	if seen, looks := stop(); seen > most || looks == 0 {
		t.Errorf("up to %d at once, in %d readings", seen, looks)
	}
	b.eventually(0, 0)
	b.expectInFlight(0)
	s, err := b.readState(1)
	if err != nil || s.ConnsAdmitted[0] < most || s.ConnsOverCap == 0 {
		t.Errorf("%d passed, %d were refused, %v", s.ConnsAdmitted[0], s.ConnsOverCap, err)
	}
	for i := range 10 {
		if got := b.open(dial(fmt.Sprint("10.0.0.1:", 41000+i))); got != passed {
			t.Errorf("action %d", int32(got))
		}
	}
}
