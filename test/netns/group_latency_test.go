package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// A latency is how long data took through the gateways of a group.
type latency struct{ flows, connections []time.Duration } // sorted

func (l latency) String() string {
	part := func(list []time.Duration) string {
		return fmt.Sprintf("p50 %v, p99 %v of %d", lab.Percentile(list, 50).Round(time.Microsecond), lab.Percentile(list, 99).Round(time.Microsecond), len(list))
	}
	return fmt.Sprintf("datagrams of established flows %s; new connections %s", part(l.flows), part(l.connections))
}

// measureLatency sends a little through each gateway for a while, less than each may pass alone.
func (g *group) measureLatency(d time.Duration) (l latency) {
	g.t.Helper()
	g.recorder.next(groupPort)
	var group sync.WaitGroup
	var mu sync.Mutex
	for i := range groupSize {
		group.Go(func() {
			tick := time.NewTicker(20 * time.Millisecond)
			defer tick.Stop()
			for end := time.Now().Add(d); time.Now().Before(end); <-tick.C {
				start := time.Now()
				err := g.transfer(g.t.Context(), i, groupSources[0], 1000, func() error { return nil })
				mu.Lock()
				if l.connections = append(l.connections, time.Since(start)); err != nil {
					g.t.Errorf("a connection through %s: %v", g.gateways[i].name, err)
				}
				mu.Unlock()
			}
		})
	}
	group.Wait()
	for _, a := range g.recorder.next(groupPort) {
		if a.Flags == 0 {
			l.flows = append(l.flows, a.At-g.recorder.sent(a))
		}
	}
	slices.Sort(l.flows)
	slices.Sort(l.connections)
	return l
}

// TestGroup_DataNeverWaits makes the store slow, silent, and absent. Neither data of established
// flows nor new connections take longer than when it answers.
func TestGroup_DataNeverWaits(t *testing.T) {
	retryOnStall(t, func() (stallReport, error) {
		stalls := startStallWatch(t)
		g := newGroup(t)
		g.rate = 100 * groupRate // so that nothing waits for the limit
		r := g.useRedis()
		slow := netip.AddrPortFrom(r.at.Addr(), redisPort+1)
		d := r.host.delayCalls(t, slow, r.at)
		g.setStore(fmt.Sprintf("redis://%v", slow))
		g.start(g.all()...)
		time.Sleep(1500 * time.Millisecond) // until all have joined
		before := g.measureLatency(2 * time.Second)
		t.Logf("the store answers: %v", before)
		type figures struct {
			store string
			latency
		}
		var list []figures
		for _, f := range []struct {
			store  string
			inject func()
		}{
			{"needs 1 s for a call", func() { d.delay.Store(int64(time.Second)) }},
			{"does not answer", func() { must(t, r.Signal(unix.SIGSTOP)) }},
			{"is gone", r.kill}, // by now the leases have ended
		} {
			f.inject()
			during := g.measureLatency(2 * time.Second)
			t.Logf("the store %s: %v", f.store, during)
			list = append(list, figures{f.store, during})
		}
		if d.calls.Load() == 0 {
			t.Error("no call was delayed")
		}
		report := stalls.stop()
		var errs []error
		for _, f := range list {
			errs = append(errs,
				noSlower(f.store, "datagrams", before.flows, f.flows, report), noSlower(f.store, "connections", before.connections, f.connections, report))
		}
		return report, errors.Join(errs...)
	})
}

// noSlower compares the 99th percentiles.
func noSlower(store, what string, before, during []time.Duration, report stallReport) error {
	was, is := lab.Percentile(before, 99), lab.Percentile(during, 99)
	if most := 2*was + 10*time.Millisecond + report.longest(); is > most {
		return fmt.Errorf("while the store %s, the p99 of %s is %v; it was %v", store, what, is, was)
	}
	return nil
}
