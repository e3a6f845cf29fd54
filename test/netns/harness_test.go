package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// TestHarness sends from client to downstream without a daemon, through the routing shaper,
// and checks capture and analysis against what was sent.
func TestHarness(t *testing.T) {
	for _, f := range families {
		t.Run(f.name+"/udp", func(t *testing.T) {
			retryOnStall(t, func() (stallReport, error) { return measureHarness(t, f) })
		})
		t.Run(f.name+"/tcp", func(t *testing.T) {
			n := newNetwork(t)
			n.forward(t)
			to := netip.AddrPortFrom(f.downstream, tcpPort)
			s := n.downstream.newSink(t, to)
			c := n.downstream.capture(t, lab.DownstreamLink, tcpPort, 1<<17)
			b := n.client.newBulk(t, f.sources[0], to, 3, 'x')
			if err := b.send(4 << 20); err != nil {
				t.Fatal(err)
			}
			s.wait(t, 'x', b.sent.Load(), patience)
			in := c.stop()
			for _, a := range in {
				if a.Payload > 1460 {
					t.Fatalf("captured %d bytes in one frame: segments were merged", a.Payload)
				}
			}
			if got := lab.Total(lab.Bytes(in)); int64(got) != b.sent.Load() {
				t.Errorf("captured %d bytes, sent %d", got, b.sent.Load())
			}
			if got := len(s.arrivals('x', in)); got != len(in) {
				t.Errorf("the sink parsed %d of %d frames", got, len(in))
			}
			e := envelope{rate: 10 << 20, burst: 24e3, unit: "bytes"}
			if e.checkBurst(lab.Bytes(in), nil) == nil {
				t.Error("the check accepted an unshaped stream")
			}
			t.Logf("%.0f MB/s, sigma over 10 MiB/s %.0f bytes", lab.MeanRate(lab.Bytes(in))/1e6, lab.Sigma(lab.Bytes(in), 10<<20))
		})
	}
}

// measureHarness captures unshaped traffic: the checks must accept its rate, and reject half of it.
func measureHarness(t *testing.T, f family) (stallReport, error) {
	n := newNetwork(t)
	n.forward(t)
	to := netip.AddrPortFrom(f.downstream, udpPort)
	n.downstream.discardUDP(t, to)
	stalls := startStallWatch(t)
	lostBefore := kernelDrops(t, n.shaper)
	c := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<14)
	p := n.client.newPaced(t, f.sources[1], to, paced{tag: 7, size: 512, rate: 5000})
	sent, err := p.send(500 * time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	list, report := c.stop(), stalls.stop()
	// The kernel drops some when the sender catches up after a stall.
	lost := kernelDrops(t, n.shaper) - lostBefore
	if sent < 2000 || len(list) > sent || len(list)+lost < sent {
		t.Fatalf("%d of %d datagrams captured, want all but %d, and at least 2000", len(list), sent, lost)
	}
	var errs []error
	for _, a := range list {
		if a.Payload != 512 || tagOf(a) != 7 || a.From.Addr() != f.sources[1] || a.To != to || a.Outgoing {
			t.Fatalf("captured %+v, want 512 bytes with tag 7 from %v to %v", a, f.sources[1], to)
		}
		if late := a.At - c.sent(a); late < 0 || late > 10*time.Millisecond+report.longest() {
			errs = append(errs, fmt.Errorf("arrived %v after it was sent", late))
		}
	}
	// The sender catches up after a stall.
	e := envelope{rate: 5000, burst: 50, unit: "datagrams"}
	errs = append(errs, e.checkMean(lab.Packets(list), 0.02, report), e.checkBurst(lab.Packets(list), report))
	e.rate /= 2
	if e.checkMean(lab.Packets(list), 0.02, report) == nil || e.checkBurst(lab.Packets(list), report) == nil {
		errs = append(errs, errors.New("the checks accepted twice the rate"))
	}
	t.Logf("sigma %.1f datagrams; %v", lab.Sigma(lab.Packets(list), 5000), report)
	return report, errors.Join(errs...)
}
