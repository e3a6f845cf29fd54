package netns

import (
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// pacedBurst is the allowed sigma of a paced stream, in datagrams: one for the datagram
// itself, two to catch up after a late wake-up, and half a datagram for a sender that is
// interrupted between reading the clock and the wire.
const pacedBurst = 3.5

// The lateness that the daemon catches up, under a limit in packets and in bytes. It adds to the allowed excess.
const (
	packetsCatchUp = 5 * time.Millisecond
	bytesCatchUp   = 2 * time.Millisecond
)

// withCatchUp returns e with the catch-up after the longest stall added to the burst.
func (e envelope) withCatchUp(catchUp time.Duration, report stallReport) envelope {
	e.burst += e.rate * min(catchUp, report.machine().longest()).Seconds()
	return e
}

// TestUDPPacketRate offers twice the rate. Datagrams must leave paced, in order, and within
// max_delay; the others must be counted as refused.
func TestUDPPacketRate(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			retryOnStall(t, func() (stallReport, error) { return measureUDPPacketRate(t, f) })
		})
	}
}

func measureUDPPacketRate(t *testing.T, f family) (stallReport, error) {
	const maxDelay = 50 * time.Millisecond
	n := newNetwork(t)
	n.downstream.discardUDP(t, f.udp())
	d := n.shaper.shaperd(t, config(f, limit("sms", onUDP, keySource,
		`packets = "10000pps"`, fmt.Sprintf("max_delay = %q", maxDelay))))
	stalls := startStallWatch(t)
	droppedBefore := kernelDrops(t, n.shaper)
	c := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<16)
	p := n.client.newPaced(t, f.sources[0], f.udpListenAddr(), paced{tag: 1, size: 512, rate: 20000, pinned: true})
	sent, err := p.send(2500 * time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	end := c.Elapsed()
	n.awaitEmptyQueue(t, d, "sms", 512, sent, droppedBefore)
	list, report := c.stop(), stalls.stop()
	dropped := kernelDrops(t, n.shaper) - droppedBefore

	busy := lab.Between(lab.Packets(list), 0, end)
	errs := []error{checkEnvelope(t, envelope{rate: 10000, burst: pacedBurst, unit: "datagrams"}.withCatchUp(packetsCatchUp, report), busy, 0.02, report)}
	failed := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	gap := lab.Gaps(busy)
	t.Logf("gaps p1 %v, p50 %v, p99 %v, longest %v", lab.Percentile(gap, 1), lab.Percentile(gap, 50), lab.Percentile(gap, 99), lab.Percentile(gap, 100))
	// A daemon that is rarely scheduled sends everything that is due at once.
	if got := lab.Percentile(gap, 50); report.share(end) < 0.2 && (got < 90*time.Microsecond || got > 110*time.Microsecond) {
		failed("the median gap is %v, want 100 us", got)
	}

	for i, a := range list {
		if a.Payload != 512 {
			t.Fatalf("a datagram of %d bytes arrived, want 512", a.Payload)
		}
		if i > 0 && c.sent(a) < c.sent(list[i-1]) {
			t.Fatalf("datagram %d overtook its predecessor", i)
		}
	}
	waits := transitTimes(c, list)
	// max_delay, one datagram, a stall before the queue, and the stalls while queued: each delays the whole queue.
	most := maxDelay + 2*time.Millisecond + report.longest() + report.maxWithin(2*maxDelay)
	if got := lab.Percentile(waits, 99); got > most || got < maxDelay/2 {
		failed("the datagrams' p99 wait was %v, want %v to %v", got, maxDelay/2, most)
	}

	m := d.metrics()
	refused := m.Sum("packets", `limit="sms"`, `verdict="refuse"`)
	lost := float64(sent - len(list))
	t.Logf("%d sent, %d arrived, %.0f counted as refused, %d dropped by the kernel; waits p50 %v, p99 %v", sent, len(list), refused, dropped,
		lab.Percentile(waits, 50), lab.Percentile(waits, 99))
	if lost < 0.4*float64(sent) {
		failed("only %.0f of %d datagrams did not arrive", lost, sent)
	}
	// The daemon cannot count datagrams that the kernel dropped before it.
	if refused > lost || refused < 0.95*lost-float64(dropped) {
		failed("%.0f datagrams counted as refused, %.0f did not arrive\n%s", refused, lost, m)
	}
	return report, errors.Join(errs...)
}

// awaitEmptyQueue waits until the daemon has counted all datagrams of a size at a limit, but those that the kernel has
// dropped, and has forwarded those that it has not refused.
func (n *network) awaitEmptyQueue(t testing.TB, d *daemon, name string, size, sent, droppedBefore int) {
	t.Helper()
	waitFor(t, patience, func() error {
		m := d.metrics()
		count := func(verdict string) int {
			return int(m.Sum("shaperd_limit_packets_total", fmt.Sprintf("limit=%q", name), fmt.Sprintf("verdict=%q", verdict)))
		}
		passed, refused, dropped := count("pass")+count("delay"), count("refuse"), kernelDrops(t, n.shaper)-droppedBefore
		forwarded := int(m.Sum("shaperd_listener_bytes_total", `direction="to-downstream"`)) / size
		if passed+refused+dropped < sent || forwarded < passed {
			return fmt.Errorf("of %d datagrams %d passed, %d were refused and %d dropped by the kernel; %d were forwarded\n%s", sent, passed, refused, dropped, forwarded, m)
		}
		return nil
	})
	for range 10 { // until the last ones have arrived, which may take one of these naps
		time.Sleep(20 * time.Millisecond)
	}
}

// transitTimes returns the times of datagrams from their sender to the capture c, sorted.
func transitTimes(c *capture, list []lab.Arrival) []time.Duration {
	waits := make([]time.Duration, len(list))
	for i, a := range list {
		waits[i] = a.At - c.sent(a)
	}
	slices.Sort(waits)
	return waits
}

// TestUDPByteRate limits bytes, with datagrams of several sizes.
func TestUDPByteRate(t *testing.T) {
	f := ipv4
	e := envelope{rate: 2 << 20, burst: pacedBurst * 1472, unit: "bytes"}
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.downstream.discardUDP(t, f.udp())
		d := n.shaper.shaperd(t, config(f, limit("bytes", onUDP, keyAll, `rate = "2MiB/s"`, `max_delay = "50ms"`)))
		stalls := startStallWatch(t)
		c := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<16)
		errs := make(chan error)
		for i, size := range []int{64, 512, 1472} {
			p := n.client.newPaced(t, f.sources[i], f.udpListenAddr(), paced{tag: byte(i), size: size, rate: 2000})
			go func() {
				_, err := p.send(1500 * time.Millisecond)
				errs <- err
			}()
		}
		if err := errors.Join(<-errs, <-errs, <-errs); err != nil {
			t.Fatal(err)
		}
		end := c.Elapsed()
		events, report := lab.Between(lab.Bytes(c.stop()), 0, end), stalls.stop()
		mustHaveLimited(t, d, "bytes")
		return report, checkEnvelope(t, e.withCatchUp(bytesCatchUp, report), events, 0.02, report)
	})
}

// TestTwoSourcesUDP has one source send ten times its limit. The other, below its own limit,
// must have no loss and no delay.
func TestTwoSourcesUDP(t *testing.T) {
	f := ipv4
	e := envelope{rate: 2000, burst: pacedBurst, unit: "datagrams"}
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.downstream.discardUDP(t, f.udp())
		d := n.shaper.shaperd(t, config(f, limit("each", onUDP, keySource, `packets = "2000pps"`, `max_delay = "100ms"`)))
		stalls := startStallWatch(t)
		droppedBefore := kernelDrops(t, n.shaper)
		c := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<16)
		loud := n.client.newPaced(t, f.sources[0], f.udpListenAddr(), paced{tag: 'l', size: 256, rate: 20000})
		quiet := n.client.newPaced(t, f.sources[1], f.udpListenAddr(), paced{tag: 'q', size: 256, rate: 1000})
		done := make(chan error)
		go func() {
			_, err := loud.send(2 * time.Second)
			done <- err
		}()
		sent, err := quiet.send(2 * time.Second)
		if err := errors.Join(err, <-done); err != nil {
			t.Fatal(err)
		}
		end := c.Elapsed()
		time.Sleep(200 * time.Millisecond)
		list, report := c.stop(), stalls.stop()
		mustHaveLimited(t, d, "each")

		errs := []error{checkEnvelope(t, e.withCatchUp(packetsCatchUp, report), lab.Between(lab.Packets(tagged(list, 'l')), 0, end), 0.02, report)}
		got := tagged(list, 'q')
		waits := transitTimes(c, got)
		t.Logf("quiet: %d of %d arrived, waits p50 %v, p99 %v", len(got), sent, lab.Percentile(waits, 50), lab.Percentile(waits, 99))
		if dropped := kernelDrops(t, n.shaper) - droppedBefore; len(got)+dropped < sent*99/100 {
			errs = append(errs, fmt.Errorf("%d of the quiet source's %d datagrams arrived", len(got), sent))
		}
		if most := 5*time.Millisecond + report.longest(); lab.Percentile(waits, 90) > most {
			errs = append(errs, fmt.Errorf("the p90 wait of the quiet source's datagrams was %v, want at most %v", lab.Percentile(waits, 90), most))
		}
		return report, errors.Join(errs...)
	})
}

// TestUDP_RateOnBusyHost loads all processors. A strict limit in packets keeps its rate,
// except when its thread is not scheduled for longer than the catch-up: the loss must not
// exceed the gaps that the downstream sees beyond the catch-up.
func TestUDP_RateOnBusyHost(t *testing.T) {
	const rate = 10000
	f := ipv4
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.downstream.discardUDP(t, f.udp())
		d := n.shaper.shaperd(t, config(f, limit("sms", onUDP, keySource, `packets = "10000pps"`, `max_delay = "200ms"`)))
		for range runtime.NumCPU() {
			busy := exec.Command("sh", "-c", "ulimit -t 10; while :; do :; done") // ends even if the test crashes
			must(t, busy.Start())
			defer func() { busy.Process.Kill(); busy.Wait() }()
		}
		stalls := startStallWatch(t)
		c := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<16)
		p := n.client.newPaced(t, f.sources[0], f.udpListenAddr(), paced{tag: 1, size: 100, rate: rate * 5 / 4})
		if _, err := p.send(2 * time.Second); err != nil {
			t.Fatal(err)
		}
		end := c.Elapsed()
		list := slices.DeleteFunc(c.stop(), func(a lab.Arrival) bool { return a.At < 500*time.Millisecond || a.At > end })
		report := stalls.stop()
		mustHaveLimited(t, d, "sms")
		if len(list) == 0 {
			return report, errors.New("nothing arrived")
		}

		watched := list[len(list)-1].At - list[0].At
		lost, idle := lostInGaps(c, list, time.Second/rate)
		due := rate * (watched - lost - idle).Seconds()
		t.Logf("%d of %.0f datagrams left, another %.0f were due in gaps, and the queue was empty for %v", len(list), due, rate*lost.Seconds(), idle)
		var errs []error
		if got := float64(len(list)); got < 0.99*due {
			errs = append(errs, fmt.Errorf("%.0f datagrams left, want %.0f", got, due))
		}
		if lost+idle > watched/2 {
			errs = append(errs, fmt.Errorf("nothing left for %v of %v, and the queue was empty for %v", lost, watched, idle))
		}
		return report, errors.Join(errs...)
	})
}

// lostInGaps returns for how long nothing left beyond the catch-up although datagrams waited, and
// for how long the queue was empty. After a gap of a millisecond or more, late datagrams follow one
// another closely: a second gap within 2 ms adds to the first one, a later one does not.
func lostInGaps(c *capture, list []lab.Arrival, period time.Duration) (lost, idle time.Duration) {
	due, resumed := list[0].At, list[0].At
	for i, next := range list[1:] {
		last := list[i].At
		late := last - due
		due += period
		if sent := c.sent(next); sent > due {
			idle += sent - due
			due, last, late = sent, max(last, sent), 0
		}
		if gap := next.At - last; gap >= time.Millisecond {
			if last-resumed > 2*time.Millisecond {
				late = 0
			}
			l := min(gap, max(0, late+gap-packetsCatchUp))
			lost += l
			due += l
			resumed = next.At
		}
	}
	return lost, idle
}
