package netns

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// figureTime is the duration of each case of TestFigures.
const figureTime = 10 * time.Second

// TestFigures measures for longer and prints the results. It asserts only that traffic
// flowed and was limited: on a shared machine the figures depend on the machine as much
// as on the daemon, so its stalls are printed with them.
func TestFigures(t *testing.T) {
	if !*figures {
		t.Skip("a measurement that needs -figures")
	}
	for _, f := range families {
		t.Run(f.name+"/tcp, 4 connections", func(t *testing.T) { measureTCPFigures(t, f, 4, 0, 0) })
	}
	t.Run("ipv4/tcp, 4 connections after 0.8 s idle", func(t *testing.T) { measureTCPFigures(t, ipv4, 4, 0, 800*time.Millisecond) })
	t.Run("ipv4/tcp, 1 connection among 49 idle ones", func(t *testing.T) { measureTCPFigures(t, ipv4, 1, 49, 0) })
	t.Run("ipv4/udp, 10000 pps, offered twice that", func(t *testing.T) { measureUDPFigures(t, ipv4) })
}

// measureTCPFigures measures busy connections among idle ones, at 10 MiB/s. With a pause,
// the measurement starts when they resume.
func measureTCPFigures(t *testing.T, f family, busy, idle int, pause time.Duration) {
	n := newNetwork(t)
	s := n.downstream.newSink(t, f.tcp())
	d := n.shaper.shaperd(t, config(f, limit("smooth", onTCP, keySource, tenMiBLimit)))
	if idle != 0 {
		n.client.newBulk(t, f.sources[0], f.listenAddr(), idle, 'i')
		s.wait(t, 'i', int64(idle), 5*time.Second)
	}
	b := n.client.newBulk(t, f.sources[0], f.listenAddr(), busy, 'b')
	s.wait(t, 'b', int64(busy), 5*time.Second)
	stalls := startStallWatch(t)
	c := n.downstream.capture(t, lab.DownstreamLink, tcpPort, framesOf(14))
	if pause != 0 {
		if err := b.send(1 << 20); err != nil {
			t.Fatal(err)
		}
		s.wait(t, 'b', b.sent.Load(), 5*time.Second)
		time.Sleep(pause)
	}
	start, cpu := c.Elapsed(), d.cpuTime()
	if err := b.flood(figureTime); err != nil {
		t.Fatal(err)
	}
	end := c.Elapsed()
	cpu = d.cpuTime() - cpu
	list, report := s.arrivals('b', c.stop()), stalls.stop()
	all := lab.Bytes(list)
	printFigures(t, tenMiB, lab.Between(all, start, end), report)
	if pause != 0 {
		t.Logf("sigma including the time before the pause: %.0f bytes", lab.Sigma(lab.Between(all, 0, end), tenMiB.rate))
	}
	t.Logf("cost: %.1f %% of a CPU", 100*cpu.Seconds()/(end-start).Seconds())
	mustHaveLimited(t, d, "smooth")
}

func measureUDPFigures(t *testing.T, f family) {
	n := newNetwork(t)
	n.downstream.discardUDP(t, f.udp())
	d := n.shaper.shaperd(t, config(f, limit("sms", onUDP, keySource, `packets = "10000pps"`, `max_delay = "50ms"`)))
	stalls := startStallWatch(t)
	c := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<17)
	p := n.client.newPaced(t, f.sources[0], f.udpListenAddr(), paced{tag: 1, size: 512, rate: 20000})
	cpu := d.cpuTime()
	sent, err := p.send(figureTime)
	if err != nil {
		t.Fatal(err)
	}
	end := c.Elapsed()
	cpu = d.cpuTime() - cpu
	time.Sleep(200 * time.Millisecond)
	list, report := c.stop(), stalls.stop()
	printFigures(t, envelope{rate: 10000, unit: "datagrams"}, lab.Between(lab.Packets(list), 0, end), report)
	t.Logf("%d sent, %d arrived, %.0f counted as refused", sent, len(list),
		d.metrics().Sum("packets", `limit="sms"`, `verdict="refuse"`))
	t.Logf("cost: %.1f %% of a CPU", 100*cpu.Seconds()/end.Seconds())
	mustHaveLimited(t, d, "sms")
}

func printFigures(t *testing.T, e envelope, events []lab.Event, report stallReport) {
	t.Helper()
	if len(events) < 2 {
		t.Fatal("nothing arrived")
	}
	t.Logf("mean %.1f %s/s, %+.4f %% off the rate of %.0f", lab.MeanRate(events), e.unit, 100*(lab.MeanRate(events)/e.rate-1), e.rate)
	burst, in := lab.WorstInterval(events, e.rate)
	t.Logf("sigma %.1f %s, from %d of them in %v at %v", burst, e.unit, lab.Total(in),
		(in[len(in)-1].At - in[0].At).Round(time.Microsecond), in[0].At.Round(time.Microsecond))

	var windows []float64
	first := events[0].At
	for i := range 10 {
		w := lab.Between(events, first+time.Duration(i)*figureTime/10, first+time.Duration(i+1)*figureTime/10)
		windows = append(windows, lab.Sigma(w, e.rate))
	}
	t.Logf("sigma of each tenth: %.1f", windows)

	sorted := lab.Gaps(events)
	line := "gaps:"
	for _, p := range []float64{1, 5, 25, 50, 75, 95, 99, 99.9, 100} {
		line += fmt.Sprintf(" p%v %.1f us,", p, float64(lab.Percentile(sorted, p))/1e3)
	}
	t.Log(line[:len(line)-1])

	type gap struct{ at, long time.Duration }
	var worst []gap
	for i := 1; i < len(events); i++ {
		worst = append(worst, gap{events[i-1].At, events[i].At - events[i-1].At})
	}
	slices.SortFunc(worst, func(a, b gap) int { return cmp.Compare(b.long, a.long) })
	for _, g := range worst[:min(5, len(worst))] {
		t.Logf("gap of %v at %v", g.long.Round(time.Microsecond), g.at.Round(time.Microsecond))
	}
	// Strict shaping never makes up for a gap longer than its catch-up.
	span := events[len(events)-1].At - first
	var over time.Duration
	for _, g := range worst {
		if g.long >= 2*time.Millisecond {
			over += g.long
		}
	}
	t.Logf("shortfall of %.1f ms of traffic; gaps of 2 ms or more sum to %.1f ms",
		1000*(1-lab.MeanRate(events)/e.rate)*span.Seconds(), 1000*over.Seconds())
	t.Logf("machine: %v", report)
}
