package netns

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// A phase is an interval with one rate, in bytes a second. During the reload between two
// phases the higher of both rates counts.
type phase struct {
	start, end time.Duration
	rate       float64
}

// warpTime maps each event to the time that it would have if the rate were always 1, so
// that a burst over varying rates becomes one over a rate of 1.
func warpTime(events []lab.Event, phases []phase) []lab.Event {
	credit := func(at time.Duration) float64 {
		var sum float64
		for i, p := range phases {
			sum += p.rate * max(0, min(at, p.end)-p.start).Seconds()
			if i+1 < len(phases) {
				next := phases[i+1]
				sum += max(p.rate, next.rate) * max(0, min(at, next.start)-p.end).Seconds()
			}
		}
		return sum
	}
	moved := make([]lab.Event, len(events))
	for i, e := range events {
		moved[i] = lab.Event{At: time.Duration(credit(e.At) * float64(time.Second)), N: e.N}
	}
	return moved
}

// TestTimeWarpByPhase compares with times computed by hand.
func TestTimeWarpByPhase(t *testing.T) {
	const s = time.Second
	phases := []phase{{0, 2 * s, 10}, {3 * s, 5 * s, 1}}
	for at, want := range map[time.Duration]time.Duration{
		0: 0, s: 10 * s, 2 * s: 20 * s, 2500 * time.Millisecond: 25 * s, 3 * s: 30 * s, 4 * s: 31 * s, 9 * s: 32 * s,
	} {
		if got := warpTime([]lab.Event{{At: at, N: 1}}, phases)[0].At; (got - want).Abs() > time.Microsecond {
			t.Errorf("%v was mapped to %v, want %v", at, got, want)
		}
	}
}

// TestReload changes the rate under load. A limiter without its old state would grant its burst of 1 MiB each time.
func TestReload(t *testing.T) {
	retryOnStall(t, func() (stallReport, error) { return measureReload(t) })
}

func measureReload(t *testing.T) (stallReport, error) {
	const burst = 1 << 20
	f := ipv4
	n := newNetwork(t)
	s := n.downstream.newSink(t, f.tcp())
	text := func(mib int, more string) string {
		return config(f, limit("smooth", onTCP, keySource, fmt.Sprintf(`rate = "%dMiB/s"`, mib), `burst = "1MiB"`, more))
	}
	d := n.shaper.shaperd(t, text(4, ""))
	b := n.client.newBulk(t, f.sources[0], f.listenAddr(), 4, 'x')
	stalls := startStallWatch(t)
	c := n.downstream.capture(t, lab.DownstreamLink, tcpPort, framesOf(20))
	done := make(chan error, 1)
	stop := make(chan struct{})
	end := sync.OnceFunc(func() { close(stop) })
	defer end()

	var phases []phase
	begin := func(mib int) { phases = append(phases, phase{start: c.Elapsed(), rate: float64(mib << 20)}) }
	wait := func(most time.Duration) {
		time.Sleep(most)
		phases[len(phases)-1].end = c.Elapsed()
	}
	run := func(mib int, most time.Duration) {
		begin(mib)
		wait(most)
	}
	begin(4)
	go func() { done <- b.floodUntil(stop) }()
	wait(700 * time.Millisecond)
	for _, maxDelay := range []string{"250ms", "300ms"} { // same rate, other max_delay
		d.reload(text(4, fmt.Sprintf("max_delay = %q", maxDelay)))
		run(4, 400*time.Millisecond)
	}
	d.reload(text(8, ""))
	run(8, 700*time.Millisecond)
	for _, bad := range []string{
		text(1, "") + "\n[[limit", // invalid TOML
		strings.Replace(text(1, ""), "burst", "brust", 1),
		strings.Replace(text(1, ""), `["door"]`, `["gate"]`, 1),
	} {
		before := len(d.Log.String())
		d.reload(bad)
		waitFor(t, patience, func() error {
			if logged := d.Log.String()[before:]; !strings.Contains(logged, "shaperd.toml:") {
				return fmt.Errorf("an invalid configuration is not reported with its position: %q", logged)
			}
			return nil
		})
		run(8, 200*time.Millisecond)
	}
	d.reload(text(2, ""))
	run(2, 900*time.Millisecond)
	end()
	if err := <-done; err != nil {
		t.Fatalf("a connection broke: %v", err)
	}
	events, report := lab.Bytes(c.stop()), stalls.stop()

	if arrived, ended := s.count(); arrived != 4 || ended != 0 {
		t.Errorf("%d connections arrived at the downstream and %d ended, want 4 and 0", arrived, ended)
	}
	moved := warpTime(lab.Between(events, phases[0].start, phases[len(phases)-1].end), phases)
	allowed := burst + 24e3 + 8*(1<<20)*min(report.machine().longest(), stallAllowance).Seconds()
	got := lab.Sigma(moved, 1)
	t.Logf("sigma over all phases %.0f bytes, %d of them the burst; %v", got, burst, report)
	if got < burst/8 { // far more than without a burst
		t.Errorf("sigma over all phases is %.0f bytes: the burst of %d was never used", got, burst)
	}
	mustHaveLimited(t, d, "smooth")
	var errs []error
	if got > allowed {
		errs = append(errs, fmt.Errorf("sigma over all phases is %.0f bytes, want at most %.0f: a reload granted a burst", got, allowed))
	}
	for i, p := range phases {
		start := p.start
		if i == 0 && len(events) > 0 {
			start = max(start, events[0].At) + 300*time.Millisecond // the burst
		}
		e := envelope{rate: p.rate, unit: "bytes"}
		if err := e.checkMean(lab.Between(events, start, p.end), 0.06, report); err != nil {
			errs = append(errs, fmt.Errorf("phase %d, %.0f MiB/s: %w", i, p.rate/(1<<20), err))
		}
	}
	return report, errors.Join(errs...)
}

// TestReload_ConnectionCap lowers and raises a cap while connections wait.
func TestReload_ConnectionCap(t *testing.T) {
	f := ipv4
	n := newNetwork(t)
	n.downstream.serveSlowly(t, f.tcp(), 100*time.Millisecond)
	text := func(slots int) string {
		return config(f, limit("slots", onTCP, keyAll, fmt.Sprintf("max_connections = %d", slots), `queue_timeout = "10s"`, `max_queue = 100`))
	}
	d := n.shaper.shaperd(t, text(8))
	c := n.downstream.captureFiltered(t, lab.DownstreamLink, lab.Filter{Port: tcpPort}, 1<<16)
	failed := make(chan int, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		_, n := n.client.repeatRequestsUntil(ctx, f.sources[0], f.listenAddr(), 40)
		failed <- n
	}()
	type step struct {
		slots      int
		start, end time.Duration
	}
	steps := []*step{{slots: 8}, {slots: 3}, {slots: 12}}
	for i, s := range steps {
		if i != 0 {
			d.reload(text(s.slots))
		}
		waitFor(t, patience, func() error { // until the new cap is reached
			if got := d.metrics().Sum("in_flight", `limit="slots"`); got != float64(s.slots) {
				return fmt.Errorf("%v connections are in flight, the cap is %d", got, s.slots)
			}
			return nil
		})
		s.start = c.Elapsed()
		time.Sleep(450 * time.Millisecond)
		s.end = c.Elapsed()
	}
	cancel()
	if n := <-failed; n != 0 {
		t.Errorf("%d requests failed, want none", n)
	}
	levels := lab.Levels(c.stop())
	for _, s := range steps {
		if got := lab.MaxLevel(levels, s.start, s.end); got != s.slots {
			t.Errorf("the peak was %d connections in flight, want the cap of %d", got, s.slots)
		}
	}
}
