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

	"shaperd/test/lab"
)

var (
	spoofed = flag.Int("spoofed", 200_000, "forged sources of TestLongSpoofedSources")
	soak    = flag.Duration("soak", 10*time.Second, "how long TestLongSoak takes")
)

// forger sends datagrams whose sources are other hosts', each but once.
type forger struct {
	fd      int
	to      unix.SockaddrInet4
	control []byte
	source  []byte // in control
	next    uint32
}

// newForger makes one whose sources begin with 100.64.0.0/10.
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

// peak is the most memory that the daemon has had, in MiB.
func (d *daemon) peak() float64 {
	d.t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", d.cmd.Process.Pid))
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

// TestLongSpoofedSources has a source that asks and is answered beside a flood of datagrams,
// each from another forged one.
func TestLongSpoofedSources(t *testing.T) {
	fairly(t, func() (stallReport, error) { return measureSpoofedSources(t, *spoofed) })
}

func measureSpoofedSources(t *testing.T, count int) (stallReport, error) {
	const rate, flood = 500, 50_000
	f := ipv4
	n := newNetwork(t)
	n.downstream.answerUDP(t, f.udp(), func(data []byte, _ netip.AddrPort) bool { return data[8] == 'k' })
	d := n.shaper.shaperd(t, config(f,
		limit("each", onUDP, `key = ["source"]`, `packets = "1000pps"`),
		limit("all", onUDP, keyAll, `packets = "10000pps"`)))
	left, err := n.shaper.Links.LinkByName(shaperLeft)
	must(t, err)
	must(t, n.shaper.Links.RouteAdd(&netlink.Route{
		LinkIndex: left.Attrs().Index, Dst: &net.IPNet{IP: net.IPv4(100, 64, 0, 0), Mask: net.CIDRMask(10, 32)},
	}))
	known := n.client.newPaced(t, f.sources[0], f.udpDoor(), paced{tag: 'k', size: 64, rate: rate})
	answers := make(chan int, 1)
	go func() {
		count, buf := 0, make([]byte, 100)
		for {
			if _, err := known.conn.Read(buf); err != nil {
				answers <- count
				return
			}
			count++
		}
	}()
	if _, err := known.send(200 * time.Millisecond); err != nil { // it is known then
		t.Fatal(err)
	}
	forger := n.client.newForger(t, f.udpDoor())
	stalls := startStallWatch(t)
	span := time.Duration(float64(count) / flood * float64(time.Second))
	sent := make(chan int, 1)
	go func() {
		n, err := known.send(span)
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
	must(t, known.conn.SetReadDeadline(time.Now()))
	answered, report := <-answers, stalls.stop()
	began := time.Now()
	text := d.scrape()
	scraped := time.Since(began)
	m, err := parseMetrics(text)
	must(t, err)
	opened, refused := m.sum("shaperd_listener_udp_flows_opened_total"), m.sum("shaperd_listener_udp_flows_refused_total")
	t.Logf("%d forged sources in %v; of %d questions of a known source %d were answered (%.1f %%); memory at most %.0f MiB; %v flows were opened and %v refused; %v",
		count, took.Round(time.Millisecond), asked, answered, 100*float64(answered)/float64(asked), d.peak(), opened, refused, report)
	t.Logf("metrics: %d bytes in %v", len(text), scraped)
	if len(text) > 1<<20 {
		t.Errorf("metrics are %d bytes, want at most 1 MiB", len(text))
	}
	if scraped > 100*time.Millisecond {
		return report, fmt.Errorf("metrics took %v, want at most 100 ms", scraped)
	}
	if peak := d.peak(); peak > 256 {
		t.Errorf("the daemon had %.0f MiB, want at most 256", peak)
	}
	if opened+refused < 0.05*float64(count) {
		return report, fmt.Errorf("only %v of %d forged sources came to the daemon", opened+refused, count)
	}
	// What nobody had the time to take out of the daemon's buffer, it lost of all alike.
	came := min((opened+refused)/float64(count), 1)
	if float64(answered) < 0.95*came*float64(asked) {
		return report, fmt.Errorf("of %d questions of a known source %d were answered, and %.1f %% of the forged ones came to the daemon", asked, answered, 100*came)
	}
	return report, nil
}

// TestLongSlowloris has thousands of connections that send a byte now and then, and one
// client that asks and goes.
func TestLongSlowloris(t *testing.T) {
	most := 9000
	if !*figures {
		most = 3000
	}
	for name, limits := range map[string][]string{
		"at the downstream": nil,
		"at the gate":       {limit("slots", onTCP, keySource, `max_connections = 100`, `max_queue = 10000`, `queue_timeout = "10m"`)},
	} {
		t.Run(name, func(t *testing.T) {
			fairly(t, func() (stallReport, error) { return measureSlowloris(t, most, limits) })
		})
	}
}

func measureSlowloris(t *testing.T, most int, limits []string) (stallReport, error) {
	f := ipv4
	n := newNetwork(t)
	n.downstream.serveTCP(t, f.tcp(), func(c *net.TCPConn) {
		var b [1]byte
		for {
			if _, err := c.Read(b[:]); err != nil {
				return
			}
			if b[0] == 1 { // the honest one's
				_, _ = c.Write(b[:])
				return
			}
		}
	})
	d := n.shaper.shaperd(t, config(f, limits...))
	// The collector of a test that has so many connections is not what is measured.
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	honest := func(asks int) time.Duration {
		var took []time.Duration
		for range asks {
			one, err := n.client.ask(f.sources[1], f.door())
			if err != nil {
				t.Fatalf("the honest client: %v", err)
			}
			took = append(took, one)
		}
		slices.Sort(took)
		return lab.Percentile(took, 99)
	}
	const asks = 2000
	stalls := startStallWatch(t)
	honest(200)
	alone := honest(asks)
	var conns []*net.TCPConn
	defer func() {
		for _, c := range conns {
			abort(c)
		}
	}()
	for range most {
		c, err := n.client.dialTCP(f.sources[0], f.door())
		must(t, err)
		conns = append(conns, c)
	}
	end, ended := make(chan struct{}), make(chan struct{})
	var trickled atomic.Int64
	go func() { // each sends a byte in ten seconds
		defer close(ended)
		pause := 10 * time.Second / time.Duration(most)
		for i := 0; ; i++ {
			select {
			case <-end:
				return
			case <-time.After(pause):
			}
			if _, err := conns[i%most].Write([]byte{2}); err == nil {
				trickled.Add(1)
			}
		}
	}()
	beside := honest(asks)
	close(end)
	<-ended
	report := stalls.stop()
	t.Logf("%d slow connections, %d bytes of them: an honest client's p99 is %v beside them and %v alone, %.2f times; the daemon has had %.0f MiB; %v",
		most, trickled.Load(), beside, alone, float64(beside)/float64(alone), d.peak(), report)
	if beside > 2*alone+report.longest() {
		return report, fmt.Errorf("an honest client's p99 is %v beside %d slow connections, and %v alone", beside, most, alone)
	}
	return report, nil
}

// TestLongSoak has all kinds of traffic go through a daemon, and wants its memory, its
// descriptors and its threads to stay what they were.
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
	again := func(round func() error) {
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
		again(func() error {
			_, err := n.client.ask(f.sources[i%2], netip.AddrPortFrom(f.proxy, rpc.Port()))
			asked.Add(1)
			return err
		})
	}
	again(func() error { // streams that end, one way or the other
		b := &bulk{}
		for i := range 4 {
			c, err := n.client.dialTCP(f.sources[i%3], f.door())
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
	again(func() error { // flows that come and go
		p := paced{size: 200, rate: 800}
		var err error
		if p.conn, err = n.client.DialUDP(f.sources[2], f.udpDoor()); err != nil {
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
	look := func() state {
		m := d.metrics()
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.cmd.Process.Pid))
		must(t, err)
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", d.cmd.Process.Pid))
		must(t, err)
		return state{m["process_resident_memory_bytes"] / (1 << 20), len(fds), len(threads), m["go_goroutines"], m["go_memstats_heap_inuse_bytes"] / (1 << 20)}
	}
	time.Sleep(*soak / 5)
	begun := look()
	t.Logf("after %v: %+v", *soak/5, begun)
	deadline := time.Now().Add(*soak * 4 / 5)
	var last state
	for time.Now().Before(deadline) {
		time.Sleep(min(*soak/10, time.Minute))
		last = look()
		t.Logf("%v before the end: %+v", time.Until(deadline).Round(time.Second), last)
	}
	close(stop)
	group.Wait()
	if last.rss > 1.3*begun.rss+10 {
		t.Errorf("memory grew from %.1f to %.1f MiB", begun.rss, last.rss)
	}
	// A runtime whose threads stand still makes some more; a leak makes hundreds.
	if last.fds > begun.fds+60 || last.threads > begun.threads+12 || last.goroutines > begun.goroutines+10 {
		t.Errorf("from %+v to %+v", begun, last)
	}
	// When all have gone there is nothing left of them, but for flows' timeouts.
	waitFor(t, 10*time.Second, func() error {
		m := d.metrics()
		if open := m.sum("shaperd_listener_connections_open"); open != 0 {
			return fmt.Errorf("%v connections are open", open)
		}
		if held := m.sum("shaperd_limit_connections_in_flight"); held != 0 {
			return fmt.Errorf("%v slots are held", held)
		}
		return nil
	})
	if asked.Load() == 0 || s.got(0) == 0 {
		t.Error("there was no load")
	}
	if strings.Contains(d.log.String(), "level=ERROR") {
		t.Error("the daemon logged an error")
	}
}
