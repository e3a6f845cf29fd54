package netns

import (
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"slices"
	"testing"
	"time"

	"shaperd/test/lab"
)

// pacedBurst is what a paced stream of datagrams may exceed its rate by: one on
// its own, two to make up for a late wake-up, and half of one for a sender that
// is interrupted between its look at the clock and the wire.
const pacedBurst = 3.5

// What is given back of lateness, under a limit in packets and in bytes: what the promise
// allows beyond that.
const (
	packetsGiveBack = 5 * time.Millisecond
	bytesGiveBack   = 2 * time.Millisecond
)

// late is e with what may be given back of the longest stall.
func (e envelope) late(giveBack time.Duration, report stallReport) envelope {
	e.burst += e.rate * min(giveBack, report.longest()).Seconds()
	return e
}

// TestUDPPacketRate offers twice the rate. What leaves is to be paced, in order,
// and never later than the queue is deep; what does not leave is to be counted.
func TestUDPPacketRate(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			fairly(t, func() (stallReport, error) { return measureUDPPacketRate(t, f) })
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
	c := n.downstream.capture(t, downstreamLink, udpPort, 1<<16)
	p := n.client.newPaced(t, f.sources[0], f.udpDoor(), paced{tag: 1, size: 512, rate: 20000})
	sent, err := p.send(2500 * time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	end := c.Elapsed()
	time.Sleep(4 * maxDelay) // until the queue is empty
	list, report := c.stop(), stalls.stop()

	busy := lab.Between(lab.Packets(list), 0, end)
	errs := []error{hold(t, envelope{rate: 10000, burst: pacedBurst, unit: "datagrams"}.late(packetsGiveBack, report), busy, 0.02, report)}
	failed := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	gap := lab.Gaps(busy)
	t.Logf("gaps p1 %v, p50 %v, p99 %v, longest %v", lab.Percentile(gap, 1), lab.Percentile(gap, 50), lab.Percentile(gap, 99), lab.Percentile(gap, 100))
	// A daemon that is seldom run sends what is due all at once.
	if got := lab.Percentile(gap, 50); report.share(end) < 0.2 && (got < 90*time.Microsecond || got > 110*time.Microsecond) {
		failed("the median gap is %v, want 100 us", got)
	}

	for i, a := range list {
		if a.Payload != 512 {
			t.Fatalf("a datagram of %d bytes arrived, sent were 512", a.Payload)
		}
		if i > 0 && c.sent(a) < c.sent(list[i-1]) {
			t.Fatalf("datagram %d overtook the one before", i)
		}
	}
	waits := waitsOf(c, list)
	// The queue's depth, one datagram, a stall before the queue, and those within:
	// what is queued already leaves later by each.
	most := maxDelay + 2*time.Millisecond + report.longest() + report.within(2*maxDelay)
	if got := lab.Percentile(waits, 99); got > most || got < maxDelay/2 {
		failed("1 %% of the datagrams waited more than %v, want %v to %v", got, maxDelay/2, most)
	}

	m := d.metrics()
	refused := m.sum("packets", `limit="sms"`, `verdict="refuse"`)
	lost := float64(sent - len(list))
	t.Logf("%d sent, %d arrived, %.0f counted as refused; waits p50 %v, p99 %v", sent, len(list), refused,
		lab.Percentile(waits, 50), lab.Percentile(waits, 99))
	if lost < 0.4*float64(sent) {
		failed("only %.0f of %d datagrams were held back", lost, sent)
	}
	// What the kernel dropped before the daemon could read it, it cannot count.
	if refused > lost || refused < 0.95*lost {
		failed("%.0f datagrams are counted as refused, %.0f did not arrive\n%s", refused, lost, m)
	}
	return report, errors.Join(errs...)
}

// waitsOf returns how long datagrams took from their sender to the capture c,
// sorted.
func waitsOf(c *capture, list []lab.Arrival) []time.Duration {
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
	fairly(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.downstream.discardUDP(t, f.udp())
		d := n.shaper.shaperd(t, config(f, limit("bytes", onUDP, keyAll, `rate = "2MiB/s"`, `max_delay = "50ms"`)))
		stalls := startStallWatch(t)
		c := n.downstream.capture(t, downstreamLink, udpPort, 1<<16)
		errs := make(chan error)
		for i, size := range []int{64, 512, 1472} {
			p := n.client.newPaced(t, f.sources[i], f.udpDoor(), paced{tag: byte(i), size: size, rate: 2000})
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
		return report, hold(t, e.late(bytesGiveBack, report), events, 0.02, report)
	})
}

// TestTwoSourcesUDP has one source send ten times its limit. The other, below
// its own limit, is to lose nothing and to wait for nothing.
func TestTwoSourcesUDP(t *testing.T) {
	f := ipv4
	e := envelope{rate: 2000, burst: pacedBurst, unit: "datagrams"}
	fairly(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.downstream.discardUDP(t, f.udp())
		d := n.shaper.shaperd(t, config(f, limit("each", onUDP, keySource, `packets = "2000pps"`, `max_delay = "100ms"`)))
		stalls := startStallWatch(t)
		c := n.downstream.capture(t, downstreamLink, udpPort, 1<<16)
		loud := n.client.newPaced(t, f.sources[0], f.udpDoor(), paced{tag: 'l', size: 256, rate: 20000})
		quiet := n.client.newPaced(t, f.sources[1], f.udpDoor(), paced{tag: 'q', size: 256, rate: 1000})
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

		errs := []error{hold(t, e.late(packetsGiveBack, report), lab.Between(lab.Packets(tagged(list, 'l')), 0, end), 0.02, report)}
		got := tagged(list, 'q')
		waits := waitsOf(c, got)
		t.Logf("quiet: %d of %d arrived, waits p50 %v, p99 %v", len(got), sent, lab.Percentile(waits, 50), lab.Percentile(waits, 99))
		if len(got) < sent*99/100 {
			errs = append(errs, fmt.Errorf("%d of the quiet source's %d datagrams arrived", len(got), sent))
		}
		if most := 5*time.Millisecond + report.longest(); lab.Percentile(waits, 90) > most {
			errs = append(errs, fmt.Errorf("10 %% of the quiet source's datagrams waited more than %v, want at most %v", lab.Percentile(waits, 90), most))
		}
		return report, errors.Join(errs...)
	})
}

// TestBusyHostCostsNoPackets has other work take all processors. A strict limit in packets keeps
// its rate, but while its thread is not run for longer than is given back: nothing leaves
// then, and what is lost is as long as that shows for at the downstream.
func TestBusyHostCostsNoPackets(t *testing.T) {
	const rate = 10000
	f := ipv4
	fairly(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.downstream.discardUDP(t, f.udp())
		d := n.shaper.shaperd(t, config(f, limit("sms", onUDP, keySource, `packets = "10000pps"`, `max_delay = "200ms"`)))
		for range runtime.NumCPU() {
			busy := exec.Command("sh", "-c", "ulimit -t 10; while :; do :; done") // not for ever, when the test crashes
			must(t, busy.Start())
			defer func() { busy.Process.Kill(); busy.Wait() }()
		}
		stalls := startStallWatch(t)
		c := n.downstream.capture(t, downstreamLink, udpPort, 1<<16)
		p := n.client.newPaced(t, f.sources[0], f.udpDoor(), paced{tag: 1, size: 100, rate: rate * 5 / 4})
		if _, err := p.send(2 * time.Second); err != nil {
			t.Fatal(err)
		}
		end := c.Elapsed()
		list := slices.DeleteFunc(c.stop(), func(a lab.Arrival) bool { return a.At < 500*time.Millisecond || a.At > end })
		report := stalls.stop()
		mustHaveLimited(t, d, "sms")

		watched := list[len(list)-1].At - list[0].At
		lost, idle := lostInGaps(c, list, time.Second/rate)
		due := rate * (watched - lost - idle).Seconds()
		t.Logf("%d of %.0f left, %.0f were due besides in gaps, and none waited for %v", len(list), due, rate*lost.Seconds(), idle)
		var errs []error
		if got := float64(len(list)); got < 0.99*due {
			errs = append(errs, fmt.Errorf("%.0f left of %.0f", got, due))
		}
		if lost+idle > watched/2 {
			errs = append(errs, fmt.Errorf("for %v of %v nothing left, and for %v none waited", lost, watched, idle))
		}
		return report, errors.Join(errs...)
	})
}

// lostInGaps returns for how long nothing left although datagrams waited, beyond what is given
// back, and for how long none waited. After a gap of a millisecond or more those that are late
// follow one another closely: a second gap within 2 ms adds to the first one, a later one does not.
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
			l := min(gap, max(0, late+gap-packetsGiveBack))
			lost += l
			due += l
			resumed = next.At
		}
	}
	return lost, idle
}
