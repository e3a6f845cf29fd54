//go:build vmguest

package netns

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// TestCompareQdiscs measures how precisely shaperd, and the kernel's own qdiscs in its place,
// shape the same datagrams to a rate. It prints a line for each, which package bench parses,
// and asserts nothing. When the guest stalls it tries again, and the run with the shortest
// stall counts. Its name does not match the pattern that guests run by default.
func TestCompareQdiscs(t *testing.T) {
	const (
		span  = 1500 * time.Millisecond
		size  = 1400
		frame = size + 8 + 20 + 14 // as qdiscs count it
		quiet = 5 * time.Millisecond
	)
	for _, mbits := range []int{10, 100} {
		bits := float64(mbits) * 1e6
		nominal := bits / 8 / frame * size // bytes of payload a second
		atOnce := max(2*1514, mbits*1e6/8/1000)
		queue := func(format string, args ...any) func(*testing.T, *host) {
			return func(t *testing.T, h *host) {
				for _, c := range strings.Split(fmt.Sprintf(format, args...), "; ") {
					h.mustOutput(t, "tc", strings.Fields(c)...)
				}
			}
		}
		programs := []struct {
			name  string
			start func(*testing.T, *host)
		}{
			{"shaperd", func(t *testing.T, h *host) {
				h.shaperd(t, attachConfig(newPinPath(t), attach(lab.MiddleRight, "shape"),
					limit("each", udpAtWall, keyAddress, fmt.Sprintf(`rate = "%dMbit/s"`, mbits), `overhead = "42B"`, `max_delay = "50ms"`)))
			}},
			{"htb", queue("qdisc add dev right root handle 1: htb default 1; class add dev right parent 1: classid 1:1 htb rate %dmbit burst %d cburst %d",
				mbits, atOnce, atOnce)},
			{"tbf", queue("qdisc add dev right root tbf rate %dmbit burst %d latency 50ms", mbits, atOnce)},
			{"fq maxrate", queue("qdisc add dev right root fq maxrate %dmbit flow_limit 1000", mbits)},
		}
		t.Run(fmt.Sprint(mbits), func(t *testing.T) {
			for run := range 2 {
				t.Run(fmt.Sprint(run+1), func(t *testing.T) {
					for _, p := range programs {
						t.Run(p.name, func(t *testing.T) {
							n := newNetwork(t)
							n.forward(t)
							to := netip.AddrPortFrom(ipv4.downstream, udpPort)
							n.downstream.discardUDP(t, to)
							p.start(t, n.shaper)
							sender := n.client.newPaced(t, ipv4.sources[0], to, paced{size: size, rate: int(1.25 * bits / 8 / frame), period: 2 * time.Millisecond})
							var best []lab.Event
							shortest := time.Hour // of the longest stalls
							for try := 0; try < 2 && shortest > quiet; try++ {
								c := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<15)
								stop := watchGuest()
								if _, err := sender.send(guestSkip/2 + span); err != nil {
									t.Fatal(err)
								}
								end, longest := c.Elapsed(), stop().longest()
								if events := lab.Between(payloads(c.stop()), end-span, end); longest < shortest {
									best, shortest = events, longest
								}
							}
							if len(best) < 100 {
								t.Fatalf("%d datagrams arrived", len(best))
							}
							t.Logf("longest stall: %v", shortest)
							printComparison(t, fmt.Sprintf("%d Mbit/s, %s", mbits, p.name), best, nominal)
						})
					}
				})
			}
		})
	}
}

func printComparison(t *testing.T, name string, events []lab.Event, nominal float64) {
	t.Helper()
	worst := func(width time.Duration) float64 {
		return float64(lab.WorstWindow(events, width)) / (nominal * width.Seconds())
	}
	gaps := lab.Gaps(events)
	ms := func(p float64) float64 { return 1000 * lab.Percentile(gaps, p).Seconds() }
	t.Logf("bench: %s: error=%.4f sigma=%.3f w10=%.3f w100=%.3f gap50=%.4f gap99=%.4f gapmax=%.3f", name,
		100*(lab.MeanRate(events)/nominal-1), lab.Sigma(events, nominal)/1000, worst(10*time.Millisecond), worst(100*time.Millisecond), ms(50), ms(99), ms(100))
}
