//go:build vmguest

package netns

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestVMClockSteps steps the guest's clock forward and back while the daemon shapes streams and
// datagrams: nothing may stop or burst.
func TestVMClockSteps(t *testing.T) {
	const (
		rate    = 1 << 20 // bytes a second
		packets = 100     // a second
		span    = 5 * time.Second
		window  = 500 * time.Millisecond
	)
	f := ipv4
	n := newNetwork(t)
	s := n.downstream.newSink(t, f.tcp())
	n.downstream.echoUDP(t, f.udp())
	d := n.shaper.shaperd(t, config(f,
		limit("bytes", onTCP, keyAll, `rate = "1MiB/s"`),
		limit("datagrams", onUDP, keyAll, `packets = "100pps"`, `max_delay = "100ms"`)))
	b := n.client.newBulk(t, f.sources[0], f.listenAddr(), 2, 'x')
	s.wait(t, 'x', 2, testTimeout)
	p := n.client.newPaced(t, f.sources[0], f.udpListenAddr(), paced{size: 100, rate: 3 * packets})
	failed := make(chan error, 2)
	go func() { failed <- b.flood(span + time.Second) }()
	go func() { _, err := p.send(span + time.Second); failed <- err }()

	step := func(by time.Duration) {
		var now unix.Timespec
		must(t, unix.ClockGettime(unix.CLOCK_REALTIME, &now))
		now = unix.NsecToTimespec(now.Nano() + int64(by))
		must(t, unix.ClockSettime(unix.CLOCK_REALTIME, &now))
	}
	steps := []time.Duration{time.Hour, -2 * time.Hour, 365 * 24 * time.Hour, -365*24*time.Hour + time.Hour}
	datagrams := func() float64 {
		m := d.metrics()
		return m.Sum("shaperd_limit_packets_total", `limit="datagrams"`, `verdict="pass"`) + m.Sum("shaperd_limit_packets_total", `limit="datagrams"`, `verdict="delay"`)
	}
	type sample struct {
		at    time.Duration
		bytes int64
	}
	type mark struct { // at a step
		sample
		datagrams float64
	}
	var samples []sample
	marks := make([]mark, 1)
	first := datagrams()
	marks[0] = mark{sample{0, s.got('x')}, first}
	start := time.Now() // by the monotonic clock, which is never stepped
	for len(samples) == 0 || samples[len(samples)-1].at < span {
		at := time.Since(start)
		samples = append(samples, sample{at, s.got('x')})
		if due := int(at / time.Second); due > 0 && len(steps) > 0 && due > 4-len(steps) {
			marks = append(marks, mark{samples[len(samples)-1], datagrams()})
			step(steps[0])
			steps = steps[1:]
		}
		time.Sleep(10 * time.Millisecond)
	}
	sent := datagrams() - first
	if len(steps) != 0 {
		t.Fatalf("%d steps did not happen", len(steps))
	}
	for i, from := range samples {
		for _, to := range samples[i:] {
			d, bytes := (to.at - from.at).Seconds(), float64(to.bytes-from.bytes)
			if most := rate * (d + window.Seconds()); bytes > most {
				t.Fatalf("%.0f bytes arrived between %v and %v, want at most %.0f", bytes, from.at, to.at, most)
			}
		}
	}
	last := samples[len(samples)-1]
	if mean := float64(last.bytes-samples[0].bytes) / last.at.Seconds(); mean > 1.05*rate {
		t.Errorf("the mean rate was %.0f bytes/s, want %d", mean, rate)
	}
	if got := sent / last.at.Seconds(); got > 1.3*packets {
		t.Errorf("%.0f datagrams/s were forwarded, want %d", got, packets)
	}
	// An emulated machine stalls at times. The traffic before the first step is the reference; a
	// step that stops traffic shows as far less.
	marks = append(marks, mark{last, datagrams()})
	ratesAfter := func(i int) (bytes, datagrams, took float64) {
		from, to := marks[i], marks[i+1]
		took = (to.at - from.at).Seconds()
		return float64(to.bytes-from.bytes) / took, (to.datagrams - from.datagrams) / took, took
	}
	bytes, udp, _ := ratesAfter(0)
	for i := 1; i < len(marks)-1; i++ {
		if b, u, took := ratesAfter(i); took > 0.5 && (b < bytes/10 || u < udp/10) {
			t.Errorf("%.0f bytes/s and %.0f datagrams/s after step %d, %.0f and %.0f before the first", b, u, i, bytes, udp)
		}
	}
	for range 2 {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
}
