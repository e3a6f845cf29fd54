package bpf

import (
	"fmt"
	"time"

	"shaperd.dev/shaperd/leaky"
)

// Intervals of the plane's periodic work.
const (
	sampleInterval    = 200 * time.Millisecond
	heartbeatInterval = time.Second
	countInterval     = time.Second
	checkInterval     = 2 * time.Second
	reconcileInterval = 10 * time.Second
)

// runEvery calls do at intervals until the plane closes.
func (p *Plane) runEvery(interval time.Duration, do func()) { p.runEveryOr(interval, do, nil, nil) }

// runEveryOr calls do at intervals and onEvent on each event, until the plane closes.
func (p *Plane) runEveryOr(interval time.Duration, do func(), event <-chan struct{}, onEvent func()) {
	p.done.Go(func() {
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for {
			select {
			case <-p.quit:
				return
			case <-tick.C:
				do()
			case <-event:
				onEvent()
			}
		}
	})
}

// sleep waits for d and reports whether the plane is still open.
func (p *Plane) sleep(d time.Duration) bool {
	select {
	case <-p.quit:
		return false
	case <-time.After(d):
		return true
	}
}

// startHeartbeat starts to tell the programs that a daemon runs. A heartbeat never waits for a
// lock: on a loaded machine the verifier takes longer than the programs wait for a heartbeat.
func (p *Plane) startHeartbeat() error {
	if err := p.kernel.heartbeat(); err != nil {
		return fmt.Errorf("heartbeat: %w", err)
	}
	p.heartbeatOnce.Do(func() {
		failed := false
		p.runEvery(heartbeatInterval, func() {
			err := p.kernel.heartbeat()
			if err == nil && !failed {
				return
			}
			failed = err != nil
			p.mu.Lock()
			defer p.mu.Unlock()
			p.report("heartbeat", err)
		})
	})
	return nil
}

// startMonitoring starts the periodic checks of attachments, counters and samples.
func (p *Plane) startMonitoring() {
	p.checkCapacity() // overflows from before this daemon started raise no alarm
	every := func(interval time.Duration, do func()) {
		p.runEvery(interval, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			do()
		})
	}
	every(countInterval, func() {
		p.report("counters", p.syncCounters())
		p.kernel.freeMonitors(p.policy, p.numbers, false)
	})
	every(sampleInterval, func() { p.report("samples", p.updateRankings()) })
	every(reconcileInterval, func() {
		repaired, err := p.kernel.reconcile(uint64(monotonic() / leaky.FromDuration(1)))
		p.report("connections", err)
		if repaired > 0 {
			p.log.Warn("connection counts repaired", "slots", repaired)
		}
	})
	every(checkInterval, p.checkCapacity)
	every(checkInterval, func() { p.report("cgroups", p.kernel.followCgroups(p.numbers)) })
	p.watchInterfaces()
}
