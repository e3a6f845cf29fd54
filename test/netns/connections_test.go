package netns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/test/lab"
)

// serveSlowly reads one byte from each connection, waits for the service time, answers with one byte and closes.
func (h *host) serveSlowly(t testing.TB, at netip.AddrPort, service time.Duration) {
	h.serveTCP(t, at, func(c *net.TCPConn) {
		var b [1]byte
		if _, err := io.ReadFull(c, b[:]); err != nil {
			return
		}
		time.Sleep(service)
		_, _ = c.Write(b[:])
	})
}

// request makes one request to a slow server, and returns its duration.
func (h *host) request(from netip.Addr, to netip.AddrPort) (time.Duration, error) {
	start := time.Now()
	c, err := h.dialTCP(from, to)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if _, err := c.Write([]byte{1}); err != nil {
		return 0, err
	}
	if err := c.SetReadDeadline(start.Add(patience)); err != nil {
		return 0, err
	}
	got, err := io.ReadAll(c)
	if err != nil {
		return 0, err
	}
	if len(got) != 1 {
		return 0, fmt.Errorf("the response has %d bytes, want 1", len(got))
	}
	return time.Since(start), nil
}

// repeatRequests makes requests from the given number of goroutines for the time d. It
// returns the sorted durations of answered requests, and the number of failures.
func (h *host) repeatRequests(from netip.Addr, to netip.AddrPort, clients int, d time.Duration) (took []time.Duration, failed int) {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return h.repeatRequestsUntil(ctx, from, to, clients)
}

// repeatRequestsUntil is like repeatRequests, until ctx ends.
func (h *host) repeatRequestsUntil(ctx context.Context, from netip.Addr, to netip.AddrPort, clients int) (took []time.Duration, failed int) {
	var group sync.WaitGroup
	var mu sync.Mutex
	for range clients {
		group.Go(func() {
			for ctx.Err() == nil {
				one, err := h.request(from, to)
				mu.Lock()
				if err != nil {
					failed++
				} else {
					took = append(took, one)
				}
				mu.Unlock()
				if err != nil {
					time.Sleep(10 * time.Millisecond)
				}
			}
		})
	}
	group.Wait()
	slices.Sort(took)
	return took, failed
}

// openings returns an event for each connection that was opened at the downstream.
func openings(levels []lab.Event) (opened []lab.Event) {
	open := 0
	for _, l := range levels {
		if l.N > open {
			opened = append(opened, lab.Event{At: l.At, N: 1})
		}
		open = l.N
	}
	return opened
}

func TestOpenings(t *testing.T) {
	got := openings([]lab.Event{{At: 1, N: 1}, {At: 2, N: 2}, {At: 3, N: 1}, {At: 4, N: 0}, {At: 5, N: 1}})
	if diff := cmp.Diff([]lab.Event{{At: 1, N: 1}, {At: 2, N: 1}, {At: 5, N: 1}}, got); diff != "" {
		t.Error(diff)
	}
}

// TestConnectionCap has a hog with 200 connections at a cap of ten. A polite source, with
// one connection at a time, must be admitted soon.
func TestConnectionCap(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			retryOnStall(t, func() (stallReport, error) { return measureConnectionCap(t, f) })
		})
	}
}

func measureConnectionCap(t *testing.T, f family) (stallReport, error) {
	const maxConnections, service = 10, 100 * time.Millisecond
	n := newNetwork(t)
	n.downstream.serveSlowly(t, f.tcp(), service)
	d := n.shaper.shaperd(t, config(f, limit("slots", onTCP, keyAll,
		fmt.Sprintf("max_connections = %d", maxConnections), `queue_timeout = "10s"`, `max_queue = 1000`)))
	stalls := startStallWatch(t)
	c := n.downstream.captureFiltered(t, lab.DownstreamLink, lab.Filter{Port: tcpPort}, 1<<16)
	var hog []time.Duration
	var hogFailed int
	done := make(chan struct{})
	go func() {
		defer close(done)
		hog, hogFailed = n.client.repeatRequests(f.sources[0], f.listenAddr(), 200, 2500*time.Millisecond)
	}()
	time.Sleep(300 * time.Millisecond) // all of the hog's connections wait now
	m := d.metrics()
	polite, failed := n.client.repeatRequests(f.sources[1], f.listenAddr(), 1, 2*time.Second)
	<-done
	list, report := c.stop(), stalls.stop()

	levels := lab.Levels(list)
	opened, most := openings(levels), lab.MaxLevel(levels, 0, time.Hour)
	t.Logf("%d connections, at most %d in flight; hog %d responses, p50 %v; polite %d, p50 %v, p90 %v; %v",
		len(opened), most, len(hog), lab.Percentile(hog, 50), len(polite), lab.Percentile(polite, 50), lab.Percentile(polite, 90), report)
	if most > maxConnections {
		t.Errorf("%d connections were in flight at once, the cap is %d", most, maxConnections)
	}
	if most < maxConnections {
		t.Errorf("only %d connections were in flight at once, the cap of %d was not reached", most, maxConnections)
	}
	if failed+hogFailed != 0 {
		t.Errorf("%d polite and %d other requests failed, want none", failed, hogFailed)
	}
	if got := lab.Percentile(hog, 50) - service; got < time.Second {
		t.Errorf("the hog waited only %v: it was not limited", got)
	}
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	wait := lab.Percentile(polite, 50) - service
	check(wait <= 200*time.Millisecond, "the polite source waited %v, want at most 200 ms", wait)
	wait = lab.Percentile(polite, 90) - service
	check(wait <= 300*time.Millisecond+report.longest(), "the polite source's p90 wait was %v, want at most 300 ms", wait)
	// Ten slots and 100 ms of service time allow a hundred connections a second.
	check(len(opened) >= 200, "%d connections reached the downstream: slots were unused", len(opened))
	got := m.Sum("in_flight", `limit="slots"`)
	check(got == maxConnections, "the metrics have %v in flight, want %d\n%s", got, maxConnections, m)
	got = m.Sum("waiting", `limit="slots"`)
	check(got >= 150 && got <= 200, "the metrics have %v waiting, want about 190\n%s", got, m)
	return report, errors.Join(errs...)
}

// TestConnectionRefusal opens more connections than there are slots and places in the queue.
func TestConnectionRefusal(t *testing.T) {
	t.Parallel()
	const queueTimeout = 4 * time.Second // all three connect within it
	f := ipv4
	for _, test := range []struct {
		refuseWith string
		want       error
	}{{"reset", syscall.ECONNRESET}, {"close", io.EOF}} {
		t.Run(test.refuseWith, func(t *testing.T) {
			n := newNetwork(t)
			s := n.downstream.newSink(t, f.tcp())
			d := n.shaper.shaperd(t, config(f, limit("slots", onTCP, keyAll, `max_connections = 1`,
				`max_queue = 2`, fmt.Sprintf("queue_timeout = %q\nrefuse_with = %q", queueTimeout, test.refuseWith))))
			holder := n.client.newBulk(t, f.sources[0], f.listenAddr(), 1, 'h')
			s.wait(t, 'h', 1, patience)
			start := time.Now()
			var waiting []*net.TCPConn
			for range 2 {
				waiting = append(waiting, n.client.mustDial(t, f.sources[1], f.listenAddr()))
			}
			waitFor(t, patience, func() error {
				if got := d.metrics().Sum("waiting", `limit="slots"`); got != 2 {
					return fmt.Errorf("%v connections wait, want 2", got)
				}
				return nil
			})
			if err := n.client.dialUntilClosed(f.sources[1], f.listenAddr()); !errors.Is(err, test.want) {
				t.Errorf("with a full queue, a connection ended with %v, want %v", err, test.want)
			}
			if took := time.Since(start); took > queueTimeout {
				t.Logf("slow machine: the third connection ended after %v", took)
			}
			for _, c := range waiting {
				if err := awaitClose(c); !errors.Is(err, test.want) {
					t.Errorf("after queue_timeout, a connection ended with %v, want %v", err, test.want)
				}
			}
			if took := time.Since(start); took < queueTimeout || took > queueTimeout+20*time.Second {
				t.Errorf("waiting ended after %v, want %v", took, queueTimeout)
			}
			if arrived, ended := s.count(); arrived != 1 || ended != 0 {
				t.Errorf("%d connections arrived at the downstream and %d ended, want 1 and 0", arrived, ended)
			}
			for reason, want := range map[string]float64{"waiting-full": 1, "wait-timeout": 2} {
				d.awaitMetric(want, "connections", `limit="slots"`, `verdict="refuse"`, `reason="`+reason+`"`)
			}
			// A client that disconnects frees its place in the queue, or its slot.
			holder.abort()
			waitFor(t, patience, func() error {
				if got := d.metrics().Sum("in_flight", `limit="slots"`); got != 0 {
					return fmt.Errorf("%v connections are in flight, want none", got)
				}
				return nil
			})
			n.client.newBulk(t, f.sources[1], f.listenAddr(), 1, 'n')
			s.wait(t, 'n', 1, patience)
		})
	}
}

// dialUntilClosed connects, and returns how the connection ended. A reset may arrive so early that the dial fails.
func (h *host) dialUntilClosed(from netip.Addr, to netip.AddrPort) error {
	c, err := h.dialTCP(from, to)
	if err != nil {
		return err
	}
	defer c.Close()
	return awaitClose(c)
}

// awaitClose reads from c until the connection ends, and returns how it ended.
func awaitClose(c *net.TCPConn) error {
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	n, err := io.Copy(io.Discard, c)
	switch {
	case err != nil:
		return err
	case n != 0:
		return fmt.Errorf("%d bytes were received first", n)
	}
	return io.EOF
}

// TestNewConnections opens connections faster than the limit admits them.
func TestNewConnections(t *testing.T) {
	f := ipv4
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.downstream.serveSlowly(t, f.tcp(), 0)
		d := n.shaper.shaperd(t, config(f, limit("openings", onTCP, keyAll,
			`new_connections = "50/s"`, `queue_timeout = "5s"`, `max_queue = 1000`)))
		stalls := startStallWatch(t)
		c := n.downstream.captureFiltered(t, lab.DownstreamLink, lab.Filter{Port: tcpPort}, 1<<14)
		_, failed := n.client.repeatRequests(f.sources[0], f.listenAddr(), 20, 2*time.Second)
		list, report := c.stop(), stalls.stop()
		if failed != 0 {
			t.Errorf("%d requests failed, want none", failed)
		}
		mustHaveLimited(t, d, "openings")
		return report, checkEnvelope(t, envelope{rate: 50, burst: 2.5, unit: "connections"}, openings(lab.Levels(list)), 0.05, report)
	})
}
