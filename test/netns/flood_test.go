package netns

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

var (
	spoofed = flag.Int("spoofed", 200_000, "number of forged sources in TestLongSpoofedSources")
	soak    = flag.Duration("soak", 10*time.Second, "duration of TestLongSoak")
)

// forger sends datagrams from forged sources, one per source.
type forger struct {
	fd      int
	to      unix.SockaddrInet4
	control []byte
	source  []byte // in control
	next    uint32
}

// newForger returns a forger with sources in 100.64.0.0/10.
func (h *host) newForger(t testing.TB, to netip.AddrPort) *forger {
	t.Helper()
	f := &forger{to: unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}}
	must(t, h.Do(func() (err error) {
		if f.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		return unix.SetsockoptInt(f.fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
	}))
	t.Cleanup(func() { unix.Close(f.fd) })
	f.control = unix.PktInfo4(&unix.Inet4Pktinfo{})
	f.source = f.control[unix.SizeofCmsghdr+4:][:4]
	return f
}

func (f *forger) send(payload []byte) error {
	const base = 100<<24 | 64<<16
	binary.BigEndian.PutUint32(f.source, base+f.next%(1<<22))
	f.next++
	err := unix.Sendmsg(f.fd, payload, f.control, &f.to, 0)
	if errors.Is(err, unix.ENOBUFS) {
		return nil
	}
	return err
}

// peakMemory returns the daemon's peak resident memory, in MiB.
func (d *daemon) peakMemory() float64 {
	d.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.PID()))
	must(d.t, err)
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.Atoi(strings.Fields(value)[0])
			must(d.t, err)
			return float64(kib) / 1024
		}
	}
	d.t.Fatal("no VmHWM")
	return 0
}

// TestLongSpoofedSources has a source that exchanges datagrams during a flood, in which each
// datagram has another forged source.
func TestLongSpoofedSources(t *testing.T) {
	retryOnStall(t, func() (stallReport, error) { return measureSpoofedSources(t, *spoofed) })
}

func measureSpoofedSources(t *testing.T, count int) (stallReport, error) {
	const rate, flood = 500, 50_000
	f := ipv4
	n := newNetwork(t)
	n.downstream.answerUDP(t, f.udp(), func(data []byte, _ netip.AddrPort) bool { return data[8] == 'k' })
	d := n.shaper.shaperd(t, config(f,
		limit("each", onUDP, `key = ["source"]`, `packets = "1000pps"`),
		limit("all", onUDP, keyAll, `packets = "10000pps"`)))
	left, err := n.shaper.Links.LinkByName(lab.MiddleLeft)
	must(t, err)
	must(t, n.shaper.Links.RouteAdd(&netlink.Route{
		LinkIndex: left.Attrs().Index, Dst: &net.IPNet{IP: net.IPv4(100, 64, 0, 0), Mask: net.CIDRMask(10, 32)},
	}))
	verified := n.client.newPaced(t, f.sources[0], f.udpListenAddr(), paced{tag: 'k', size: 64, rate: rate})
	answers := make(chan int, 1)
	go func() {
		count, buf := 0, make([]byte, 100)
		for {
			if _, err := verified.conn.Read(buf); err != nil {
				answers <- count
				return
			}
			count++
		}
	}()
	if _, err := verified.send(200 * time.Millisecond); err != nil { // makes the source verified
		t.Fatal(err)
	}
	forger := n.client.newForger(t, f.udpListenAddr())
	stalls := startStallWatch(t)
	span := time.Duration(float64(count) / flood * float64(time.Second))
	sent := make(chan int, 1)
	go func() {
		n, err := verified.send(span)
		if err != nil {
			t.Error(err)
		}
		sent <- n
	}()
	payload := make([]byte, 64)
	start := time.Now()
	for i := range count {
		if i%50 == 0 {
			sleepUntil(start.Add(time.Duration(float64(i) / flood * float64(time.Second))))
		}
		if err := forger.send(payload); err != nil {
			t.Fatal(err)
		}
	}
	took := time.Since(start)
	asked := <-sent + rate/5
	time.Sleep(200 * time.Millisecond)
	must(t, verified.conn.SetReadDeadline(time.Now()))
	answered, report := <-answers, stalls.stop()
	began := time.Now()
	text := d.scrape()
	scraped := time.Since(began)
	m, err := lab.ParseMetrics(text)
	must(t, err)
	opened, refused := m.Sum("shaperd_listener_udp_flows_opened_total"), m.Sum("shaperd_listener_udp_flows_refused_total")
	t.Logf("%d forged sources in %v; of %d requests of a verified source %d were answered (%.1f %%); peak memory %.0f MiB; %v flows opened, %v refused; %v",
		count, took.Round(time.Millisecond), asked, answered, 100*float64(answered)/float64(asked), d.peakMemory(), opened, refused, report)
	t.Logf("metrics: %d bytes in %v", len(text), scraped)
	if len(text) > 1<<20 {
		t.Errorf("metrics are %d bytes, want at most 1 MiB", len(text))
	}
	if scraped > 100*time.Millisecond {
		return report, fmt.Errorf("metrics took %v, want at most 100 ms", scraped)
	}
	if peak := d.peakMemory(); peak > 256 {
		t.Errorf("the daemon's peak memory was %.0f MiB, want at most 256", peak)
	}
	if opened+refused < 0.05*float64(count) {
		return report, fmt.Errorf("only %v of %d forged sources reached the daemon", opened+refused, count)
	}
	// The overflow of the daemon's receive buffer affects all sources alike.
	received := min((opened+refused)/float64(count), 1)
	if float64(answered) < 0.95*received*float64(asked) {
		return report, fmt.Errorf("of %d requests of a verified source %d were answered, and %.1f %% of the forged ones reached the daemon", asked, answered, 100*received)
	}
	return report, nil
}

// TestLongSlowloris has thousands of connections that send single bytes, and one honest
// client that makes short requests.
func TestLongSlowloris(t *testing.T) {
	count := 9000
	if !*figures {
		count = 3000
	}
	for name, limits := range map[string][]string{
		"at the downstream":     nil,
		"waiting for admission": {limit("slots", onTCP, keySource, `max_connections = 100`, `max_queue = 10000`, `queue_timeout = "10m"`)},
	} {
		t.Run(name, func(t *testing.T) {
			retryOnStall(t, func() (stallReport, error) { return measureSlowloris(t, count, limits) })
		})
	}
}

func measureSlowloris(t *testing.T, count int, limits []string) (stallReport, error) {
	f := ipv4
	n := newNetwork(t)
	n.downstream.serveTCP(t, f.tcp(), func(c *net.TCPConn) {
		var b [1]byte
		for {
			if _, err := c.Read(b[:]); err != nil {
				return
			}
			if b[0] == 1 { // from the honest client
				_, _ = c.Write(b[:])
				return
			}
		}
	})
	d := n.shaper.shaperd(t, config(f, limits...))
	// Keeps the garbage collection of the test, with its many connections, out of the measurement.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	honest := func(requests int) time.Duration {
		var took []time.Duration
		for range requests {
			one, err := n.client.request(f.sources[1], f.listenAddr())
			if err != nil {
				t.Fatalf("the honest client: %v", err)
			}
			took = append(took, one)
		}
		slices.Sort(took)
		return lab.Percentile(took, 99)
	}
	const requests = 2000
	stalls := startStallWatch(t)
	honest(200)
	alone := honest(requests)
	var conns []*net.TCPConn
	defer func() {
		for _, c := range conns {
			abort(c)
		}
	}()
	for range count {
		c, err := n.client.dialTCP(f.sources[0], f.listenAddr())
		must(t, err)
		conns = append(conns, c)
	}
	end, ended := make(chan struct{}), make(chan struct{})
	var trickled atomic.Int64
	go func() { // each connection sends a byte every ten seconds
		defer close(ended)
		pause := 10 * time.Second / time.Duration(count)
		for i := 0; ; i++ {
			select {
			case <-end:
				return
			case <-time.After(pause):
			}
			if _, err := conns[i%count].Write([]byte{2}); err == nil {
				trickled.Add(1)
			}
		}
	}()
	underAttack := honest(requests)
	close(end)
	<-ended
	report := stalls.stop()
	t.Logf("%d slow connections sent %d bytes: the honest client's p99 is %v with them and %v alone, %.2f times; the daemon's peak memory %.0f MiB; %v",
		count, trickled.Load(), underAttack, alone, float64(underAttack)/float64(alone), d.peakMemory(), report)
	if underAttack > 2*alone+report.longest() {
		return report, fmt.Errorf("the honest client's p99 is %v with %d slow connections, and %v alone", underAttack, count, alone)
	}
	return report, nil
}

// TestLongSoak sends all kinds of traffic through a daemon, and checks that its memory,
// descriptors and threads do not grow.
func TestLongSoak(t *testing.T) {
	f := ipv4
	n := newNetwork(t)
	rpc := netip.AddrPortFrom(f.downstream, 7000)
	n.downstream.serveSlowly(t, rpc, time.Millisecond)
	s := n.downstream.newSink(t, f.tcp())
	n.downstream.echoUDP(t, f.udp())
	d := n.shaper.shaperd(t, config(f,
		limit("bytes", onTCP, keySource, `rate = "2MiB/s"`),
		limit("datagrams", onUDP, keySource, `packets = "500pps"`, `max_delay = "50ms"`),
		limit("slots", `match = { listen = ["rpc"] }`, keySource, `max_connections = 20`, `new_connections = "200/s"`))+
		rpcListener(rpc))

	stop := make(chan struct{})
	var group sync.WaitGroup
	repeat := func(round func() error) {
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := round(); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	var asked atomic.Int64
	for i := range 8 {
		repeat(func() error {
			_, err := n.client.request(f.sources[i%2], netip.AddrPortFrom(f.proxy, rpc.Port()))
			asked.Add(1)
			return err
		})
	}
	repeat(func() error { // streams that end with a FIN or a reset
		b := &bulk{}
		for i := range 4 {
			c, err := n.client.dialTCP(f.sources[i%3], f.listenAddr())
			if err != nil {
				return err
			}
			b.conns = append(b.conns, c)
		}
		err := b.flood(500 * time.Millisecond)
		b.conns[0].Close()
		b.abort()
		return err
	})
	repeat(func() error { // short-lived flows
		p := paced{size: 200, rate: 800}
		var err error
		if p.conn, err = n.client.DialUDP(f.sources[2], f.udpListenAddr()); err != nil {
			return err
		}
		defer p.conn.Close()
		_, err = p.send(300 * time.Millisecond)
		return err
	})

	type state struct {
		rss              float64
		fds, threads     int
		goroutines, heap float64
	}
	sample := func() state {
		m := d.metrics()
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.PID()))
		must(t, err)
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", d.PID()))
		must(t, err)
		return state{m["process_resident_memory_bytes"] / (1 << 20), len(fds), len(threads), m["go_goroutines"], m["go_memstats_heap_inuse_bytes"] / (1 << 20)}
	}
	time.Sleep(*soak / 5)
	first := sample()
	t.Logf("after %v: %+v", *soak/5, first)
	deadline := time.Now().Add(*soak * 4 / 5)
	var last state
	for time.Now().Before(deadline) {
		time.Sleep(min(*soak/10, time.Minute))
		last = sample()
		t.Logf("%v before the end: %+v", time.Until(deadline).Round(time.Second), last)
	}
	close(stop)
	group.Wait()
	if last.rss > 1.3*first.rss+10 {
		t.Errorf("memory grew from %.1f to %.1f MiB", first.rss, last.rss)
	}
	// The runtime starts a few more threads when some are blocked; a leak starts hundreds.
	if last.fds > first.fds+60 || last.threads > first.threads+12 || last.goroutines > first.goroutines+10 {
		t.Errorf("from %+v to %+v", first, last)
	}
	// When all clients have gone, nothing remains except flows until their timeout.
	waitFor(t, patience, func() error {
		m := d.metrics()
		if open := m.Sum("shaperd_listener_connections_open"); open != 0 {
			return fmt.Errorf("%v connections are open", open)
		}
		if held := m.Sum("shaperd_limit_connections_in_flight"); held != 0 {
			return fmt.Errorf("%v slots are held", held)
		}
		return nil
	})
	if asked.Load() == 0 || s.got(0) == 0 {
		t.Error("the test generated no load")
	}
	if strings.Contains(d.Log.String(), "level=ERROR") {
		t.Error("the daemon logged an error")
	}
}
