package adaptive

import (
	"math"
	"slices"
	"time"

	"shaperd.dev/shaperd/leaky"
)

// Report is what a host tells the others about its gate of a limit that they share. But for Waiting these are totals, from
// which the others take what has passed since the report before. Times are in microseconds.
type Report struct {
	At       int64 `json:"t"` // by the host's clock, which nobody compares with another one
	InFlight int64 `json:"n"` // integral of what was in flight
	Full     int64 `json:"f"` // time in which somebody waited
	Answers  int64 `json:"a"`
	Latency  int64 `json:"l"` // sum over the answers
	Squares  int64 `json:"q"` // sum of the squares of latency in milliseconds
	Failures int64 `json:"x,omitempty"`
	Left     int64 `json:"g,omitempty"`
	Waiting  int   `json:"w,omitempty"`
	Every    int64 `json:"e,omitempty"` // time between two reports

	Found *Found `json:"is,omitempty"` // nil while the host knows of nothing
}

// follows reports whether r can be what the same process reports after was: less than a day later, and with no more than any
// server can have done.
func (r *Report) follows(was *Report) bool {
	const most = 1 << 20 // in flight, and answers in a microsecond
	took := r.At - was.At
	within := func(now, before, most int64) bool { return before >= 0 && now >= before && now-before <= most }
	return took > 0 && took < 86400e6 && within(r.InFlight, was.InFlight, took*most) && within(r.Full, was.Full, 2*took) && within(r.Answers, was.Answers, took) &&
		within(r.Latency, was.Latency, 86400e6*max(1, r.Answers-was.Answers)) && within(r.Squares, was.Squares, 86400e3*86400e3*max(1, r.Answers-was.Answers)) && within(r.Failures, was.Failures, took) && within(r.Left, was.Left, took)
}

// Found is what a Joint has found out.
type Found struct {
	Limit      int `json:"c"` // how many may be in flight at all hosts together
	Middle     int `json:"m"` // see [Controller.Middle]
	Most       int `json:"u"` // see [Controller.Most]
	Throughput int `json:"r"` // answers a second
}

// Report returns what l has measured up to now.
func (l *Load) Report(now leaky.Time) Report {
	l.advance(now)
	micros := func(s float64) int64 { return int64(s * 1e6) }
	return Report{
		At: now.Duration().Microseconds(), InFlight: micros(l.allInFlight), Full: micros(l.waited), Answers: int64(l.answers), Latency: micros(l.latency),
		Squares: int64(l.latency2 * 1e6), Failures: int64(l.failures), Left: int64(l.left), Waiting: l.waiting,
	}
}

// Joint makes the gates of several hosts obey one controller. Hosts exchange reports some times a second. The first of
// them by name, of those that are heard of, leads: it adds up what all report, and steps the controller; the others take
// over the limit that it has found, and tell it too. When another one leads, it goes on from there. While nothing is exchanged
// the limit stays.
//
// That hosts now and then take different ones for the leader, or have not heard of a change yet, does no harm: the operator's
// bounds hold at each, and what is in flight at all is what the controller reckons with. It is not safe for concurrent use.
type Joint struct {
	name       string
	min, max   int
	hosts      map[string]*heard
	controller *Controller // nil unless this host leads
	found      Found       // zero before anything is known
	leader     string
	at         leaky.Time // of the last exchange
}

// heard is what is known of a host.
type heard struct {
	last     Report
	at       leaky.Time // when its report last changed
	n        int        // reports
	inFlight float64    // mean between its last two reports
	waits    bool       // somebody waited for most of that time, or does now
}

// staleAfter is for how long a report of a host that reports so often counts. What has passed since the one before is unknown
// when that is older.
func staleAfter(every leaky.Time) leaky.Time {
	return min(max(2*leaky.Second, 5*every), 60*leaky.Second)
}

func (h *heard) fresh(now leaky.Time) bool {
	return now < h.at+staleAfter(leaky.FromDuration(time.Duration(min(max(h.last.Every, 0), 60e6))*time.Microsecond))
}

// NewJoint returns what finds a limit between least and most with other hosts. name is that of this one.
func NewJoint(name string, least, most int) *Joint {
	return &Joint{name: name, min: least, max: most, hosts: map[string]*heard{}}
}

// Resume makes f what is known, if nothing is.
func (j *Joint) Resume(f Found) {
	if j.found.Limit == 0 {
		j.follow(f)
	}
}

// Bound changes the least and the most.
func (j *Joint) Bound(least, most int, now leaky.Time) {
	j.min, j.max = least, most
	if j.controller != nil {
		j.controller.Bound(least, most, now)
		j.follow(j.found)
	}
}

// Found returns what is known, the zero Found before anything is, and the host that leads.
func (j *Joint) Found() (f Found, leader string) { return j.found, j.leader }

// Leads reports whether this host does.
func (j *Joint) Leads() bool { return j.controller != nil }

// History is that of the controller, or nil if another host has it.
func (j *Joint) History() []Change {
	if j.controller == nil {
		return nil
	}
	return j.controller.History()
}

// Exchange takes in the reports of hosts by name, with that of this one, and steps the controller if this host leads.
// interval is the time from one exchange to the next.
func (j *Joint) Exchange(reports map[string]Report, interval, now leaky.Time) {
	if now >= j.at+staleAfter(interval) {
		j.controller = nil // what has passed meanwhile is unknown
	}
	j.at = now
	var passed sums
	for name, r := range reports {
		j.hear(name, r, &passed, now)
	}
	var fresh []string
	inFlight, waiting, busy := 0.0, 0, 0
	for name, h := range j.hosts {
		if !h.fresh(now) {
			if _, told := reports[name]; !told { // a ledger tells for long what a host that is away has reported
				delete(j.hosts, name)
			}
			continue
		}
		fresh = append(fresh, name)
		inFlight += h.inFlight
		waiting += min(max(h.last.Waiting, 0), 1<<20)
		if h.waits && h.last.Waiting <= 0 {
			waiting++
		}
		if h.inFlight > 0 || h.waits {
			busy++
		}
	}
	slices.Sort(fresh)
	j.leader = ""
	if len(fresh) > 0 {
		j.leader = fresh[0]
	}
	if j.controller == nil || j.leader != j.name {
		for _, name := range fresh { // the leader's, or that which it will go on from
			if f := j.hosts[name].last.Found; f != nil && name != j.name {
				j.follow(*f)
				break
			}
		}
	}
	if j.leader != j.name {
		j.controller = nil
		return
	}
	if j.hosts[j.name].n < 2 {
		return // what is in flight is not known yet
	}
	c := j.controller
	if c == nil {
		c = New(j.min, j.max, int(math.Round(inFlight)), now)
		if j.found.Middle > 0 {
			c.resume(j.found.Middle, now)
		}
		c.lag = 3 * interval // until a limit is in effect at all hosts, and they have said so
		j.controller = c
	}
	c.grain = float64(max(busy, 1)) // a smaller change may give no host a slot more
	c.Set(int(math.Round(inFlight)), waiting, now)
	c.add(passed)
	c.Step(now)
	j.found = Found{Limit: c.Limit(), Middle: c.Middle(), Most: c.Most(), Throughput: int(math.Round(c.Throughput()))}
}

// hear takes in a report, and adds what has passed since the one before of that host.
func (j *Joint) hear(name string, r Report, passed *sums, now leaky.Time) {
	h := j.hosts[name]
	if h == nil {
		h = &heard{}
		j.hosts[name] = h
	}
	was := h.last
	if r.At == was.At && h.at != 0 {
		return
	}
	known := h.at != 0 && h.fresh(now)
	h.last, h.at = r, now
	took := r.At - was.At
	if h.n++; !known || !r.follows(&was) {
		h.inFlight, h.waits, h.n = 0, r.Waiting > 0, 1 // it is new, or another process
		return
	}
	h.inFlight = float64(r.InFlight-was.InFlight) / float64(took)
	h.waits = 2*(r.Full-was.Full) > took || r.Waiting > 0
	passed.answers += float64(r.Answers - was.Answers)
	passed.latency += float64(r.Latency-was.Latency) / 1e6
	passed.latency2 += float64(r.Squares-was.Squares) / 1e6
	passed.failures += float64(r.Failures - was.Failures)
	passed.left += float64(r.Left - was.Left)
}

// follow takes over what another host has found.
func (j *Joint) follow(f Found) {
	bound := func(n int) int { return min(max(n, j.min), j.max) }
	j.found = Found{Limit: bound(f.Limit), Middle: bound(f.Middle), Most: bound(f.Most), Throughput: max(f.Throughput, 0)}
}
