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

	"shaperd/test/lab"
)

// fourMbit is what each source is held to where nothing else is said.
const fourMbit = 4e6 / 8 // bytes a second

const (
	guestSize   = 1400                  // of a datagram
	guestPeriod = 10 * time.Millisecond // of senders

	// What comes first is not measured: programs start, which takes the guest's time
	// from the others, TCP finds its rate, and buckets fill.
	guestSkip = time.Second

	guestDelay = "200ms" // of limits

	tolerance = 0.005 // by which a mean rate may be off
)

// guestLimit is the lines of a limit of each source.
func guestLimit(name, match string, bytesPerSecond int, maxDelay string, lines ...string) string {
	return limit(name, append([]string{
		match, keyAddress, fmt.Sprintf(`rate = "%dbit/s"`, 8*bytesPerSecond), fmt.Sprintf(`max_delay = %q`, maxDelay),
	}, lines...)...)
}

// watchGuest watches for stalls without the effort of startStallWatch.
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

// atOnce runs functions at the same time, and returns what went wrong.
func atOnce(all ...func() error) error {
	errs := make([]error, len(all))
	var group sync.WaitGroup
	for i, do := range all {
		group.Go(func() { errs[i] = do() })
	}
	group.Wait()
	return errors.Join(errs...)
}

// tool runs a program inside the host, and returns what it writes.
func (h *host) tool(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := h.Output(name, args...)
	must(t, err)
	return out
}

const (
	segmentSize = 1448 // of TCP, with its usual option
	littleTrain = 4    // segments
	longTrain   = 44   // as many as are less than 64 KiB
)

// trains has the segments that TCP sends at once stay together on their way, up to so
// many: that spares the guest most of its work.
func (n *network) trains(t *testing.T, length int) {
	t.Helper()
	must(t, errors.Join(
		n.client.Segments(clientLink, length),
		n.shaper.Segments(shaperLeft, length),
		n.shaper.Segments(shaperRight, length)))
}

// addFar puts a host behind the client, which routes for it. What a host sends over a
// veth stays its own until another one routes it, so that its TCP would see it wait at
// the next host's ingress, and send no more: no wire has that.
func (n *network) addFar(t *testing.T) (far *host, source netip.Addr) {
	t.Helper()
	source, via := netip.MustParseAddr("10.4.0.10"), netip.MustParseAddr("10.4.0.1")
	far = newHost(t, "far")
	must(t, errors.Join(
		lab.Join(far.Host, "out", n.client.Host, "back"),
		far.Address("out", 24, source), n.client.Address("back", 24, via), far.Route(via),
		n.client.Sysctl("net/ipv4/ip_forward", "1")))
	n.shaper.tool(t, "ip", "route", "add", "10.4.0.0/24", "via", ipv4.sources[0].String())
	n.trains(t, littleTrain)
	must(t, far.Segments("out", littleTrain))
	return far, source
}

// A stream is a client of iperf3, and the arrivals that it causes.
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

// newStream makes a stream from a host to the downstream. Each has a port of its own.
func (n *network) newStream(t *testing.T, name string, from *host, source, to netip.Addr, port uint16, args ...string) *stream {
	t.Helper()
	n.downstream.iperf3Server(t, port)
	return &stream{
		name: name, from: from, source: source, to: netip.AddrPortFrom(to, port), args: args,
		capture: n.downstream.capture(t, downstreamLink, port, 1<<15),
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

// iperf3Endless has a client of iperf3 send until it is ended.
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

// endless sends until it is ended.
func (p *paced) endless() (end func() error) {
	var enough atomic.Bool
	done := make(chan error, 1)
	go func() {
		var err error
		for err == nil && !enough.Load() {
			_, err = p.send(100 * time.Millisecond)
		}
		done <- err
	}()
	return func() error { enough.Store(true); return <-done }
}

// exact holds what the capture c has of a source to the rate, in bytes a second: all
// of it to the envelope, in which a stall has room, and to the mean what is behind the
// first second and before the last packets. That may be less by a share of it, and by
// the stalls that are long enough for a queue to run empty.
func exact(t *testing.T, what string, c *capture, list []lab.Arrival, rate, less float64, stalls stallReport) error {
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
		return fmt.Errorf("%s: %d packets arrived in the time that counts", what, len(in))
	}
	in = punctual(in, rate)
	start, span := in[0].At, in[len(in)-1].At-in[0].At
	var stalled time.Duration
	for _, s := range stalls {
		if at := c.At(s.at) - start; s.late >= stallAlibi && at > -s.late && at < span {
			stalled += s.late
		}
	}
	// A packet has the next one wait, and so the last one belongs to the time behind it.
	off := float64(lab.Total(in[:len(in)-1]))/span.Seconds()/rate - 1
	t.Logf("%s: %+.3f %% off the rate in %.1f s, sigma %.1f units of %d bytes (from the beginning %.1f), longest gap %.1f ms, stalled for %.0f ms",
		what, 100*off, span.Seconds(), lab.Sigma(in, rate)/float64(largest), largest, burst/float64(largest),
		1000*lab.Percentile(lab.Gaps(in), 100).Seconds(), 1000*stalled.Seconds())
	// A burst handed out would be all that max_delay holds, which is more.
	if burst > rate*(0.1+stalls.longest().Seconds()) {
		return fmt.Errorf("%s: sigma is %.0f ms of the rate", what, 1000*burst/rate)
	}
	if off > tolerance || off < -less-stalled.Seconds()/span.Seconds() {
		return fmt.Errorf("%s is %+.3f %% off the rate, want -%.1f %% to %.1f %%", what, 100*off, 100*less, 100*tolerance)
	}
	return nil
}

// punctual returns in without what is before and behind two packets that were hardly
// late, one of the first and one of the last.
func punctual(in []lab.Event, rate float64) []lab.Event {
	const edge = 300 * time.Millisecond
	var sum, most, mostLast float64
	first, last := 0, len(in)-1
	for i, e := range in {
		credit := sum - rate*(e.At-in[0].At).Seconds() // less by what it is late
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

// payloads turns arrivals into events that count bytes as a limit does, those too that
// TCP sent before.
func payloads(list []lab.Arrival) []lab.Event {
	var events []lab.Event
	for _, a := range list {
		events = append(events, lab.Event{At: a.At, N: max(a.Payload, 1)})
	}
	return events
}

// marks returns how many of the segments arrived with a mark, and an error when one
// was lost before the first of them.
func marks(list []lab.Arrival) (marked int, err error) {
	const again = 100 * time.Millisecond // until a lost segment is there again; one that was overtaken is there sooner
	type connection struct {
		next uint32        // what comes next in its sequence
		gap  time.Duration // when something else came
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
			if a.At-c.gap > again && (marked == 0 || c.gap < first) {
				err = errors.New("a segment was lost before any was marked")
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

// Rates of those sources that are not to take the guest's time.
const (
	littleFlood = 100                     // datagrams a second
	little      = littleFlood * guestSize // bytes a second: 1.1 Mbit/s
)

// floods are two sources of datagrams in each family, the first of which sends four
// times its limit, the second an eighth of it: it may stop for a second, and then
// send all at once.
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
		for i, rate := range []int{4 * littleFlood, littleFlood / 8} {
			fl.senders = append(fl.senders, n.client.newPaced(t, f.sources[1+i], f.udp(), paced{size: guestSize, rate: rate, period: guestPeriod}))
		}
	}
	fl.sent = make([]int, len(fl.senders))
	fl.capture = n.downstream.capture(t, downstreamLink, udpPort, 1<<14)
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
		err := atOnce(all...)
		time.Sleep(400 * time.Millisecond) // until all have left
		return err
	}
}

// check holds what arrived to the limits: each source that sends too much gets what it
// may have, and the others lose nothing.
func (fl *floods) check(t *testing.T, stalls stallReport) error {
	t.Helper()
	list := fl.capture.stop()
	var errs []error
	for i, f := range families {
		errs = append(errs, exact(t, "udp, "+f.name, fl.capture, ofSource(list, f.sources[1]), little, tolerance, stalls))
		quiet := ofSource(list, f.sources[2])
		waits := waitsOf(fl.capture, quiet)
		t.Logf("udp, %s: the quiet source's %d datagrams took %v (p50), %v (p99)", f.name, len(quiet), lab.Percentile(waits, 50), lab.Percentile(waits, 99))
		if sent := fl.sent[2*i+1]; len(quiet) != sent || sent == 0 {
			errs = append(errs, fmt.Errorf("%d of the quiet source's %d datagrams arrived", len(quiet), sent))
		}
		// Those of the flood wait for 200 ms.
		if p50 := lab.Percentile(waits, 50); p50 > 20*time.Millisecond {
			errs = append(errs, fmt.Errorf("the quiet source's datagrams took %v (p50)", p50))
		}
	}
	return errors.Join(errs...)
}

// mustDetach has the command take away what a daemon left at the host.
func (h *host) mustDetach(t *testing.T, pins string) {
	t.Helper()
	if len(h.programs(t)) == 0 {
		t.Error("the daemon left nothing")
	}
	if r := h.command(t, "detach", "--pins", pins); r.code != 0 {
		t.Errorf("detach: %+v", r)
	}
	h.mustBeClean(t, pins)
}

// checkQueue fails the test unless the interface has a queue for so many packets.
func (h *host) checkQueue(t *testing.T, link string, packets int) {
	t.Helper()
	out := h.tool(t, "tc", "qdisc", "show", "dev", link)
	all := regexp.MustCompile(`(?m)^qdisc fq .*$`).FindAllString(out, -1)
	want := []string{
		fmt.Sprintf(" limit %dp ", packets+packets/4), fmt.Sprintf(" flow_limit %dp ", packets), " buckets 65536 ", " orphan_mask 1048575 ",
		" horizon 3.6e+03s ", " horizon_drop ", // an hour, and a second
	}
	for _, line := range all {
		if i := slices.IndexFunc(want, func(w string) bool { return !strings.Contains(line+" ", w) }); i >= 0 {
			t.Errorf("the queue has not%sbut is %s", want[i], line)
		}
	}
	if len(all) == 0 {
		t.Errorf("there is no fq:\n%s", out)
	}
}
