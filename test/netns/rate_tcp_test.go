package netns

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// tenMiB is the envelope of most TCP tests: 10 MiB/s, with a burst of 24 kB.
var tenMiB = envelope{rate: 10 << 20, burst: 24e3, unit: "bytes"}

const tenMiBLimit = `rate = "10MiB/s"
burst = "0B"
max_delay = "500ms"`

// framesOf returns the maximum number of frames in the given number of seconds at 10 MiB/s.
func framesOf(seconds int) int { return seconds * 12000 }

// TestTCPEnvelope checks four connections of one key, with both IP versions.
func TestTCPEnvelope(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			retryOnStall(t, func() (stallReport, error) {
				n := newNetwork(t)
				s := n.downstream.newSink(t, f.tcp())
				d := n.shaper.shaperd(t, config(f, limit("smooth", onTCP, keySource, tenMiBLimit)))
				b := n.client.newBulk(t, f.sources[0], f.listenAddr(), 4, 'x')
				s.wait(t, 'x', 4, patience)
				stalls := startStallWatch(t)
				c := n.downstream.capture(t, lab.DownstreamLink, tcpPort, framesOf(5))
				if err := b.flood(2500 * time.Millisecond); err != nil {
					t.Fatal(err)
				}
				end := c.Elapsed()
				events, report := lab.Between(lab.Bytes(c.stop()), 0, end), stalls.stop()
				mustHaveLimited(t, d, "smooth")
				return report, errors.Join(checkEnvelope(t, tenMiB, events, 0.02, report), s.checkFairness(0.15))
			})
		})
	}
}

// TestTCPFromDownstream checks the rate from the downstream, captured at the client.
func TestTCPFromDownstream(t *testing.T) {
	f := ipv4
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.downstream.serveTCP(t, f.tcp(), func(c *net.TCPConn) { _, _ = io.Copy(c, zeros{}) })
		d := n.shaper.shaperd(t, config(f, limit("answers", onTCP, keyAll, `direction = "from-downstream"`, tenMiBLimit)))
		stalls := startStallWatch(t)
		c := n.client.capture(t, lab.ClientLink, tcpPort, framesOf(4))
		b := n.client.newBulk(t, f.sources[0], f.listenAddr(), 4, 'x')
		deadline := time.Now().Add(2 * time.Second)
		err := b.each(func(c *net.TCPConn) error {
			if err := c.SetReadDeadline(deadline); err != nil {
				return err
			}
			_, err := io.Copy(io.Discard, c)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return nil
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		end := c.Elapsed()
		events, report := lab.Between(lab.Bytes(c.stop()), 0, end), stalls.stop()
		mustHaveLimited(t, d, "answers")
		return report, checkEnvelope(t, tenMiB, events, 0.02, report)
	})
}

// TestTCP_IdleEarnsNoCredit checks that an idle time grants no burst.
func TestTCP_IdleEarnsNoCredit(t *testing.T) {
	f := ipv4
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		s := n.downstream.newSink(t, f.tcp())
		d := n.shaper.shaperd(t, config(f, limit("smooth", onTCP, keySource, tenMiBLimit)))
		b := n.client.newBulk(t, f.sources[0], f.listenAddr(), 4, 'x')
		stalls := startStallWatch(t)
		c := n.downstream.capture(t, lab.DownstreamLink, tcpPort, framesOf(5))
		if err := b.send(1 << 20); err != nil {
			t.Fatal(err)
		}
		s.wait(t, 'x', b.sent.Load(), patience)
		idle := c.Elapsed()
		time.Sleep(800 * time.Millisecond)
		woke := c.Elapsed()
		if err := b.flood(1500 * time.Millisecond); err != nil {
			t.Fatal(err)
		}
		end := c.Elapsed()
		events, report := lab.Between(lab.Bytes(c.stop()), 0, end), stalls.stop()
		if quiet := lab.Between(events, idle+time.Millisecond, woke); len(quiet) != 0 {
			t.Fatalf("%d bytes arrived while the source was idle", lab.Total(quiet))
		}
		mustHaveLimited(t, d, "smooth")
		err := checkEnvelope(t, tenMiB, lab.Between(events, woke, end), 0.02, report)
		if over := tenMiB.checkBurst(events, report); over != nil {
			err = errors.Join(err, fmt.Errorf("including the pause: %w", over))
		}
		return report, err
	})
}

// TestTCP_NoBurstAfterReceiverPause has the downstream stop reading for a while. Data must not
// accumulate in the proxy's send buffers and then arrive at once.
func TestTCP_NoBurstAfterReceiverPause(t *testing.T) {
	const connections = 4
	f := ipv4
	// In addition to the envelope, each connection may have an unsent grant of 4 ms.
	e := tenMiB
	e.burst += connections * 44e3
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		// A small receive window.
		must(t, n.downstream.Sysctl("net/ipv4/tcp_rmem", "4096 32768 65536"))
		s := n.downstream.newSink(t, f.tcp())
		d := n.shaper.shaperd(t, config(f, limit("smooth", onTCP, keySource, tenMiBLimit)))
		b := n.client.newBulk(t, f.sources[0], f.listenAddr(), connections, 'x')
		s.wait(t, 'x', connections, patience)
		stalls := startStallWatch(t)
		c := n.downstream.capture(t, lab.DownstreamLink, tcpPort, framesOf(5))
		done := make(chan error, 1)
		go func() { done <- b.flood(2 * time.Second) }()
		time.Sleep(500 * time.Millisecond)
		var resumed time.Duration
		s.pause(500*time.Millisecond, func() { resumed = c.Elapsed() })
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		end := c.Elapsed()
		events, report := lab.Between(lab.Bytes(c.stop()), 0, end), stalls.stop()
		before := lab.Between(events, resumed-200*time.Millisecond, resumed-10*time.Millisecond)
		if got := lab.Total(before); float64(got) > 0.05*e.rate {
			return report, fmt.Errorf("%d bytes arrived while the downstream did not read: there was no backpressure", got)
		}
		mustHaveLimited(t, d, "smooth")
		after := lab.Between(events, resumed, end)
		t.Logf("after the pause: sigma %.0f bytes; %v", lab.Sigma(after, e.rate), report)
		return report, errors.Join(e.checkBurst(after, report), e.checkMean(after, 0.05, report))
	})
}

// TestTCP_IdleConnectionsTakeNoShare has 49 idle connections with the key of a busy one, which
// must get the whole rate.
func TestTCP_IdleConnectionsTakeNoShare(t *testing.T) {
	f := ipv4
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		s := n.downstream.newSink(t, f.tcp())
		d := n.shaper.shaperd(t, config(f, limit("smooth", onTCP, keySource, tenMiBLimit)))
		n.client.newBulk(t, f.sources[0], f.listenAddr(), 49, 'i')
		b := n.client.newBulk(t, f.sources[0], f.listenAddr(), 1, 'b')
		s.wait(t, 'i', 49, patience)
		s.wait(t, 'b', 1, patience)
		stalls := startStallWatch(t)
		c := n.downstream.capture(t, lab.DownstreamLink, tcpPort, framesOf(4))
		if err := b.flood(2 * time.Second); err != nil {
			t.Fatal(err)
		}
		end := c.Elapsed()
		list, report := s.arrivals('b', c.stop()), stalls.stop()
		mustHaveLimited(t, d, "smooth")
		return report, checkEnvelope(t, tenMiB, lab.Between(lab.Bytes(list), 0, end), 0.02, report)
	})
}

// TestTwoSourcesTCP has one source send at full speed on twenty connections. The other, with one
// connection, must get its own rate in full.
func TestTwoSourcesTCP(t *testing.T) {
	e := envelope{rate: 2 << 20, burst: 24e3, unit: "bytes"}
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			retryOnStall(t, func() (stallReport, error) {
				n := newNetwork(t)
				s := n.downstream.newSink(t, f.tcp())
				d := n.shaper.shaperd(t, config(f, limit("each", onTCP, keySource, `rate = "2MiB/s"`, `max_delay = "500ms"`)))
				quiet := n.client.newBulk(t, f.sources[1], f.listenAddr(), 1, 'q')
				loud := n.client.newBulk(t, f.sources[0], f.listenAddr(), 20, 'l')
				s.wait(t, 'q', 1, patience)
				s.wait(t, 'l', 20, patience)
				stalls := startStallWatch(t)
				c := n.downstream.capture(t, lab.DownstreamLink, tcpPort, framesOf(4))
				done := make(chan error)
				go func() { done <- loud.flood(2500 * time.Millisecond) }()
				err := errors.Join(quiet.flood(2500*time.Millisecond), <-done)
				if err != nil {
					t.Fatal(err)
				}
				end := c.Elapsed()
				list, report := c.stop(), stalls.stop()
				mustHaveLimited(t, d, "each")
				for _, tag := range []byte("ql") {
					if held := checkEnvelope(t, e, lab.Between(lab.Bytes(s.arrivals(tag, list)), 0, end), 0.03, report); held != nil {
						err = errors.Join(err, fmt.Errorf("source %c: %w", tag, held))
					}
				}
				return report, err
			})
		})
	}
}

// TestObserve checks that an observing limit counts delays and does not delay: it would for 32 seconds.
func TestObserve(t *testing.T) {
	f := ipv4
	n := newNetwork(t)
	s := n.downstream.newSink(t, f.tcp())
	text := strings.Replace(config(f, limit("smooth", onTCP, keySource, `rate = "1MiB/s"`)), `observe = false`, `observe = true`, 1)
	d := n.shaper.shaperd(t, text)
	b := n.client.newBulk(t, f.sources[0], f.listenAddr(), 1, 'x')
	start := time.Now()
	if err := b.send(32 << 20); err != nil {
		t.Fatal(err)
	}
	s.wait(t, 'x', b.sent.Load(), patience)
	if took := time.Since(start); took > 25*time.Second {
		t.Errorf("observed traffic took %v, as if the limit were enforced", took)
	}
	mustHaveLimited(t, d, "smooth")
}

// checkEnvelope checks events against the envelope, and logs their figures.
func checkEnvelope(t *testing.T, e envelope, events []lab.Event, tolerance float64, report stallReport) error {
	t.Helper()
	t.Logf("%d %s, mean %+.3f %% off the rate, sigma %.2f; %v",
		lab.Total(events), e.unit, 100*(lab.MeanRate(events)/e.rate-1), lab.Sigma(events, e.rate), report)
	return errors.Join(e.checkBurst(events, report), e.checkMean(events, tolerance, report))
}

// mustHaveLimited fails the test if the daemon's metrics have no delay or refusal by the limit: a
// test of a limiter that never limits proves nothing.
func mustHaveLimited(t *testing.T, d *daemon, name string) {
	t.Helper()
	label := `limit="` + name + `"`
	waitFor(t, patience, func() error {
		m := d.metrics()
		if m.Sum("", label, `verdict="delay"`)+m.Sum("", label, `verdict="refuse"`) == 0 {
			return fmt.Errorf("the metrics have no delay and no refusal by %s:\n%s", name, m)
		}
		return nil
	})
}

// checkFairness checks that all connections of the sink got the same number of bytes, within tolerance of their mean.
func (s *sink) checkFairness(tolerance float64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var sum float64
	for _, c := range s.conns {
		sum += float64(c.got.Load())
	}
	mean := sum / float64(len(s.conns))
	for _, c := range s.conns {
		if got := float64(c.got.Load()); got < mean*(1-tolerance) || got > mean*(1+tolerance) {
			return fmt.Errorf("one of %d connections got %.0f bytes, their mean is %.0f", len(s.conns), got, mean)
		}
	}
	return nil
}
