package netns

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// A fault is something that happens to a group under load.
type fault struct {
	name   string
	inject func()
	mend   func()        // nil if the fault is over when inject returns
	lasts  time.Duration // until it is mended
	after  time.Duration // from then on

	least   float64 // minimum of what arrives in the last second, of the rate; 0 is half
	mayFail bool    // transfers may fail
	follow  bool    // the hot spot moves: report how fast it is followed
}

// minimum returns the minimum of what arrives in the last second, of the rate.
func (f fault) minimum() float64 { return cmp.Or(f.least, 0.5) }

// A outcome is what arrived during one fault.
type outcome struct {
	name      string
	took      time.Duration
	excess    float64 // of the worst interval that ended meanwhile, in bytes
	use       float64 // what arrived, of the rate
	by        [groupSize]float64
	lowest    float64 // in the half second in which the least arrived
	last      float64 // in the last second
	recovered time.Duration
	followed  []time.Duration // sorted
	ended     int             // transfers
	failed    []error
	stall     time.Duration // the longest of the machine
	stalled   float64       // share of the time in stalls
	allowed   float64       // excess, in bytes
	worst     string        // the worst interval
}

// beyond returns by how much the excess was beyond what is allowed, in bytes.
func (r *outcome) beyond() float64 { return max(0, r.excess-r.allowed) }

func (r outcome) String() string {
	line := fmt.Sprintf("%-40s %5.1fs %6.1fkB %6.1fms %7.0fB %5.1f%% %5.1f%% %8dms %6d %6.1fms", r.name, r.took.Seconds(), r.excess/1000,
		1000*r.excess/groupRate, r.beyond(), 100*r.use, 100*r.lowest, r.recovered.Milliseconds(), len(r.failed), float64(r.stall.Microseconds())/1000)
	if n := len(r.followed); n > 0 {
		line += fmt.Sprintf("  followed in %v (median of %d), %v at most", lab.Percentile(r.followed, 50).Round(time.Millisecond), n, r.followed[n-1].Round(time.Millisecond))
	}
	return line
}

// window is the time over which the lowest use is measured.
const window = 500 * time.Millisecond

// run injects a fault under the load that there is, and checks what arrives.
func (g *group) run(f fault) outcome {
	g.t.Helper()
	g.load.takeResults()
	stalls, before := startStallWatch(g.t), g.stalls
	start := time.Now()
	if f.inject != nil {
		f.inject()
	}
	if f.mend != nil {
		time.Sleep(f.lasts)
		f.mend()
	}
	mended := time.Now()
	time.Sleep(f.after)
	use := func(events []lab.Event, from, until time.Duration) float64 {
		return float64(lab.Total(lab.Between(events, from, until))) / groupRate / (until - from).Seconds()
	}
	var list []lab.Arrival
	var events []lab.Event
	var end time.Time
	var report stallReport
	// After a stall, which may end leases, the load needs some time to be as it was.
	for extra := 0; ; extra++ {
		end = time.Now()
		list = append(list, g.recorder.next(groupPort)...)
		events = lab.Bytes(list)
		report = append(report, stalls.stop()...)
		until := g.recorder.at(end)
		if use(events, until-time.Second, until) >= f.minimum() || report.longest() < stallAllowance || extra == 10 {
			break
		}
		stalls = startStallWatch(g.t)
		time.Sleep(time.Second)
	}

	r := outcome{name: f.name, took: end.Sub(start), stall: report.longest()}
	r.stalled = report.share(r.took)
	g.stalls = report.machine()
	// A stall delays frames on their way to the downstream. The worst interval may end with those of the phase before.
	r.allowed = groupAllowed() + groupRate*min(max(before.longest(), g.stalls.longest()), stallAllowance).Seconds()
	var jumps []jump
	r.ended, r.failed, jumps = g.load.takeResults()
	g.measureExcess(&r, list)
	from, to, until := g.recorder.at(start), g.recorder.at(mended), g.recorder.at(end)
	r.use = use(events, from, until)
	for i, gw := range g.gateways {
		r.by[i] = use(lab.Bytes(gw.arrivals(list)), from, until)
	}
	r.last = use(events, until-time.Second, until)
	r.lowest = 1
	for at := from; at+window <= until; at += window / 50 {
		some := use(events, at, at+window)
		if r.lowest = min(r.lowest, some); some < 0.7 {
			r.recovered = max(0, at+window-to)
		}
	}
	if f.follow {
		r.followed = g.follow(list, jumps, until)
	}
	if *figures {
		g.t.Logf("%s, %% of the rate in each 0.1 s, mended after %v:\n%s", f.name, mended.Sub(start).Round(time.Millisecond), g.timeline(list, from, until))
	}
	g.results = append(g.results, r)
	g.check(f, &r)
	return r
}

// measureExcess sets the excess of r.
func (g *group) measureExcess(r *outcome, list []lab.Arrival) {
	var since, until time.Duration
	for _, e := range lab.Bytes(list) {
		if excess, first := g.meter.add(e); excess > r.excess {
			r.excess, since, until = excess, first, e.At
		}
	}
	if r.beyond() == 0 {
		return
	}
	g.meter = newExcessMeter(groupRate) // later intervals do not have what is reported now
	r.worst = fmt.Sprintf("from %v to %v", since, until)
	for _, gw := range g.gateways {
		r.worst += fmt.Sprintf(", %s %d", gw.name, lab.Total(lab.Between(lab.Bytes(gw.arrivals(list)), since, until+1)))
	}
}

// arrivals returns what arrived through the gateway.
func (gw *gateway) arrivals(list []lab.Arrival) []lab.Arrival {
	var mine []lab.Arrival
	for _, a := range list {
		if a.From.Addr() == gw.addr {
			mine = append(mine, a)
		}
	}
	return mine
}

// timeline returns what arrived through each gateway in each 0.1 s.
func (g *group) timeline(list []lab.Arrival, from, until time.Duration) string {
	const step = 100 * time.Millisecond
	var b strings.Builder
	for _, gw := range g.gateways {
		events := lab.Bytes(gw.arrivals(list))
		for at := from; at < until; at += step {
			fmt.Fprintf(&b, "%4.0f", 100*float64(lab.Total(lab.Between(events, at, at+step)))/groupRate/step.Seconds())
		}
		b.WriteString("\n")
	}
	return b.String()
}

// follow returns how long it took after each jump until 90 % of the rate arrived through the gateway
// with the demand, in 50 ms, sorted. A jump that was not followed counts until the next one.
func (g *group) follow(list []lab.Arrival, jumps []jump, until time.Duration) (took []time.Duration) {
	const span = 50 * time.Millisecond
	for i, j := range jumps {
		start, end := g.recorder.at(j.at), until
		if i+1 < len(jumps) {
			end = g.recorder.at(jumps[i+1].at)
		}
		events := lab.Bytes(g.gateways[j.to].arrivals(list))
		at := start + span
		for at < end && float64(lab.Total(lab.Between(events, at-span, at))) < 0.9*groupRate*span.Seconds() {
			at += time.Millisecond
		}
		if end-start >= time.Second { // others were cut short by the end
			took = append(took, at-start)
		}
	}
	slices.Sort(took)
	return took
}

// check fails the test if a outcome is not as the fault allows.
func (g *group) check(f fault, r *outcome) {
	g.t.Helper()
	if beyond := r.beyond(); beyond > 0 {
		g.t.Errorf("%s: %.0f bytes more arrived than R*t + %.0f, %s", f.name, beyond, r.allowed, r.worst)
	}
	if least := f.minimum(); r.last < least {
		g.t.Errorf("%s: in the last second %.1f %% of the rate arrived, want at least %.0f %%", f.name, 100*r.last, 100*least)
	}
	if f.follow && (len(r.followed) == 0 || lab.Percentile(r.followed, 50) > 500*time.Millisecond+2*r.stall) {
		g.t.Errorf("%s: the hot spot was followed in %v", f.name, r.followed)
	}
	if !f.mayFail && len(r.failed) > 0 {
		g.t.Errorf("%s: %d of %d transfers failed: %v", f.name, len(r.failed), len(r.failed)+r.ended, r.failed[0])
	}
}
