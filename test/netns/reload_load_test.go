package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// TestLongReloadUnderLoad reloads continuously while short and long connections are open
// and datagrams flow: no traffic may be affected. With -figures the load is the maximum of
// two processors.
func TestLongReloadUnderLoad(t *testing.T) {
	retryOnStall(t, func() (stallReport, error) { return measureReloadUnderLoad(t) })
}

func measureReloadUnderLoad(t *testing.T) (stallReport, error) {
	const (
		reloads  = 100
		interval = 80 * time.Millisecond
		workers  = 50
		rate     = 10 << 20
		burst    = 1 << 20
	)
	openings, packets := 300, 5000 // per second
	long := 100
	if *figures {
		openings, packets, long = 1000, 20_000, 200
	}
	f := ipv4
	n := newNetwork(t)
	rpc := netip.AddrPortFrom(f.downstream, 7000)
	rpcDoor := netip.AddrPortFrom(f.proxy, rpc.Port())
	n.downstream.serveSlowly(t, rpc, 0)
	s := n.downstream.newSink(t, f.tcp())
	n.downstream.discardUDP(t, f.udp())
	text := func(i int) string {
		text := config(f,
			limit("smooth", onTCP, keyAll, fmt.Sprintf(`rate = "%dMiB/s"`, rate>>20), `burst = "1MiB"`, fmt.Sprintf(`max_delay = "%dms"`, 200+i%2)),
			limit("datagrams", onUDP, keySource, fmt.Sprintf(`packets = "%dpps"`, 2*packets), `max_delay = "1s"`))
		text += rpcListener(rpc, slices.Repeat([]string{"tcp://127.0.0.1:7001"}, i%2)...)
		// Other limits are added and removed.
		text += strings.Repeat("\n[[limit]]\n"+limit("slots", `match = { listen = ["rpc"] }`, keySource, "max_connections = 500", `new_connections = "5000/s"`), i%2)
		return text
	}
	d := n.shaper.shaperd(t, text(0))
	b := n.client.newBulk(t, f.sources[0], f.listenAddr(), long, 'l')
	s.wait(t, 'l', int64(long), patience)
	stalls := startStallWatch(t)
	lostBefore := kernelDrops(t, n.shaper)
	const load = reloads*interval + 500*time.Millisecond
	streams := n.downstream.capture(t, lab.DownstreamLink, tcpPort, framesOf(int(load/time.Second)+2))
	datagrams := n.downstream.capture(t, lab.DownstreamLink, udpPort, packets*int(load/time.Second+2))

	var group sync.WaitGroup
	var served, failed atomic.Int64
	var flooded, sprayed error
	sent := 0
	group.Go(func() { flooded = b.flood(load) })
	group.Go(func() {
		p := n.client.newPaced(t, f.sources[1], f.udpListenAddr(), paced{tag: 'u', size: 64, rate: packets})
		sent, sprayed = p.send(load)
	})
	start := time.Now()
	for w := range workers {
		group.Go(func() {
			period := workers * time.Second / time.Duration(openings)
			for at := period * time.Duration(w) / workers; at < load; at += period {
				time.Sleep(time.Until(start.Add(at)))
				if _, err := n.client.request(f.sources[2], rpcDoor); err != nil {
					failed.Add(1)
					t.Logf("a connection: %v", err)
				} else {
					served.Add(1)
				}
			}
		})
	}
	for i := range reloads {
		time.Sleep(time.Until(start.Add(interval * time.Duration(i+1))))
		d.reload(text(i + 1))
	}
	took := time.Since(start)
	group.Wait()
	time.Sleep(100 * time.Millisecond) // until everything has arrived
	list, bytes, report := datagrams.stop(), lab.Bytes(streams.stop()), stalls.stop()

	m := d.metrics()
	if got := m.Sum("shaperd_config_reloads_total", `result="success"`); got != reloads+1 {
		t.Errorf("the daemon has loaded its configuration %v times, want %d", got, reloads+1)
	}
	sigma := lab.Sigma(bytes, rate)
	t.Logf("%d reloads in %v during %d connections (%.0f/s), %d datagrams (%.0f/s) and %d streams at %.0f B/s; sigma %.0f bytes, %d of them the burst; %v",
		reloads, took.Round(time.Millisecond), served.Load(), float64(served.Load())/load.Seconds(), sent, float64(sent)/load.Seconds(), long, lab.MeanRate(bytes), sigma, burst, report)
	if err := errors.Join(flooded, sprayed); err != nil {
		t.Errorf("the load: %v", err)
	}
	if failed.Load() > 0 {
		t.Errorf("%d of %d connections failed", failed.Load(), failed.Load()+served.Load())
	}
	if arrived, ended := s.count(); arrived != long || ended != 0 {
		t.Errorf("%d streams arrived at the downstream and %d ended, want %d and 0", arrived, ended, long)
	}
	if strings.Contains(d.Log.String(), "level=ERROR") {
		t.Error("the daemon logged an error")
	}
	var errs []error
	// Datagrams that the kernel dropped never reached the daemon.
	if lost := kernelDrops(t, n.shaper) - lostBefore; len(list)+lost < sent {
		errs = append(errs, fmt.Errorf("%d of %d datagrams arrived, the kernel lost %d", len(list), sent, lost))
	}
	if most := burst + 24e3 + rate*min(report.machine().longest(), stallAllowance).Seconds(); sigma > most {
		errs = append(errs, fmt.Errorf("sigma is %.0f bytes, want at most %.0f: a reload granted a burst", sigma, most))
	}
	if sigma < burst/2 {
		errs = append(errs, fmt.Errorf("sigma is %.0f bytes: the burst was never used", sigma))
	}
	if least := 0.9 * float64(openings) * load.Seconds(); float64(served.Load()) < least {
		errs = append(errs, fmt.Errorf("only %d connections were opened, the load is %d/s", served.Load(), openings))
	}
	return report, errors.Join(errs...)
}
