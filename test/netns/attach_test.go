package netns

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// In these tests the shaper routes, and packets to the downstream pass an attachment at its
// egress. Rates are in datagrams of this size.
const datagramSize = 512

// A flood is a source that sends four times the rate of its limit.
type flood struct {
	rate  int // of the limit, in datagrams a second
	depth int // burst, in datagrams
}

// lines returns the lines of the limit, called each, with a bucket per source.
func (f flood) lines() string {
	return limit("each", udpAtWall, keyAddress,
		fmt.Sprintf(`packets = "%dpps"`, f.rate), fmt.Sprintf("burst_packets = %d", f.depth-1), `max_delay = "0s"`)
}

// envelope returns the expected arrivals of one source. The burst may be delayed by a context
// switch, during which four times the rate is sent.
func (f flood) envelope() envelope {
	return envelope{rate: float64(f.rate), burst: float64(f.depth) + 8, unit: "datagrams"}
}

// steady removes the initial burst.
func (f flood) steady(list []lab.Arrival) []lab.Arrival {
	if len(list) > 2*f.depth {
		return list[2*f.depth:]
	}
	return list
}

// TestAttachPolice has one source send four times its limit. It must get its limit, and another
// source, below its own limit, must lose nothing.
func TestAttachPolice(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			retryOnStall(t, func() (stallReport, error) { return measurePolice(t, f) })
		})
	}
}

func measurePolice(t *testing.T, f family) (stallReport, error) {
	const span = 5 * time.Second
	// The byte rate is that of 2,000 datagrams a second, with a burst of 200.
	e := envelope{rate: 2000, burst: 200 + 2 + 8, unit: "datagrams"}
	n := newNetwork(t)
	n.forward(t)
	n.downstream.discardUDP(t, f.udp())
	pins := newPinPath(t)
	d := n.shaper.shaperd(t, attachConfig(pins, attach(lab.MiddleRight, "police"),
		limit("each", udpAtWall, keyAddress, fmt.Sprintf(`rate = "%dbit/s"`, 2000*datagramSize*8), `max_delay = "100ms"`)))
	stalls := startStallWatch(t)
	lostBefore := kernelDrops(t, n.shaper)
	c := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<15)
	loud := n.client.newPaced(t, f.sources[0], f.udp(), paced{tag: 'l', size: datagramSize, rate: 8000})
	quiet := n.client.newPaced(t, f.sources[1], f.udp(), paced{tag: 'q', size: datagramSize, rate: 1000})
	type sent struct {
		n   int
		err error
	}
	done := make(chan sent)
	go func() {
		n, err := loud.send(span)
		done <- sent{n, err}
	}()
	ofQuiet, err := quiet.send(span)
	ofLoud := <-done
	if err := errors.Join(err, ofLoud.err); err != nil {
		t.Fatal(err)
	}
	list, report := c.stop(), stalls.stop()

	got := tagged(list, 'l')
	errs := []error{
		e.checkBurst(lab.Packets(got), report),
		checkEnvelope(t, e, lab.Packets(got[min(len(got), 500):]), 0.01, report),
	}
	lost := kernelDrops(t, n.shaper) - lostBefore
	if arrived := len(tagged(list, 'q')); arrived > ofQuiet || arrived+lost < ofQuiet {
		errs = append(errs, fmt.Errorf("%d of the quiet source's %d datagrams arrived", arrived, ofQuiet))
	}
	m := d.metrics()
	if refused := int(m.Sum("packets", `limit="each"`, `verdict="refuse"`)); refused > ofLoud.n-len(got) || refused+lost < ofLoud.n-len(got) {
		errs = append(errs, fmt.Errorf("%v datagrams counted as refused, %d did not arrive", refused, ofLoud.n-len(got)))
	}
	if up, _ := attachmentUp(m, lab.MiddleRight, "police"); up != 1 {
		errs = append(errs, fmt.Errorf("the attachment is not up in the metrics:\n%s", m))
	}
	d.terminate()
	d.waitExit(patience)
	n.shaper.mustBeClean(t, pins)
	return report, errors.Join(errs...)
}

// TestAttachPoliceTCP sends TCP through a limit that drops: it may stay below the limit, and must not exceed it.
func TestAttachPoliceTCP(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			retryOnStall(t, func() (stallReport, error) {
				n := newNetwork(t)
				n.forward(t)
				// Single segments, as on a wire: a train that exceeds the limit would be dropped as a whole.
				must(t, n.client.SetMaxSegments(lab.ClientLink, 1))
				d := n.shaper.shaperd(t, attachConfig(newPinPath(t), attach(lab.MiddleRight, "police"),
					limit("each", atWall, keyAddress, `rate = "80Mbit/s"`, `max_delay = "100ms"`)))
				var report struct {
					End struct {
						SumReceived struct {
							Rate float64 `json:"bits_per_second"`
						} `json:"sum_received"`
					}
				}
				stalls := startStallWatch(t)
				iperf3(t, n, f, f.downstream, &report, "--time", "3", "--parallel", "2")
				stalled := stalls.stop()
				mustHaveLimited(t, d, "each")
				got := report.End.SumReceived.Rate / 80e6
				t.Logf("iperf3 measured %.1f %% of the limit; %v", 100*got, stalled)
				// The burst is 3.3 % of three seconds.
				if got < 0.4-stalled.share(3*time.Second) || got > 1.05 {
					return stalled, fmt.Errorf("iperf3 measured %.1f %% of the limit, want 40 %% to 105 %%", 100*got)
				}
				return stalled, nil
			})
		})
	}
}

// TestAttachObserve sends far more than an observing limit allows.
func TestAttachObserve(t *testing.T) {
	lines := []string{udpAtWall, keyAddress, `packets = "100pps"`, `max_delay = "10ms"`}
	for _, test := range []struct{ name, mode, limit string }{
		{"attachment", "observe", limit("each", lines...)},
		{"limit", "police", limit("each", append(lines, `observe = true`)...)},
	} {
		t.Run(test.name, func(t *testing.T) {
			retryOnStall(t, func() (stallReport, error) {
				f := ipv4
				n := newNetwork(t)
				n.forward(t)
				n.downstream.discardUDP(t, f.udp())
				d := n.shaper.shaperd(t, attachConfig(newPinPath(t), attach(lab.MiddleRight, test.mode), test.limit))
				stalls := startStallWatch(t)
				lostBefore := kernelDrops(t, n.shaper)
				c := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<14)
				p := n.client.newPaced(t, f.sources[0], f.udp(), paced{size: datagramSize, rate: 2000})
				sent, err := p.send(time.Second)
				if err != nil {
					t.Fatal(err)
				}
				list, report := c.stop(), stalls.stop()
				m := d.metrics()
				counted := func(verdict string) float64 {
					return m.Sum("limit_packets", `limit="each"`, fmt.Sprintf("verdict=%q", verdict))
				}
				if len(list) == 0 {
					t.Fatal("nothing arrived")
				}
				t.Logf("%d of %d arrived; counted: %v passed, %v delayed, %v refused",
					len(list), sent, counted("pass"), counted("delay"), counted("refuse"))
				var errs []error
				lost := kernelDrops(t, n.shaper) - lostBefore
				if len(list) > sent || len(list)+lost < sent {
					errs = append(errs, fmt.Errorf("%d of %d datagrams arrived", len(list), sent))
				}
				if all := int(counted("pass") + counted("delay") + counted("refuse")); all > sent || all+lost < sent {
					errs = append(errs, fmt.Errorf("%v datagrams counted, %d sent", all, sent))
				}
				// 100 a second conform, and a burst of two; fewer when none arrive for a while.
				span := list[len(list)-1].At - list[0].At
				want := 2 + 100*span.Seconds()
				if conformant := counted("pass") + counted("delay"); conformant < want*0.93-100*report.sum() || conformant > want*1.13 {
					errs = append(errs, fmt.Errorf("%v datagrams counted as conformant, want %.0f", conformant, want))
				}
				return report, errors.Join(errs...)
			})
		})
	}
}

// TestAttachReload reloads continuously while a source sends four times its limit: a reload
// must not grant a burst, and the limit must apply at every moment.
func TestAttachReload(t *testing.T) {
	const reloads = 100
	fl := flood{rate: 2000, depth: 200}
	other := limit("other", `match = { attach = ["wall"], source = ["10.9.0.0/16"], port = ["7"] }`, keyAll, `rate = "1MB/s"`)
	for _, test := range []struct {
		name      string
		reloads   int
		tolerance float64 // allowed shortfall of the mean rate
		texts     func(pins string) []string
	}{
		{
			"policy", reloads, 0.01,
			func(pins string) []string {
				at := attach(lab.MiddleRight, "police")
				return []string{
					attachConfig(pins, at, fl.lines()),
					attachConfig(pins, at, other, fl.lines()),
					strings.Replace(attachConfig(pins, at, fl.lines()), "[[limit]]", "[[limti]]", 1), // has no effect
				}
			},
		}, {
			"programs", 5, 0.01,
			func(pins string) []string {
				return []string{
					attachConfig(pins, attach(lab.MiddleRight, "police", `on_stop = "keep"`), fl.lines()),
					attachConfig(pins, attach(lab.MiddleRight, "police"), fl.lines()),
				}
			},
		}, {
			// For a moment each packet passes both hooks, and each of them refuses packets that the other admits.
			"hooks", 5, 0.3,
			func(pins string) []string {
				return []string{
					attachConfig(pins, attach(lab.MiddleRight, "police", `hook = "clsact"`), fl.lines()),
					attachConfig(pins, attach(lab.MiddleRight, "police", `hook = "tcx"`), fl.lines()),
				}
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			retryOnStall(t, func() (stallReport, error) {
				f := ipv4
				n := newNetwork(t)
				n.forward(t)
				n.downstream.discardUDP(t, f.udp())
				pins := newPinPath(t)
				texts := test.texts(pins)
				d := n.shaper.shaperd(t, attachConfig(pins, attach(lab.MiddleRight, "police"), fl.lines()))
				return fl.measureDuring(t, n, f, 4500*time.Millisecond, test.tolerance, func(c *capture) {
					time.Sleep(300 * time.Millisecond)
					began := c.Elapsed()
					for i := range test.reloads {
						time.Sleep(began + time.Duration(i)*3*time.Second/time.Duration(test.reloads) - c.Elapsed())
						d.reload(texts[i%len(texts)])
					}
					mustHaveLimited(t, d, "each")
				})
			})
		})
	}
}

// measureDuring sends the flood for at least span, and until do returns, and checks the arrivals against the limit.
func (fl flood) measureDuring(t *testing.T, n *network, f family, span time.Duration, tolerance float64, do func(*capture)) (stallReport, error) {
	t.Helper()
	stalls := startStallWatch(t)
	c := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<16)
	p := n.client.newPaced(t, f.sources[0], f.udp(), paced{size: datagramSize, rate: 4 * fl.rate})
	done := make(chan error)
	var did atomic.Bool
	go func() {
		_, err := p.send(span)
		for err == nil && !did.Load() {
			_, err = p.send(100 * time.Millisecond)
		}
		done <- err
	}()
	do(c)
	did.Store(true)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	took := c.Elapsed()
	list, report := c.stop(), stalls.stop()
	e := fl.envelope()
	errs := []error{
		e.checkBurst(lab.Packets(list), report),
		checkEnvelope(t, e, lab.Packets(fl.steady(list)), tolerance, report),
	}
	if most := e.rate*took.Seconds() + e.burst; float64(len(list)) > most {
		errs = append(errs, fmt.Errorf("%d datagrams arrived, want at most %.0f", len(list), most))
	}
	return report, errors.Join(errs...)
}

// TestAttach_KeptAfterKill kills a daemon with on_stop = "keep", and starts another one: the
// limit applies throughout.
func TestAttach_KeptAfterKill(t *testing.T) {
	t.Parallel()
	fl := flood{rate: 2000, depth: 200}
	retryOnStall(t, func() (stallReport, error) {
		f := ipv4
		n := newNetwork(t)
		n.forward(t)
		n.downstream.discardUDP(t, f.udp())
		pins := newPinPath(t)
		text := attachConfig(pins, attach(lab.MiddleRight, "police", `on_stop = "keep"`, `hook = "tcx"`), fl.lines())
		d := n.shaper.shaperd(t, text)
		report, err := fl.measureDuring(t, n, f, 7500*time.Millisecond, 0.01, func(*capture) {
			time.Sleep(500 * time.Millisecond)
			d.Kill()
			time.Sleep(5500 * time.Millisecond) // longer than the grace period of other attachments
			d = n.shaper.shaperd(t, text)
			time.Sleep(500 * time.Millisecond)
			mustHaveLimited(t, d, "each")
		})
		// It also survives a graceful stop.
		d.terminate()
		d.waitExit(patience)
		if len(n.shaper.programs(t)) == 0 {
			t.Error("nothing is attached after SIGTERM")
		}
		if r := n.shaper.command(t, "detach", "--pin-path", pins); r.code != 0 || r.stderr != "" || r.stdout != "detached everything pinned in "+pins+"\n" {
			t.Errorf("detach: %+v", r)
		}
		n.shaper.mustBeClean(t, pins)
		if r := n.shaper.command(t, "detach", "--pin-path", pins); r.code != 0 || r.stdout != "nothing is pinned in "+pins+"\n" {
			t.Errorf("second detach: %+v", r)
		}
		return report, err
	})
}

// TestAttach_OpensAfterKill kills a daemon with on_stop = "open": everything passes 5 s after
// its last heartbeat, and no sooner.
func TestAttach_OpensAfterKill(t *testing.T) {
	t.Parallel()
	retryOnStall(t, func() (stallReport, error) { return measureKilledOpen(t, flood{rate: 2000, depth: 200}) })
}

func measureKilledOpen(t *testing.T, fl flood) (stallReport, error) {
	f := ipv4
	n := newNetwork(t)
	n.forward(t)
	n.downstream.discardUDP(t, f.udp())
	pins := newPinPath(t)
	text := attachConfig(pins, attach(lab.MiddleRight, "police", `hook = "clsact"`), fl.lines())
	d := n.shaper.shaperd(t, text)
	if r := n.shaper.command(t, "detach", "--pin-path", pins); r.code != 1 ||
		!strings.HasPrefix(r.stderr, "shaperd: a daemon is running: stop it first, or ") {
		t.Errorf("detach while a daemon runs: %+v", r)
	}
	time.Sleep(1500 * time.Millisecond) // several heartbeats
	stalls := startStallWatch(t)
	c := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<18)
	p := n.client.newPaced(t, f.sources[0], f.udp(), paced{size: datagramSize, rate: 4 * fl.rate})
	done := make(chan error, 1)
	var did atomic.Bool
	go func() {
		var err error
		for err == nil && !did.Load() {
			_, err = p.send(100 * time.Millisecond)
		}
		done <- err
	}()
	defer did.Store(true)
	time.Sleep(time.Second)
	killed := c.Elapsed()
	d.Kill()
	dead := c.Elapsed() // on a busy machine seconds later
	time.Sleep(6500 * time.Millisecond)
	restarted := c.Elapsed()
	again, ready := n.shaper.shaperd(t, text), c.Elapsed()
	time.Sleep(2500 * time.Millisecond)
	end := c.Elapsed()
	did.Store(true)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	list, report := c.stop(), stalls.stop()

	e := fl.envelope()
	// The last heartbeat may have been late by a second.
	limited := lab.Between(lab.Packets(fl.steady(list)), 0, killed+3*time.Second)
	errs := []error{checkEnvelope(t, e, limited, 0.01, report)}
	open := lab.Between(lab.Packets(list), dead+5*time.Second+100*time.Millisecond, restarted)
	offered := envelope{rate: float64(4 * fl.rate), burst: 4 * float64(fl.rate), unit: "datagrams"}
	if err := offered.checkMean(open, 0.05, report); err != nil {
		errs = append(errs, fmt.Errorf("5 s after the daemon was killed: %w", err))
	}
	// The next daemon starts with drained buckets.
	errs = append(errs, checkEnvelope(t, e, lab.Between(lab.Packets(list), ready, end), 0.02, report))

	again.Kill()
	time.Sleep(3500 * time.Millisecond) // as long as its heartbeat counts as alive
	if len(n.shaper.programs(t)) == 0 {
		t.Error("nothing is attached after SIGKILL")
	}
	if r := n.shaper.command(t, "detach", "--pin-path", pins); r.code != 0 || r.stderr != "" {
		t.Errorf("detach: %+v", r)
	}
	n.shaper.mustBeClean(t, pins)
	return report, errors.Join(errs...)
}
