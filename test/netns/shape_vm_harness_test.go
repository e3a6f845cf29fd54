//go:build vmguest

package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// fourMbit is the default rate of each source.
const fourMbit = 4e6 / 8 // bytes a second

const (
	guestSize   = 1400                  // payload bytes of a datagram
	guestPeriod = 10 * time.Millisecond // of senders

	// The beginning is not measured: programs start and take the guest's CPU time, TCP
	// finds its rate, and buckets fill.
	guestSkip = time.Second

	guestDelay = "200ms" // max_delay of limits

	tolerance = 0.005 // allowed relative error of a mean rate
)

// guestLimit returns the lines of a limit per source.
func guestLimit(name, match string, bytesPerSecond int, maxDelay string, lines ...string) string {
	return limit(name, append([]string{
		match, keyAddress, fmt.Sprintf(`rate = "%dbit/s"`, 8*bytesPerSecond), fmt.Sprintf(`max_delay = %q`, maxDelay),
	}, lines...)...)
}

// watchGuest records stalls at a lower cost than startStallWatch.
func watchGuest() (stop func() stallReport) {
	const period = 10 * time.Millisecond
	var list stallReport
	end, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for due := time.Now(); ; {
			due = due.Add(period)
			select {
			case <-end:
				return
			case <-time.After(time.Until(due)):
			}
			woke := time.Now()
			if late := woke.Sub(due); late >= time.Millisecond {
				list = append(list, stall{at: due, late: late})
				due = woke
			}
		}
	}()
	return func() stallReport { close(end); <-done; return list }
}

// runParallel runs functions concurrently, and returns their errors.
func runParallel(all ...func() error) error {
	errs := make([]error, len(all))
	var group sync.WaitGroup
	for i, do := range all {
		group.Go(func() { errs[i] = do() })
	}
	group.Wait()
	return errors.Join(errs...)
}

// mustOutput runs a program inside the host, and returns its output.
func (h *host) mustOutput(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := h.Output(name, args...)
	must(t, err)
	return out
}

const (
	segmentSize = 1448 // TCP payload, with the timestamp option
	shortTrain  = 4    // segments
	longTrain   = 44   // the maximum below 64 KiB
)

// setMaxSegments sets how many TCP segments sent together stay in one super-packet:
// longer trains save the guest most of its work.
func (n *network) setMaxSegments(t *testing.T, length int) {
	t.Helper()
	must(t, errors.Join(
		n.client.SetMaxSegments(lab.ClientLink, length),
		n.shaper.SetMaxSegments(lab.MiddleLeft, length),
		n.shaper.SetMaxSegments(lab.MiddleRight, length)))
}

// addFarHost adds a host behind the client, which routes for it. Packets sent over a veth
// stay charged to the sending socket until another host routes them, so TCP would see
// them wait at the next host's ingress and stop sending, unlike on a wire.
func (n *network) addFarHost(t *testing.T) (far *host, source netip.Addr) {
	t.Helper()
	source, via := netip.MustParseAddr("10.4.0.10"), netip.MustParseAddr("10.4.0.1")
	far = newHost(t, "far")
	must(t, errors.Join(
		lab.Join(far.Host, "out", n.client.Host, "back"),
		far.AddAddress("out", 24, source), n.client.AddAddress("back", 24, via), far.AddDefaultRoute(via),
		n.client.Sysctl("net/ipv4/ip_forward", "1")))
	n.shaper.mustOutput(t, "ip", "route", "add", "10.4.0.0/24", "via", ipv4.sources[0].String())
	n.setMaxSegments(t, shortTrain)
	must(t, far.SetMaxSegments("out", shortTrain))
	return far, source
}

// A stream is an iperf3 client and its arrivals.
type stream struct {
	name    string
	from    *host
	source  netip.Addr
	to      netip.AddrPort
	args    []string
	capture *capture
	arrived []lab.Arrival
	resent  int // segments
}

// newStream returns a stream from a host to the downstream. Each needs its own port.
func (n *network) newStream(t *testing.T, name string, from *host, source, to netip.Addr, port uint16, args ...string) *stream {
	t.Helper()
	n.downstream.iperf3Server(t, port)
	return &stream{
		name: name, from: from, source: source, to: netip.AddrPortFrom(to, port), args: args,
		capture: n.downstream.capture(t, lab.DownstreamLink, port, 1<<15),
	}
}

// run sends for a while.
func (s *stream) run(span time.Duration) func() error {
	return func() error {
		var report struct {
			End struct {
				SumSent struct{ Retransmits int } `json:"sum_sent"`
			}
		}
		err := s.from.iperf3Client(s.source, s.to, &report, append([]string{"--time", fmt.Sprint(span.Seconds())}, s.args...)...)
		s.resent = report.End.SumSent.Retransmits
		return err
	}
}

// iperf3Endless starts an iperf3 client that sends until end is called.
func (h *host) iperf3Endless(t *testing.T, from netip.Addr, to netip.AddrPort) (end func()) {
	t.Helper()
	client := exec.Command("iperf3", "--client", to.Addr().String(), "--bind", from.String(), "--port", fmt.Sprint(to.Port()), "--time", "0")
	if err := h.Start(client); err != nil {
		t.Fatalf("start iperf3: %v", err)
	}
	return func() {
		_ = client.Process.Kill()
		_ = client.Wait()
	}
}

// endless sends until end is called.
func (p *paced) endless() (end func() error) {
	var stopped atomic.Bool
	done := make(chan error, 1)
	go func() {
		var err error
		for err == nil && !stopped.Load() {
			_, err = p.send(100 * time.Millisecond)
		}
		done <- err
	}()
	return func() error { stopped.Store(true); return <-done }
}

// checkExact checks the arrivals of a source in the capture c against a rate, in bytes a
// second: all of them against the envelope, which allows for a stall, and the mean of
// those after the first second and before the last packets. The mean may be lower by the
// share less, and by stalls long enough to empty a queue.
func checkExact(t *testing.T, what string, c *capture, list []lab.Arrival, rate, less float64, stalls stallReport) error {
	t.Helper()
	events := payloads(list)
	first := slices.IndexFunc(events, func(e lab.Event) bool { return e.N > 1000 })
	if first < 0 || len(events) < first+100 {
		return fmt.Errorf("%s: %d packets arrived", what, len(events))
	}
	burst := lab.Sigma(events, rate)
	largest := slices.MaxFunc(events, func(a, b lab.Event) int { return a.N - b.N }).N
	in := lab.Between(events, events[first].At+guestSkip, events[len(events)-1].At-300*time.Millisecond)
	if len(in) < 50 {
		return fmt.Errorf("%s: %d packets arrived in the measured time", what, len(in))
	}
	in = trimLate(in, rate)
	start, span := in[0].At, in[len(in)-1].At-in[0].At
	var stalled time.Duration
	for _, s := range stalls {
		if at := c.At(s.at) - start; s.late >= stallAllowance && at > -s.late && at < span {
			stalled += s.late
		}
	}
	// A packet delays the next one, so the last one belongs to the time after it.
	off := float64(lab.Total(in[:len(in)-1]))/span.Seconds()/rate - 1
	t.Logf("%s: %+.3f %% off the rate in %.1f s, sigma %.1f units of %d bytes (including the start %.1f), longest gap %.1f ms, stalled for %.0f ms",
		what, 100*off, span.Seconds(), lab.Sigma(in, rate)/float64(largest), largest, burst/float64(largest),
		1000*lab.Percentile(lab.Gaps(in), 100).Seconds(), 1000*stalled.Seconds())
	// A granted burst would be all that max_delay allows, which is more.
	if burst > rate*(0.1+stalls.longest().Seconds()) {
		return fmt.Errorf("%s: sigma is %.0f ms of traffic at the rate", what, 1000*burst/rate)
	}
	if off > tolerance || off < -less-stalled.Seconds()/span.Seconds() {
		return fmt.Errorf("%s is %+.3f %% off the rate, want -%.1f %% to %.1f %%", what, 100*off, 100*less, 100*tolerance)
	}
	return nil
}

// trimLate returns the part of in between its least late packets, one among the first and one among the last.
func trimLate(in []lab.Event, rate float64) []lab.Event {
	const edge = 300 * time.Millisecond
	var sum, most, mostLast float64
	first, last := 0, len(in)-1
	for i, e := range in {
		credit := sum - rate*(e.At-in[0].At).Seconds() // reduced by lateness
		sum += float64(e.N)
		if e.At < in[0].At+edge && (i == 0 || credit > most) {
			first, most = i, credit
		}
		if e.At > in[len(in)-1].At-edge && (mostLast == 0 || credit > mostLast) {
			last, mostLast = i, credit
		}
	}
	return in[first : max(first, last)+1]
}

// payloads turns arrivals into events that count bytes like a limit, including retransmissions.
func payloads(list []lab.Arrival) []lab.Event {
	var events []lab.Event
	for _, a := range list {
		events = append(events, lab.Event{At: a.At, N: max(a.Payload, 1)})
	}
	return events
}

// countMarks returns the number of segments that arrived with a CE mark, and an error if
// one was lost before the first mark.
func countMarks(list []lab.Arrival) (marked int, err error) {
	const retransmit = 100 * time.Millisecond // minimum time until a lost segment arrives; an overtaken one arrives sooner
	type connection struct {
		next uint32        // next expected sequence number
		gap  time.Duration // when a later segment arrived
	}
	connections := map[netip.AddrPort]*connection{}
	var first time.Duration
	for _, a := range list {
		end := a.Seq + uint32(a.Payload)
		if a.Flags&lab.SYN != 0 {
			connections[a.From] = &connection{next: end + 1}
			continue
		}
		c := connections[a.From]
		switch ahead := int32(a.Seq - c.next); {
		case ahead > 0 && c.gap == 0:
			c.gap = a.At
		case ahead < 0 && c.gap > 0:
			if a.At-c.gap > retransmit && (marked == 0 || c.gap < first) {
				err = errors.New("a segment was lost before the first mark")
			}
			c.gap = 0
		}
		if int32(end-c.next) > 0 {
			c.next = end
		}
		if a.Marked {
			if marked == 0 {
				first = a.At
			}
			marked += (a.Payload + segmentSize - 1) / segmentSize
		}
	}
	return marked, err
}

func ofSource(list []lab.Arrival, source netip.Addr) (mine []lab.Arrival) {
	for _, a := range list {
		if a.From.Addr() == source {
			mine = append(mine, a)
		}
	}
	return mine
}

// Rates of sources that must not take much of the guest's CPU time.
const (
	lowPacketRate = 100                       // datagrams a second
	lowRate       = lowPacketRate * guestSize // bytes a second: 1.1 Mbit/s
)

// floods are two sources of datagrams in each family. The first sends four times its
// limit. The second sends an eighth of its limit, so that it may stall for a second and
// then send everything at once.
type floods struct {
	capture *capture
	senders []*paced
	sent    []int
}

func (n *network) newFloods(t *testing.T) *floods {
	t.Helper()
	fl := &floods{}
	for _, f := range families {
		n.downstream.discardUDP(t, f.udp())
		for i, rate := range []int{4 * lowPacketRate, lowPacketRate / 8} {
			fl.senders = append(fl.senders, n.client.newPaced(t, f.sources[1+i], f.udp(), paced{size: guestSize, rate: rate, period: guestPeriod}))
		}
	}
	fl.sent = make([]int, len(fl.senders))
	fl.capture = n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<14)
	return fl
}

// run sends for a while.
func (fl *floods) run(span time.Duration) func() error {
	return func() error {
		var all []func() error
		for i, p := range fl.senders {
			all = append(all, func() (err error) {
				fl.sent[i], err = p.send(span)
				return err
			})
		}
		err := runParallel(all...)
		time.Sleep(400 * time.Millisecond) // until all have left
		return err
	}
}

// check checks the arrivals: sources that exceed their limit get its rate, and the others lose nothing.
func (fl *floods) check(t *testing.T, stalls stallReport) error {
	t.Helper()
	list := fl.capture.stop()
	var errs []error
	for i, f := range families {
		errs = append(errs, checkExact(t, "udp, "+f.name, fl.capture, ofSource(list, f.sources[1]), lowRate, tolerance, stalls))
		quiet := ofSource(list, f.sources[2])
		waits := transitTimes(fl.capture, quiet)
		t.Logf("udp, %s: the quiet source's %d datagrams took %v (p50), %v (p99)", f.name, len(quiet), lab.Percentile(waits, 50), lab.Percentile(waits, 99))
		if sent := fl.sent[2*i+1]; len(quiet) != sent || sent == 0 {
			errs = append(errs, fmt.Errorf("%d of the quiet source's %d datagrams arrived", len(quiet), sent))
		}
		// Datagrams of the flood wait for 200 ms.
		if p50 := lab.Percentile(waits, 50); p50 > 20*time.Millisecond {
			errs = append(errs, fmt.Errorf("the quiet source's datagrams took %v (p50)", p50))
		}
	}
	return errors.Join(errs...)
}

// mustDetach runs the detach command to remove the leftovers of a daemon on the host.
func (h *host) mustDetach(t *testing.T, pins string) {
	t.Helper()
	if len(h.programs(t)) == 0 {
		t.Error("the daemon left nothing")
	}
	if r := h.command(t, "detach", "--pin-path", pins); r.code != 0 {
		t.Errorf("detach: %+v", r)
	}
	h.mustBeClean(t, pins)
}

// checkQueue fails the test unless the interface has an fq queue for the given number of packets.
func (h *host) checkQueue(t *testing.T, link string, packets int) {
	t.Helper()
	out := h.mustOutput(t, "tc", "qdisc", "show", "dev", link)
	all := regexp.MustCompile(`(?m)^qdisc fq .*$`).FindAllString(out, -1)
	want := []string{
		fmt.Sprintf(" limit %dp ", packets+packets/4), fmt.Sprintf(" flow_limit %dp ", packets), " buckets 65536 ", " orphan_mask 1048575 ",
		" horizon 3.6e+03s ", " horizon_drop ", // an hour, and a second
	}
	for _, line := range all {
		if i := slices.IndexFunc(want, func(w string) bool { return !strings.Contains(line+" ", w) }); i >= 0 {
			t.Errorf("the queue lacks%sand is %s", want[i], line)
		}
	}
	if len(all) == 0 {
		t.Errorf("no fq qdisc:\n%s", out)
	}
}
