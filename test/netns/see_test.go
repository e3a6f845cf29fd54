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

	"shaperd/test/lab"
)

// watch looks at the daemon as "top" and an open page do, once a second, until it is
// stopped.
func (d *daemon) watch() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{}, 2)
	client := http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", d.control)
		},
	}}
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
	return func() { cancel(); <-done; <-done; client.CloseIdleConnections() }
}

// TestLongSeeingIsCheap compares the processor time of a shaped flow while nobody looks with
// that while "top" and a page are open.
func TestLongSeeingIsCheap(t *testing.T) {
	rates, rounds, span, most := []string{"10MiB/s"}, 2, 1500*time.Millisecond, 1.3
	if *figures {
		rates, rounds, span, most = []string{"10MiB/s", "100MiB/s"}, 10, 5*time.Second, 1.15
	}
	for _, rate := range rates {
		t.Run(rate, func(t *testing.T) { testSeeingIsCheap(t, fmt.Sprintf("rate = %q", rate), rounds, span, most) })
	}
}

func testSeeingIsCheap(t *testing.T, rate string, rounds int, span time.Duration, most float64) {
	f := ipv4
	fairly(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.downstream.newSink(t, f.tcp())
		d := n.shaper.shaperd(t, config(f, limit("smooth", onTCP, keySource, rate)))
		b := n.client.newBulk(t, f.sources[0], f.door(), 4, 'x')
		stalls := startStallWatch(t)
		var alone, seen []float64 // processors
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
				alone = append(alone, used)
			} else {
				seen = append(seen, used)
			}
		}
		report := stalls.stop()
		mustHaveLimited(t, d, "smooth")
		slices.Sort(alone)
		slices.Sort(seen)
		ratio := seen[len(seen)/2] / alone[len(alone)/2]
		t.Logf("of a processor: %.4f alone %.4f, %.4f seen %.4f: %.3f times", alone[len(alone)/2], alone, seen[len(seen)/2], seen, ratio)
		if ratio > most {
			return report, errors.New("looking at the daemon costs too much")
		}
		return report, nil
	})
}

// TestLongIdleControlClients has a thousand clients hold the control socket and say nothing, while
// a flow is shaped, and asks the daemon something beside them.
func TestLongIdleControlClients(t *testing.T) {
	f := ipv4
	fairly(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.downstream.newSink(t, f.tcp())
		d := n.shaper.shaperd(t, config(f, limit("smooth", onTCP, keySource, tenMiBLimit)))
		b := n.client.newBulk(t, f.sources[0], f.door(), 4, 'x')
		stalls := startStallWatch(t)
		c := n.downstream.capture(t, downstreamLink, tcpPort, framesOf(4))
		var crowd sync.WaitGroup
		crowd.Go(func() { // amid the flow
			time.Sleep(200 * time.Millisecond)
			for range 1000 {
				if c, err := net.Dial("unix", d.control); err == nil {
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
		// Idle ones are gone by then, or soon: who asks is not kept out for long.
		waitFor(t, 15*time.Second, func() error { return d.ask("/v1/status", new(struct{})) })
		return report, hold(t, tenMiB, events, 0.02, report)
	})
}
