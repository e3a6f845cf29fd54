//go:build vmguest

package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// These tests have an attachment delay packets, which needs kernel support: package vm
// runs them in suitable kernels. A guest has two slow processors, emulated by one of the
// machine's. So each test measures several sources with their own buckets at once, and
// networks carry little traffic.

// TestVMEgress shapes the shaper's egress to the downstream: forwarded packets, and those of its own programs.
func TestVMEgress(t *testing.T) {
	const span = 6 * time.Second
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.forward(t)
		n.setMaxSegments(t, shortTrain)
		pins := newPinPath(t)
		d := n.shaper.shaperd(t, attachConfig(pins, attach(lab.MiddleRight, "shape", "queue = 5000"),
			guestLimit("tcp", `match = { attach = ["wall"], protocol = "tcp", port = ["5201", "5202"] }`, fourMbit, guestDelay),
			// TCP has at most two segments in a queue of its own host, so a late segment
			// delays the next one unless there is a burst.
			guestLimit("own", `match = { attach = ["wall"], port = ["5203"] }`, 2*lowRate, guestDelay, `burst = "4kB"`),
			guestLimit("marked", `match = { attach = ["wall"], port = ["5204"] }`, 2*lowRate, guestDelay),
			guestLimit("udp", udpAtWall, lowRate, guestDelay)))

		// Enables ECN to this address.
		heeding := netip.MustParseAddr("10.2.0.6")
		must(t, n.downstream.AddAddress(lab.DownstreamLink, ipv4.innerBits, heeding))
		n.client.mustOutput(t, "ip", "route", "add", heeding.String(), "via", ipv4.proxy.String(), "features", "ecn")
		streams := []*stream{
			n.newStream(t, "one connection", n.client, ipv4.sources[0], ipv4.downstream, 5201),
			n.newStream(t, "four connections", n.client, ipv6.sources[0], ipv6.downstream, 5202, "--parallel", "4"),
			n.newStream(t, "from the shaper", n.shaper, ipv6.inner, ipv6.downstream, 5203),
			n.newStream(t, "marked", n.client, ipv4.sources[0], heeding, 5204),
		}
		rates := []float64{fourMbit, fourMbit, 2 * lowRate, 2 * lowRate}
		fl := n.newFloods(t)
		stop := watchGuest()
		sending := []func() error{fl.run(span)}
		for _, s := range streams {
			sending = append(sending, s.run(span))
		}
		if err := runParallel(sending...); err != nil {
			t.Fatal(err)
		}
		report := stop()
		m := d.metrics()
		for _, name := range []string{"tcp", "own", "marked", "udp"} {
			mustHaveLimited(t, d, name)
		}
		errs := []error{fl.check(t, report)}
		for i, s := range streams {
			s.arrived = s.capture.stop()
			errs = append(errs, checkExact(t, s.name, s.capture, s.arrived, rates[i], tolerance, report))
			t.Logf("%s: %d segments arrived, %d were retransmitted", s.name, len(s.arrived), s.resent)
		}

		marked, err := countMarks(streams[3].arrived)
		counted := m.Sum("marked", `limit="marked"`)
		t.Logf("marked: %d segments, %v counted, %v by all limits; %v refused", marked, counted, m.Sum("marked"),
			m.Sum("limit_packets", `limit="marked"`, `verdict="refuse"`))
		if marked == 0 || marked != int(counted) || counted != m.Sum("marked") {
			err = errors.Join(err, fmt.Errorf("%d marks arrived, %v counted, %v by all limits", marked, counted, m.Sum("marked")))
		}
		errs = append(errs, err)
		if drops := m.Sum("attachment_queue_drops"); drops != 0 {
			errs = append(errs, fmt.Errorf("the queue dropped %v packets", drops))
		}
		t.Log(report)
		d.terminate()
		d.waitExit(patience)
		n.shaper.mustBeClean(t, pins)
		return report, errors.Join(errs...)
	})
}

// TestVMIngress shapes the shaper's ingress.
func TestVMIngress(t *testing.T) {
	const span = 4500 * time.Millisecond
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.forward(t)
		far, source := n.addFarHost(t)
		pins := newPinPath(t)
		at := strings.NewReplacer(lab.MiddleRight, lab.MiddleLeft, "egress", "ingress").Replace(attach(lab.MiddleRight, "shape", "queue = 5000", `on_stop = "keep"`))
		d := n.shaper.shaperd(t, attachConfig(pins, at,
			guestLimit("tcp", `match = { attach = ["wall"], protocol = "tcp" }`, fourMbit, guestDelay), guestLimit("udp", udpAtWall, lowRate, guestDelay)))
		s := n.newStream(t, "tcp", far, source, ipv4.downstream, 5201)
		fl := n.newFloods(t)
		stop := watchGuest()
		if err := runParallel(s.run(span), fl.run(span)); err != nil {
			t.Fatal(err)
		}
		report := stop()
		mustHaveLimited(t, d, "tcp")
		mustHaveLimited(t, d, "udp")
		err := errors.Join(checkExact(t, s.name, s.capture, s.capture.stop(), fourMbit, tolerance, report), fl.check(t, report))
		t.Log(report)
		d.terminate()
		d.waitExit(patience)
		n.shaper.mustDetach(t, pins)
		return report, err
	})
}

// TestVMTrains sends long trains of segments, as fast as the guest can. The rate may be
// below the limit, because CPU time is scarce.
func TestVMTrains(t *testing.T) {
	const rate = 100e6 / 8 // bytes a second
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		n.forward(t)
		n.setMaxSegments(t, longTrain)
		d := n.shaper.shaperd(t, attachConfig(newPinPath(t), attach(lab.MiddleRight, "shape", "queue = 5000"), guestLimit("each", atWall, rate, guestDelay)))
		s := n.newStream(t, "trains", n.client, ipv4.sources[0], ipv4.downstream, 5201)
		stop := watchGuest()
		if err := s.run(4 * time.Second)(); err != nil {
			t.Fatal(err)
		}
		report := stop()
		mustHaveLimited(t, d, "each")
		list := s.capture.stop()
		err := checkExact(t, s.name, s.capture, list, rate, 0.5, report)
		t.Logf("%d trains, %d segments retransmitted; %v", len(list), s.resent, report)
		return report, err
	})
}

// TestVMReload reloads, kills and restarts the daemon while one source sends four times
// its limit and another one has a connection.
func TestVMReload(t *testing.T) {
	const reloads = 15
	retryOnStall(t, func() (stallReport, error) {
		f := ipv4
		n := newNetwork(t)
		n.forward(t)
		n.setMaxSegments(t, shortTrain)
		n.downstream.discardUDP(t, f.udp())
		n.downstream.iperf3Server(t, iperfPort)
		pins := newPinPath(t)
		lines := guestLimit("each", atWall, lowRate, "500ms") // longer than stalls
		text := func(queue int, more ...string) string {
			return attachConfig(pins, attach(lab.MiddleRight, "shape", `on_stop = "keep"`, fmt.Sprint("queue = ", queue)), append(more, lines)...)
		}
		d := n.shaper.shaperd(t, text(5000))
		stop := watchGuest()
		udp := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<14)
		tcp := n.downstream.capture(t, lab.DownstreamLink, iperfPort, 1<<14)
		endTCP := n.client.iperf3Endless(t, f.sources[0], netip.AddrPortFrom(f.downstream, iperfPort))
		endUDP := n.client.newPaced(t, f.sources[1], f.udp(), paced{size: guestSize, rate: 4 * lowPacketRate, period: guestPeriod}).endless()
		time.Sleep(guestSkip)

		other := limit("other", `match = { attach = ["wall"], source = ["10.9.0.0/16"] }`, keyAll, `rate = "1MB/s"`)
		queue := 5000
		began := tcp.Elapsed()
		for i := range reloads {
			if i%5 == 1 {
				queue++ // needs other programs, and another qdisc
			}
			if i%2 == 0 {
				d.reload(text(queue, other))
			} else {
				d.reload(text(queue))
			}
		}
		reloaded := tcp.Elapsed()
		d.Kill()
		time.Sleep(500 * time.Millisecond)
		d = n.shaper.shaperd(t, text(5000))
		started := tcp.Elapsed()
		time.Sleep(time.Second)
		err := endUDP()
		endTCP()
		report := stop()
		if err != nil {
			t.Fatal(err)
		}
		mustHaveLimited(t, d, "each")
		t.Logf("%d reloads took %v; killed and restarted after %v; %v", reloads, reloaded-began, started-reloaded, report)

		segments := tcp.stop()
		errs := []error{
			checkExact(t, "udp", udp, udp.stop(), lowRate, tolerance, report),
			checkExact(t, "tcp", tcp, segments, lowRate, tolerance, report),
		}
		connections := map[netip.AddrPort]bool{}
		for _, a := range segments {
			connections[a.From] = true
		}
		if len(connections) != 2 { // iperf3 also has a control connection
			errs = append(errs, fmt.Errorf("%d connections were opened, want 2", len(connections)))
		}
		if last := segments[len(segments)-1].At; last < started+500*time.Millisecond {
			errs = append(errs, fmt.Errorf("the last segment arrived after %v, the daemon started after %v", last, started))
		}
		return report, errors.Join(errs...)
	})
}

// TestVMQueue checks with tc that the daemon installs its qdisc and restores the former one.
func TestVMQueue(t *testing.T) {
	for _, test := range []struct {
		name   string
		former []string
		end    func(t *testing.T, h *host, d *daemon, pins string, text func(queue int, onStop string) string)
	}{
		{
			"by the next daemon",
			[]string{"handle", "7:", "fq_codel", "limit", "777", "target", "7ms"},
			func(t *testing.T, h *host, d *daemon, pins string, text func(int, string) string) {
				d.Kill()
				h.checkQueue(t, lab.MiddleRight, 6000)
				d = h.shaperd(t, text(7000, "open"))
				h.checkQueue(t, lab.MiddleRight, 7000)
				d.terminate()
				d.waitExit(patience)
				h.mustBeClean(t, pins)
			},
		},
		{
			"by command",
			[]string{"pfifo", "limit", "77"},
			func(t *testing.T, h *host, d *daemon, pins string, _ func(int, string) string) {
				d.terminate()
				d.waitExit(patience)
				h.mustDetach(t, pins)
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			h := newNetwork(t).shaper
			pins := newPinPath(t)
			h.mustOutput(t, "tc", append([]string{"qdisc", "replace", "dev", lab.MiddleRight, "root"}, test.former...)...)
			before := h.mustOutput(t, "tc", "qdisc", "show", "dev", lab.MiddleRight, "root")
			text := func(queue int, onStop string) string {
				return attachConfig(pins, attach(lab.MiddleRight, "shape", fmt.Sprint("queue = ", queue), fmt.Sprintf("on_stop = %q", onStop)),
					guestLimit("each", atWall, fourMbit, guestDelay))
			}
			d := h.shaperd(t, text(5000, "keep"))
			h.checkQueue(t, lab.MiddleRight, 5000)
			d.reload(text(6000, "keep"))
			h.checkQueue(t, lab.MiddleRight, 6000)
			test.end(t, h, d, pins, text)
			if after := h.mustOutput(t, "tc", "qdisc", "show", "dev", lab.MiddleRight, "root"); after != before {
				t.Errorf("qdisc\n%swant\n%s", after, before)
			}
		})
	}
}
