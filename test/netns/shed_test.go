package netns

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// openLoop makes so many requests a second for the time d, however few are answered. It returns how many were made, and how
// many were answered.
func (h *host) openLoop(from netip.Addr, to netip.AddrPort, rate float64, d time.Duration) (made, answered int) {
	var group sync.WaitGroup
	var good atomic.Int64
	start := time.Now()
	for at := start; at.Before(start.Add(d)); at = start.Add(time.Duration(float64(made) / rate * float64(time.Second))) {
		time.Sleep(time.Until(at))
		made++
		group.Go(func() {
			if _, err := h.request(from, to); err == nil {
				good.Add(1)
			}
		})
	}
	group.Wait()
	return made, int(good.Load())
}

// Three sources ask for twice of what the downstream behind a limit bears, one of them for more than its turns give it. When
// the others are shed, all of its questions are answered, and they get the rest.
func TestShed_Class(t *testing.T) {
	n := newNetwork(t)
	f := families[0]
	to := netip.AddrPortFrom(f.proxy, tcpPort)
	const service, slots = 20 * time.Millisecond, 10 // 500 answers a second
	n.downstream.serveSlowly(t, netip.AddrPortFrom(f.downstream, tcpPort), service)
	config := func(observe bool) string {
		return fmt.Sprintf(`
[[listen]]
name = "db"
address = "tcp://%v"
downstream = "%v:%d"

[[limit]]
name = "database"
max_connections = %d
queue_timeout = "400ms"

[[limit]]
name = "reports"
match = { source = ["%v", "%v"] }
observe = %v
shed = { limit = "database", above = "80%%" }
`, to, f.downstream, tcpPort, slots, f.sources[1], f.sources[2], observe)
	}
	d := n.shaper.shaperd(t, config(true))
	share := func() float64 {
		l, err := d.api().Limit(t.Context(), "reports")
		if err != nil || l.Shed == nil {
			return -1
		}
		return l.Shed.Share
	}
	waitFor(t, patience, func() error {
		if share() != 0 {
			return fmt.Errorf("sheds %v before anything was asked", share())
		}
		return nil
	})
	load := func(d time.Duration) (critical, others float64) {
		var group sync.WaitGroup
		var parts [3]float64
		for i, rate := range []float64{250, 375, 375} {
			group.Go(func() {
				made, answered := n.client.openLoop(f.sources[i], to, rate, d)
				parts[i] = float64(answered) / float64(made)
			})
		}
		group.Wait()
		return parts[0], (parts[1] + parts[2]) / 2
	}
	retryOnStall(t, func() (stallReport, error) {
		stalls := startStallWatch(t)
		critical, others := load(3 * time.Second)
		report := stalls.stop()
		t.Logf("without shedding %.2f %% and %.1f %% are answered", 100*critical, 100*others)
		if critical > 0.9 {
			return report, fmt.Errorf("without shedding %.1f %% are answered: the load is too low to show anything", 100*critical)
		}
		return report, nil
	})
	d.reload(config(false))
	retryOnStall(t, func() (stallReport, error) {
		load(9 * time.Second) // the share grows
		stalls := startStallWatch(t)
		critical, others := load(6 * time.Second)
		report := stalls.stop()
		t.Logf("with shedding %.2f %% and %.1f %% are answered, %.0f %% are shed", 100*critical, 100*others, 100*share())
		if critical < 0.99 || others == 0 || others > 0.5 {
			return report, fmt.Errorf("with shedding %.2f %% and %.1f %% are answered", 100*critical, 100*others)
		}
		return report, nil
	})
	retryOnStall(t, func() (stallReport, error) {
		waitFor(t, patience, func() error {
			if s := share(); s != 0 {
				return fmt.Errorf("still sheds %v", s)
			}
			return nil
		})
		stalls := startStallWatch(t)
		made, answered := n.client.openLoop(f.sources[1], to, 50, time.Second)
		report := stalls.stop()
		if answered < made {
			return report, fmt.Errorf("%d of %d are answered when there is enough", answered, made)
		}
		return report, nil
	})
}
