package adaptive

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"time"

	"shaperd.dev/shaperd/leaky"
)

// Report is what a host tells the others about its gate of a limit that they share. But for Waiting these are totals, from
// which the others take what has passed since the report before. Times are in microseconds.
type Report struct {
	At       int64 // by the host's clock, which nobody compares with another one
	InFlight int64 // integral of what was in flight
	Full     int64 // time in which somebody waited
	Answers  int64
	Latency  int64 // sum over the answers
	Squares  int64 // sum of the squares of latency in milliseconds
	Failures int64
	Left     int64
	Waiting  int
	Every    int64 // time between two reports

	Found *Found // nil while the host knows of nothing
}

// MarshalJSON returns the numbers of r, in a row: stores have little room for it.
func (r Report) MarshalJSON() ([]byte, error) {
	row := []int64{r.At, r.InFlight, r.Full, r.Answers, r.Latency, r.Squares, r.Failures, r.Left, int64(r.Waiting), r.Every}
	if f := r.Found; f != nil {
		row = append(row, f.Step, int64(f.Limit), int64(f.Middle), int64(f.Most), int64(f.Throughput))
	}
	return json.Marshal(row)
}

// UnmarshalJSON reads what MarshalJSON returns.
func (r *Report) UnmarshalJSON(text []byte) error {
	var row []int64
	if err := json.Unmarshal(text, &row); err != nil {
		return err
	}
	if len(row) != 10 && len(row) != 15 {
		return fmt.Errorf("a report of %d numbers", len(row))
	}
	*r = Report{row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], int(row[8]), row[9], nil}
	if len(row) == 15 {
		r.Found = &Found{row[10], int(row[11]), int(row[12]), int(row[13]), int(row[14])}
	}
	return nil
}

// follows reports whether r can be what the same process reports after was, most later: with no more than any server can have done.
func (r *Report) follows(was *Report, most leaky.Time) bool {
	const atOnce = 1 << 20 // in flight, and answers in a microsecond
	took := r.At - was.At
	within := func(now, before int64, most float64) bool {
		return before >= 0 && now >= before && float64(now)-float64(before) <= most
	}
	t, answers := float64(took), max(1, float64(r.Answers)-float64(was.Answers))
	return took > 0 && leaky.FromDuration(time.Duration(min(took, 86400e6))*time.Microsecond) <= most &&
		within(r.InFlight, was.InFlight, t*atOnce) && within(r.Full, was.Full, 2*t) && within(r.Answers, was.Answers, t) &&
		within(r.Latency, was.Latency, 86400e6*answers) && within(r.Squares, was.Squares, 86400e3*86400e3*answers) &&
		within(r.Failures, was.Failures, t) && within(r.Left, was.Left, t)
}

// Found is what a Joint has found out.
type Found struct {
	Step       int64 // grows with each step of whoever leads: what has more is newer
	Limit      int   // how many may be in flight at all hosts together
	Middle     int   // see [Controller.Middle]
	Most       int   // see [Controller.Most]
	Throughput int   // answers a second
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
// them by name, of those that are heard, leads: it adds up what all report, and steps the controller; the others take
// over the limit that it has found, and tell it too. When another one leads, it goes on from there. While nothing is exchanged
// the limit stays. It also stays while a host is not heard that may have connections in flight: what the others have would be
// taken for the whole.
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
	counted    []string   // hosts that the controller reckons with
	unheard    []string   // those that it waits for
	since, at  leaky.Time // of the first exchange without a gap, and of the last
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

// StaleAfter is for how long a host that exchanges reports so often is taken to be there without a new one.
func StaleAfter(every time.Duration) time.Duration {
	return staleAfter(leaky.FromDuration(every)).Duration()
}

// every is the time between two reports of the host.
func (h *heard) every() leaky.Time {
	return leaky.FromDuration(time.Duration(min(max(h.last.Every, 0), 60e6)) * time.Microsecond)
}

func (h *heard) fresh(now leaky.Time) bool { return now < h.at+staleAfter(h.every()) }

// busy reports whether connections are in flight or wait, as far as is known.
func (h *heard) busy() bool { return h.inFlight > 0 || h.waits }

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
	}
	if j.found.Limit > 0 {
		j.follow(j.found)
	}
}

// Found returns what is known, the zero Found before anything is, and the host that leads.
func (j *Joint) Found() (f Found, leader string) { return j.found, j.leader }

// Unheard returns the hosts without which the limit stays.
func (j *Joint) Unheard() []string { return j.unheard }

// Leads reports whether this host does.
func (j *Joint) Leads() bool { return j.controller != nil }

// History is that of the controller, or nil if another host has it.
func (j *Joint) History() []Change {
	if j.controller == nil {
		return nil
	}
	return j.controller.History()
}

// Exchange takes in the last reports of hosts by name, and steps the controller if this host leads. They are of all hosts that
// may have connections in flight, and of this one if the others hear it. interval is the time since the exchange before, or what it is to be.
func (j *Joint) Exchange(reports map[string]Report, interval, now leaky.Time) {
	if j.at == 0 || now >= j.at+staleAfter(interval) {
		j.controller, j.since = nil, now // what has passed meanwhile is unknown
	}
	j.at = now
	var passed sums
	for name, r := range reports {
		j.hear(name, r, &passed, now)
	}
	var counted []string
	j.leader, j.unheard = "", nil
	newest := Found{Step: j.found.Step}
	inFlight, waiting, busy, late := 0.0, 0, 0, false
	for name, h := range j.hosts {
		fresh := h.fresh(now)
		if _, told := reports[name]; !told && !fresh {
			delete(j.hosts, name)
			continue
		}
		if f := h.last.Found; f != nil && name != j.name && f.Step > newest.Step && f.Step < maxSteps && f.Limit > 0 {
			newest = *f
		}
		if fresh && (j.leader == "" || name < j.leader) {
			j.leader = name
		}
		switch {
		case h.n < 2 && !fresh: // it was away before this host began
			continue
		case h.n < 2, h.busy() && now >= h.at+4*max(interval, h.every()):
			j.unheard = append(j.unheard, name)
			continue
		}
		late = late || h.busy() && now > h.at+2*max(interval, h.every())
		counted = append(counted, name)
		inFlight += h.inFlight
		waiting += min(max(h.last.Waiting, 0), 1<<20)
		if h.waits && h.last.Waiting <= 0 {
			waiting++
		}
		if h.busy() {
			busy++
		}
	}
	slices.Sort(counted)
	slices.Sort(j.unheard)
	if newest.Limit > 0 {
		j.follow(newest)
		j.controller = nil // another one has led meanwhile
	}
	switch {
	case j.leader != j.name:
		j.controller = nil
		return
	case len(j.unheard) > 0:
		j.counted = nil
		return
	case j.found.Limit == 0 && now < j.since+staleAfter(interval):
		return // others may know, and are not heard yet
	}
	c := j.controller
	if c == nil {
		c = New(j.min, j.max, int(math.Round(inFlight)), now)
		if j.found.Middle > 0 {
			c.resume(j.found.Middle, now)
		}
		j.controller, j.counted = c, counted
	}
	c.lag = 3 * interval            // until a limit is in effect at all hosts, and they have said so
	c.grain = float64(max(busy, 1)) // a smaller change may give no host a slot more
	c.Set(int(math.Round(inFlight)), waiting, now)
	c.add(passed)
	if !slices.Equal(counted, j.counted) {
		j.counted = counted
		c.restart(now) // what others had in flight compares with nothing
	}
	if late {
		return // what it has answered since is yet to be heard of
	}
	c.Step(now)
	j.found = Found{Step: j.found.Step + 1, Limit: c.Limit(), Middle: c.Middle(), Most: c.Most(), Throughput: int(math.Round(c.Throughput()))}
}

// maxSteps bounds Found.Step: no leader makes so many.
const maxSteps = 1 << 50

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
	heardAt, known := h.at, h.at != 0 && h.fresh(now)
	h.last, h.at = r, now
	took := r.At - was.At
	if h.n++; !known || !r.follows(&was, now-heardAt+staleAfter(h.every())) {
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
	j.found = Found{Step: f.Step, Limit: bound(f.Limit), Middle: bound(f.Middle), Most: bound(f.Most), Throughput: max(f.Throughput, 0)}
}
