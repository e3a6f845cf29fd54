package netns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/test/lab"
)

// watch polls the daemon like "top" and an open dashboard, once a second, until stop is called.
func (d *daemon) watch() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{}, 2)
	client := testutil.UnixClient(d.t, d.Control)
	get := func(path string) {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://shaperd"+path, nil)
		must(d.t, err)
		answer, err := client.Do(r)
		if err == nil {
			_, _ = io.Copy(io.Discard, answer.Body)
			answer.Body.Close()
		}
		if err != nil && ctx.Err() == nil {
			d.t.Errorf("GET %s: %v", path, err)
		}
	}
	go func() {
		defer func() { done <- struct{}{} }()
		get("/v1/live")
	}()
	go func() {
		defer func() { done <- struct{}{} }()
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for ctx.Err() == nil {
			for _, path := range []string{"/v1/status", "/v1/limits", "/v1/limits/smooth/keys?sort=delayed&top=100"} {
				get(path)
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	}()
	return func() { cancel(); <-done; <-done }
}

// TestLongObservationOverhead compares the daemon's CPU time for a shaped flow with and without an
// open "top" and dashboard.
func TestLongObservationOverhead(t *testing.T) {
	rates, rounds, span, most := []string{"10MiB/s"}, 2, 1500*time.Millisecond, 1.3
	if *figures {
		rates, rounds, span, most = []string{"10MiB/s", "100MiB/s"}, 10, 5*time.Second, 1.15
	}
	for _, rate := range rates {
		t.Run(rate, func(t *testing.T) { testObservationOverhead(t, fmt.Sprintf("rate = %q", rate), rounds, span, most) })
	}
}

func testObservationOverhead(t *testing.T, rate string, rounds int, span time.Duration, most float64) {
	f := ipv4
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.downstream.newSink(t, f.tcp())
		d := n.shaper.shaperd(t, config(f, limit("smooth", onTCP, keySource, rate)))
		b := n.client.newBulk(t, f.sources[0], f.listenAddr(), 4, 'x')
		stalls := startStallWatch(t)
		var unobserved, observed []float64 // CPUs
		for round := range 2 * rounds {
			stop := func() {}
			if round%2 == 1 {
				stop = d.watch()
			}
			start, cpu := time.Now(), d.cpuTime()
			if err := b.flood(span); err != nil {
				t.Fatal(err)
			}
			used := (d.cpuTime() - cpu).Seconds() / time.Since(start).Seconds()
			stop()
			if round%2 == 0 {
				unobserved = append(unobserved, used)
			} else {
				observed = append(observed, used)
			}
		}
		report := stalls.stop()
		mustHaveLimited(t, d, "smooth")
		slices.Sort(unobserved)
		slices.Sort(observed)
		ratio := observed[len(observed)/2] / unobserved[len(unobserved)/2]
		t.Logf("CPUs: %.4f unobserved %.4f, %.4f observed %.4f: %.3f times", unobserved[len(unobserved)/2], unobserved, observed[len(observed)/2], observed, ratio)
		if ratio > most {
			return report, errors.New("observing the daemon costs too much")
		}
		return report, nil
	})
}

// TestLongIdleControlClients opens a thousand idle connections to the control socket while a flow
// is shaped, and makes a request next to them.
func TestLongIdleControlClients(t *testing.T) {
	f := ipv4
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.downstream.newSink(t, f.tcp())
		d := n.shaper.shaperd(t, config(f, limit("smooth", onTCP, keySource, tenMiBLimit)))
		b := n.client.newBulk(t, f.sources[0], f.listenAddr(), 4, 'x')
		stalls := startStallWatch(t)
		c := n.downstream.capture(t, lab.DownstreamLink, tcpPort, framesOf(4))
		var crowd sync.WaitGroup
		crowd.Go(func() { // during the flow
			time.Sleep(200 * time.Millisecond)
			for range 1000 {
				if c, err := net.Dial("unix", d.Control); err == nil {
					t.Cleanup(func() { c.Close() })
				}
			}
		})
		if err := b.flood(2500 * time.Millisecond); err != nil {
			t.Fatal(err)
		}
		end := c.Elapsed()
		crowd.Wait()
		events, report := lab.Between(lab.Bytes(c.stop()), 0, end), stalls.stop()
		mustHaveLimited(t, d, "smooth")
		// Idle connections are closed by then or soon, so that requests are served again.
		waitFor(t, patience, func() error { _, err := d.api().Status(t.Context()); return err })
		return report, checkEnvelope(t, tenMiB, events, 0.02, report)
	})
}
