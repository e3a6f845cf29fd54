package netns

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"shaperd/test/lab"
)

// A phase is a time with one rate, in bytes a second. Reloads take their time:
// what lies between two phases has the higher rate of both.
type phase struct {
	start, end time.Duration
	rate       float64
}

// alongPhases moves each event to the time at which it would be, were the rate
// always 1: a burst over varying rates becomes one over a rate of 1.
func alongPhases(events []lab.Event, phases []phase) []lab.Event {
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

// TestAlongPhases moves events by hand.
func TestAlongPhases(t *testing.T) {
	const s = time.Second
	phases := []phase{{0, 2 * s, 10}, {3 * s, 5 * s, 1}}
	for at, want := range map[time.Duration]time.Duration{
		0: 0, s: 10 * s, 2 * s: 20 * s, 2500 * time.Millisecond: 25 * s, 3 * s: 30 * s, 4 * s: 31 * s, 9 * s: 32 * s,
	} {
		if got := alongPhases([]lab.Event{{At: at, N: 1}}, phases)[0].At; (got - want).Abs() > time.Microsecond {
			t.Errorf("%v becomes %v, want %v", at, got, want)
		}
	}
}

// TestReload changes the rate under load. A limiter made anew would hand out its
// burst of 1 MiB each time.
func TestReload(t *testing.T) {
	fairly(t, func() (stallReport, error) { return measureReload(t) })
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
	b := n.client.newBulk(t, f.sources[0], f.door(), 4, 'x')
	stalls := startStallWatch(t)
	c := n.downstream.capture(t, downstreamLink, tcpPort, framesOf(5))
	const load = 4400 * time.Millisecond
	done := make(chan error, 1)
	go func() { done <- b.flood(load) }()

	var phases []phase
	run := func(mib int, most time.Duration) {
		phases = append(phases, phase{start: c.Elapsed(), rate: float64(mib << 20)})
		time.Sleep(most)
		phases[len(phases)-1].end = c.Elapsed()
	}
	run(4, 700*time.Millisecond)
	for _, mode := range []string{"250ms", "300ms"} { // the same rate, written anew
		d.reload(text(4, fmt.Sprintf("max_delay = %q", mode)))
		run(4, 400*time.Millisecond)
	}
	d.reload(text(8, ""))
	run(8, 700*time.Millisecond)
	for _, bad := range []string{
		text(1, "") + "\n[[limit", // no TOML
		strings.Replace(text(1, ""), "burst", "brust", 1),
		strings.Replace(text(1, ""), `["door"]`, `["gate"]`, 1),
	} {
		before := len(d.log.String())
		d.reload(bad)
		waitFor(t, 10*time.Second, func() error {
			if said := d.log.String()[before:]; !strings.Contains(said, "shaperd.toml:") {
				return fmt.Errorf("a bad configuration is not reported with its place: %q", said)
			}
			return nil
		})
		run(8, 200*time.Millisecond)
	}
	d.reload(text(2, ""))
	run(2, 900*time.Millisecond)
	if err := <-done; err != nil {
		t.Fatalf("a connection broke: %v", err)
	}
	events, report := lab.Bytes(c.stop()), stalls.stop()

	if arrived, ended := s.count(); arrived != 4 || ended != 0 {
		t.Errorf("%d connections arrived at the downstream and %d ended, want 4 and 0", arrived, ended)
	}
	moved := alongPhases(lab.Between(events, phases[0].start, phases[len(phases)-1].end), phases)
	allowed := burst + 24e3 + 8*(1<<20)*min(report.longest(), stallAlibi).Seconds()
	got := lab.Sigma(moved, 1)
	t.Logf("sigma over all phases %.0f bytes, %d of them the burst; %v", got, burst, report)
	if got < burst/8 { // far more than there is without one
		t.Errorf("sigma over all phases is %.0f bytes: the burst of %d was never used", got, burst)
	}
	mustHaveLimited(t, d, "smooth")
	var errs []error
	if got > allowed {
		errs = append(errs, fmt.Errorf("sigma over all phases is %.0f bytes, want at most %.0f: a reload hands out a burst", got, allowed))
	}
	for i, p := range phases {
		start := p.start
		if i == 0 {
			start += 300 * time.Millisecond // the burst
		}
		e := envelope{rate: p.rate, unit: "bytes"}
		if err := e.checkMean(lab.Between(events, start, p.end), 0.06, report); err != nil {
			errs = append(errs, fmt.Errorf("phase %d, %.0f MiB/s: %w", i, p.rate/(1<<20), err))
		}
	}
	return report, errors.Join(errs...)
}

// TestReloadConnections makes a cap smaller and larger while connections wait.
func TestReloadConnections(t *testing.T) {
	f := ipv4
	n := newNetwork(t)
	n.downstream.serveSlowly(t, f.tcp(), 100*time.Millisecond)
	text := func(slots int) string {
		return config(f, limit("slots", onTCP, keyAll, fmt.Sprintf("max_connections = %d", slots), `queue_timeout = "10s"`, `max_queue = 100`))
	}
	d := n.shaper.shaperd(t, text(8))
	c := n.downstream.captureBy(t, downstreamLink, lab.Filter{Port: tcpPort}, 1<<16)
	failed := make(chan int, 1)
	go func() {
		_, n := n.client.repeat(f.sources[0], f.door(), 40, 3*time.Second)
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
		waitFor(t, 5*time.Second, func() error { // those in flight end, or others begin
			if got := d.metrics().sum("in_flight", `limit="slots"`); got != float64(s.slots) {
				return fmt.Errorf("%v connections are in flight, the cap is %d", got, s.slots)
			}
			return nil
		})
		s.start = c.Elapsed()
		time.Sleep(450 * time.Millisecond)
		s.end = c.Elapsed()
	}
	if n := <-failed; n != 0 {
		t.Errorf("%d requests failed, want none", n)
	}
	levels := lab.Levels(c.stop())
	for _, s := range steps {
		if got := lab.Highest(levels, s.start, s.end); got != s.slots {
			t.Errorf("at most %d connections were in flight, the cap was %d then", got, s.slots)
		}
	}
}
