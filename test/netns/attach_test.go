package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"shaperd/test/lab"
)

// In these tests the shaper routes, and the packets that leave it for the downstream
// pass an attachment there. How fast they may be is in datagrams of this size.
const datagramSize = 512

// A flood is a source of four times what the limit lets pass.
type flood struct {
	rate  int // of the limit, in datagrams a second
	depth int // datagrams that may pass at once
}

// lines are those of the limit, called each, of every source.
func (f flood) lines() string {
	return limit("each", udpAtWall, keyAddress,
		fmt.Sprintf(`packets = "%dpps"`, f.rate), fmt.Sprintf("burst_packets = %d", f.depth-1), `max_delay = "0s"`)
}

// envelope is what arrives of one source. What passes at once may be late by what a
// context switch takes, in which four times the rate is sent.
func (f flood) envelope() envelope {
	return envelope{rate: float64(f.rate), burst: float64(f.depth) + 8, unit: "datagrams"}
}

// steady leaves out the datagrams that passed at once in the beginning.
func (f flood) steady(list []lab.Arrival) []lab.Arrival {
	if len(list) > 2*f.depth {
		return list[2*f.depth:]
	}
	return list
}

// TestAttachPolice has one source send four times its limit. It is to get its limit, and
// another source, below its own, is to lose nothing.
func TestAttachPolice(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			fairly(t, func() (stallReport, error) { return measurePolice(t, f) })
		})
	}
}

func measurePolice(t *testing.T, f family) (stallReport, error) {
	const span = 5 * time.Second
	// The bytes are those of 2,000 datagrams a second, and of 200 at once.
	e := envelope{rate: 2000, burst: 200 + 2 + 8, unit: "datagrams"}
	n := newNetwork(t)
	n.forward(t)
	n.downstream.discardUDP(t, f.udp())
	pins := newPins(t)
	d := n.shaper.shaperd(t, attachConfig(pins, attach(shaperRight, "police"),
		limit("each", udpAtWall, keyAddress, fmt.Sprintf(`rate = "%dbit/s"`, 2000*datagramSize*8), `max_delay = "100ms"`)))
	stalls := startStallWatch(t)
	lostBefore := kernelLost(t, n.shaper)
	c := n.downstream.capture(t, downstreamLink, udpPort, 1<<15)
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
		hold(t, e, lab.Packets(got[min(len(got), 500):]), 0.01, report),
	}
	lost := kernelLost(t, n.shaper) - lostBefore
	if arrived := len(tagged(list, 'q')); arrived > ofQuiet || arrived+lost < ofQuiet {
		errs = append(errs, fmt.Errorf("%d of the quiet source's %d datagrams arrived", arrived, ofQuiet))
	}
	m := d.metrics()
	if refused := int(m.sum("packets", `limit="each"`, `verdict="refuse"`)); refused > ofLoud.n-len(got) || refused+lost < ofLoud.n-len(got) {
		errs = append(errs, fmt.Errorf("%v datagrams are counted as refused, %d did not arrive", refused, ofLoud.n-len(got)))
	}
	if up, _ := m.up(shaperRight, "police"); up != 1 {
		errs = append(errs, fmt.Errorf("the metrics do not say that the attachment is up:\n%s", m))
	}
	d.terminate()
	d.waitExit(5 * time.Second)
	n.shaper.mustBeClean(t, pins)
	return report, errors.Join(errs...)
}

// TestAttachPoliceTCP has TCP find a limit that drops: it does not reach all of it, and
// must not exceed it.
func TestAttachPoliceTCP(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			fairly(t, func() (stallReport, error) {
				n := newNetwork(t)
				n.forward(t)
				// As on a wire: of a train of segments that comes too fast all would go.
				must(t, n.client.Segments(clientLink, 1))
				d := n.shaper.shaperd(t, attachConfig(newPins(t), attach(shaperRight, "police"),
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
				t.Logf("iperf3 finds %.1f %% of the limit; %v", 100*got, stalled)
				// What passes at once is 3.3 % of three seconds.
				if got < 0.4-stalled.share(3*time.Second) || got > 1.05 {
					return stalled, fmt.Errorf("iperf3 finds %.1f %% of the limit, want 40 %% to 105 %%", 100*got)
				}
				return stalled, nil
			})
		})
	}
}

// TestAttachObserve sends far more than a limit that only counts.
func TestAttachObserve(t *testing.T) {
	lines := []string{udpAtWall, keyAddress, `packets = "100pps"`, `max_delay = "10ms"`}
	for _, test := range []struct{ name, mode, limit string }{
		{"attachment", "observe", limit("each", lines...)},
		{"limit", "police", limit("each", append(lines, `observe = true`)...)},
	} {
		t.Run(test.name, func(t *testing.T) {
			fairly(t, func() (stallReport, error) {
				f := ipv4
				n := newNetwork(t)
				n.forward(t)
				n.downstream.discardUDP(t, f.udp())
				d := n.shaper.shaperd(t, attachConfig(newPins(t), attach(shaperRight, test.mode), test.limit))
				stalls := startStallWatch(t)
				lostBefore := kernelLost(t, n.shaper)
				c := n.downstream.capture(t, downstreamLink, udpPort, 1<<14)
				p := n.client.newPaced(t, f.sources[0], f.udp(), paced{size: datagramSize, rate: 2000})
				sent, err := p.send(time.Second)
				if err != nil {
					t.Fatal(err)
				}
				list, report := c.stop(), stalls.stop()
				m := d.metrics()
				counted := func(verdict string) float64 {
					return m.sum("limit_packets", `limit="each"`, fmt.Sprintf("verdict=%q", verdict))
				}
				if len(list) == 0 {
					t.Fatal("nothing arrived")
				}
				t.Logf("%d of %d arrived; %v counted as passed, %v as delayed, %v as refused",
					len(list), sent, counted("pass"), counted("delay"), counted("refuse"))
				var errs []error
				lost := kernelLost(t, n.shaper) - lostBefore
				if len(list) > sent || len(list)+lost < sent {
					errs = append(errs, fmt.Errorf("%d of %d datagrams arrived", len(list), sent))
				}
				if all := int(counted("pass") + counted("delay") + counted("refuse")); all > sent || all+lost < sent {
					errs = append(errs, fmt.Errorf("%v datagrams are counted, %d were sent", all, sent))
				}
				// 100 a second pass, and two at once; fewer when none come for a while.
				span := list[len(list)-1].At - list[0].At
				want := 2 + 100*span.Seconds()
				if taken := counted("pass") + counted("delay"); taken < want*0.93-100*report.sum() || taken > want*1.13 {
					errs = append(errs, fmt.Errorf("%v datagrams are counted as taken, want %.0f", taken, want))
				}
				return report, errors.Join(errs...)
			})
		})
	}
}

// TestAttachReload reloads all the time while a source sends four times its limit:
// neither does a reload hand out a burst, nor is there a moment without the limit.
func TestAttachReload(t *testing.T) {
	const reloads = 100
	fl := flood{rate: 2000, depth: 200}
	other := limit("other", `match = { attach = ["wall"], source = ["10.9.0.0/16"], port = ["7"] }`, keyAll, `rate = "1MB/s"`)
	for _, test := range []struct {
		name      string
		reloads   int
		tolerance float64 // by which the mean rate may fall short
		texts     func(pins string) []string
	}{
		{
			"policy", reloads, 0.01,
			func(pins string) []string {
				at := attach(shaperRight, "police")
				return []string{
					attachConfig(pins, at, fl.lines()),
					attachConfig(pins, at, other, fl.lines()),
					strings.Replace(attachConfig(pins, at, fl.lines()), "[[limit]]", "[[limti]]", 1), // which stays without effect
				}
			},
		}, {
			"programs", 5, 0.01,
			func(pins string) []string {
				return []string{
					attachConfig(pins, attach(shaperRight, "police", `on_stop = "keep"`), fl.lines()),
					attachConfig(pins, attach(shaperRight, "police"), fl.lines()),
				}
			},
		}, {
			// For a moment each packet has to pass both hooks: what one takes, the
			// other then refuses.
			"hooks", 5, 0.3,
			func(pins string) []string {
				return []string{
					attachConfig(pins, attach(shaperRight, "police", `hook = "clsact"`), fl.lines()),
					attachConfig(pins, attach(shaperRight, "police", `hook = "tcx"`), fl.lines()),
				}
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			fairly(t, func() (stallReport, error) {
				f := ipv4
				n := newNetwork(t)
				n.forward(t)
				n.downstream.discardUDP(t, f.udp())
				pins := newPins(t)
				texts := test.texts(pins)
				d := n.shaper.shaperd(t, attachConfig(pins, attach(shaperRight, "police"), fl.lines()))
				return fl.during(t, n, f, 4500*time.Millisecond, test.tolerance, func(c *capture) {
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

// during sends the flood for a while, and until do is done, and holds what arrives to the
// limit.
func (fl flood) during(t *testing.T, n *network, f family, span time.Duration, tolerance float64, do func(*capture)) (stallReport, error) {
	t.Helper()
	stalls := startStallWatch(t)
	c := n.downstream.capture(t, downstreamLink, udpPort, 1<<16)
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
		hold(t, e, lab.Packets(fl.steady(list)), tolerance, report),
	}
	if most := e.rate*took.Seconds() + e.burst; float64(len(list)) > most {
		errs = append(errs, fmt.Errorf("%d datagrams arrived, want at most %.0f", len(list), most))
	}
	return report, errors.Join(errs...)
}

// TestAttachKilledKeep kills a daemon whose attachment is to stay, and starts another one.
func TestAttachKilledKeep(t *testing.T) {
	fl := flood{rate: 2000, depth: 200}
	fairly(t, func() (stallReport, error) {
		f := ipv4
		n := newNetwork(t)
		n.forward(t)
		n.downstream.discardUDP(t, f.udp())
		pins := newPins(t)
		text := attachConfig(pins, attach(shaperRight, "police", `on_stop = "keep"`, `hook = "tcx"`), fl.lines())
		d := n.shaper.shaperd(t, text)
		report, err := fl.during(t, n, f, 7500*time.Millisecond, 0.01, func(*capture) {
			time.Sleep(500 * time.Millisecond)
			d.kill()
			time.Sleep(5500 * time.Millisecond) // for longer than others are waited for
			d = n.shaper.shaperd(t, text)
			time.Sleep(500 * time.Millisecond)
			mustHaveLimited(t, d, "each")
		})
		// A daemon that ends in order leaves it, too.
		d.terminate()
		d.waitExit(5 * time.Second)
		if len(n.shaper.programs(t)) == 0 {
			t.Error("nothing is attached after SIGTERM")
		}
		if r := n.shaper.command(t, "detach", "--pins", pins); r.code != 0 || r.stderr != "" || r.stdout != "detached all of "+pins+"\n" {
			t.Errorf("detach: %+v", r)
		}
		n.shaper.mustBeClean(t, pins)
		if r := n.shaper.command(t, "detach", "--pins", pins); r.code != 0 || r.stdout != "nothing of shaperd is pinned in "+pins+"\n" {
			t.Errorf("detach once more: %+v", r)
		}
		return report, err
	})
}

// TestAttachKilledOpen kills a daemon whose attachment is not to stay: everything passes
// 5 s after it was seen last, and no sooner.
func TestAttachKilledOpen(t *testing.T) {
	fairly(t, func() (stallReport, error) { return measureKilledOpen(t, flood{rate: 2000, depth: 200}) })
}

func measureKilledOpen(t *testing.T, fl flood) (stallReport, error) {
	f := ipv4
	n := newNetwork(t)
	n.forward(t)
	n.downstream.discardUDP(t, f.udp())
	pins := newPins(t)
	text := attachConfig(pins, attach(shaperRight, "police", `hook = "clsact"`), fl.lines())
	d := n.shaper.shaperd(t, text)
	if r := n.shaper.command(t, "detach", "--pins", pins); r.code != 1 ||
		!strings.HasPrefix(r.stderr, "shaperd: a daemon runs: stop it first, or ") {
		t.Errorf("detach while a daemon runs: %+v", r)
	}
	time.Sleep(1500 * time.Millisecond) // until it has been seen more than once
	stalls := startStallWatch(t)
	c := n.downstream.capture(t, downstreamLink, udpPort, 1<<17)
	p := n.client.newPaced(t, f.sources[0], f.udp(), paced{size: datagramSize, rate: 4 * fl.rate})
	type sent struct {
		n   int
		err error
	}
	const span = 11 * time.Second
	done := make(chan sent)
	go func() {
		n, err := p.send(span)
		done <- sent{n, err}
	}()
	time.Sleep(time.Second)
	killed := c.Elapsed()
	d.kill()
	dead := c.Elapsed() // on a busy machine seconds later
	time.Sleep(6500 * time.Millisecond)
	restarted := c.Elapsed()
	again, ready := n.shaper.shaperd(t, text), c.Elapsed()
	s := <-done
	if s.err != nil {
		t.Fatal(s.err)
	}
	list, report := c.stop(), stalls.stop()

	e := fl.envelope()
	limited := lab.Between(lab.Packets(fl.steady(list)), 0, killed+3900*time.Millisecond)
	errs := []error{hold(t, e, limited, 0.01, report)}
	open := lab.Between(lab.Packets(list), dead+5*time.Second+100*time.Millisecond, restarted)
	offered := envelope{rate: float64(4 * fl.rate), burst: 4 * float64(fl.rate), unit: "datagrams"}
	if err := offered.checkMean(open, 0.05, report); err != nil {
		errs = append(errs, fmt.Errorf("5 s after the daemon was killed: %w", err))
	}
	// The next one finds buckets that have drained.
	errs = append(errs, hold(t, e, lab.Between(lab.Packets(list), ready, span), 0.02, report))

	again.kill()
	time.Sleep(3500 * time.Millisecond) // as long as it may still be alive
	if len(n.shaper.programs(t)) == 0 {
		t.Error("nothing is attached after SIGKILL")
	}
	if r := n.shaper.command(t, "detach", "--pins", pins); r.code != 0 || r.stderr != "" {
		t.Errorf("detach: %+v", r)
	}
	n.shaper.mustBeClean(t, pins)
	return report, errors.Join(errs...)
}

// TestAttachAppears has an interface come, go and come again.
func TestAttachAppears(t *testing.T) {
	f := ipv4
	n := newNetwork(t)
	n.forward(t)
	pins := newPins(t)
	d := n.shaper.shaperd(t, attachConfig(pins, attach("late?", "police"), flood{rate: 1, depth: 1}.lines()))
	wantUp := func(at string, want float64) {
		t.Helper()
		waitFor(t, 5*time.Second, func() error {
			m := d.metrics()
			if got, ok := m.up(at, "police"); !ok || got != want {
				return fmt.Errorf("shaperd_attachment_up of %q is %v, %v, want %v:\n%s", at, got, ok, want, m)
			}
			return nil
		})
	}
	wantWaiting := func(last string) {
		t.Helper()
		waitFor(t, 5*time.Second, func() error {
			m := d.metrics()
			_, missing := m.up("", "police")
			_, there := m.up(last, "police")
			if missing || there {
				return fmt.Errorf("no interface matches the pattern, and by the metrics one is missing (%v) or there (%v)", missing, there)
			}
			return nil
		})
	}
	wantWaiting("late0")
	n.downstream.discardUDP(t, netip.AddrPortFrom(f.any, udpPort))
	for _, name := range []string{"late0", "late0", "late1"} {
		before := len(d.log.String())
		must(t, errors.Join(
			lab.Join(n.shaper.Host, name, n.downstream.Host, "new"),
			n.shaper.Address(name, 24, netip.MustParseAddr("10.3.0.1")),
			n.downstream.Address("new", 24, netip.MustParseAddr("10.3.0.5"))))
		wantUp(name, 1)
		if _, ok := d.metrics().up("", "police"); ok {
			t.Error("the attachment is at no interface, too, by the metrics")
		}
		// One datagram of a source passes each second.
		to := netip.AddrPortFrom(netip.MustParseAddr("10.3.0.5"), udpPort)
		c := n.downstream.capture(t, "new", udpPort, 1<<12)
		p := n.client.newPaced(t, f.sources[0], to, paced{size: datagramSize, rate: 1000})
		sent, err := p.send(500 * time.Millisecond)
		must(t, err)
		took := c.Elapsed()
		// One at once, and one a second.
		if got, most := len(c.stop()), 2+int(took/time.Second); got < 1 || got > most || sent < 100 {
			t.Errorf("%d of %d datagrams passed %s in %v, want 1", got, sent, name, took)
		}
		if err := n.shaper.Links.LinkDel(n.shaper.mustLink(t, name)); err != nil {
			t.Fatal(err)
		}
		wantWaiting(name)
		for _, want := range []string{
			"level=INFO msg=attached attachment=wall interface=" + name,
			`level=WARN msg="interface is gone" attachment=wall interface=` + name,
		} {
			waitFor(t, 5*time.Second, func() error {
				if said := d.log.String()[before:]; !strings.Contains(said, want) {
					return fmt.Errorf("the log has not %q:\n%s", want, said)
				}
				return nil
			})
		}
		time.Sleep(1100 * time.Millisecond) // until a datagram may pass again
	}
	d.terminate()
	d.waitExit(5 * time.Second)
	n.shaper.mustBeClean(t, pins)
}

// TestAttachRenamed has another interface get the name of an attachment, and lose it.
func TestAttachRenamed(t *testing.T) {
	n := newNetwork(t)
	d := n.shaper.shaperd(t, attachConfig(newPins(t), attach(shaperRight, "police"), flood{rate: 1, depth: 1}.lines()))
	rename := func(from, to string) {
		t.Helper()
		l := n.shaper.mustLink(t, from)
		if err := errors.Join(n.shaper.Links.LinkSetDown(l), n.shaper.Links.LinkSetName(l, to), n.shaper.Links.LinkSetUp(l)); err != nil {
			t.Fatal(err)
		}
	}
	programs := func(want ...string) {
		t.Helper()
		waitFor(t, 5*time.Second, func() error {
			if got := n.shaper.programs(t); !slices.Equal(got, want) {
				return fmt.Errorf("attached are %v, want %v", got, want)
			}
			return nil
		})
	}
	programs("TCXEgress at " + shaperRight)
	rename(shaperRight, "aside")
	programs()
	rename(shaperLeft, shaperRight)
	programs("TCXEgress at " + shaperRight)
	if up, ok := d.metrics().up(shaperRight, "police"); !ok || up != 1 {
		t.Error("shaperd_attachment_up does not say so")
	}
}
