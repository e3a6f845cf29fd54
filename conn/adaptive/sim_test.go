package adaptive

import (
	"container/heap"
	"math"
	"math/rand/v2"
	"slices"

	"shaperd.dev/shaperd/leaky"
)

// A simulation of gates, each with a controller, in front of one server. Times are seconds.
type sim struct {
	world
	rng    *rand.Rand
	now    float64
	events events
	order  uint64
	server server
	gates  []*simGate
	result simResult
}

// controller is what a gate asks for its limit.
type controller interface {
	Limit() int
	set(inFlight, waiting int, now float64)
	end(took float64, inFlight int, how outcome, now float64)
	step(now float64)
}

type outcome int

const (
	answered outcome = iota
	failed
	left // the client has, before the answer
)

// world is a server, and what is asked of it.
type world struct {
	name     string
	length   float64 // of the run
	server   server
	work     func(*sim) float64 // that a request is to one worker
	arrivals func(*sim) float64 // a second
	batch    int                // requests that come at once each second, beside these
	rtt      func(*sim) float64 // between gate and server
	events   []float64          // when the server changes
	changes  []change           // what changes
	wait     float64            // for the gate, at most
	deadline float64            // of the client, from its arrival
	ghosts   bool               // a client that leaves frees its slot, and the server works on
	retries  int                // by clients that were not served
	clients  int                // that ask, wait for the answer, and think; instead of arrivals
	think    float64            // mean
	gates    int                // that share the server
	rights   []int              // the best static cap of each part between events
	target   float64            // latency that an operator would tell AIMD
}

type change struct {
	at, every float64
	do        func(*server, *sim)
}

// right returns the best static cap at t.
func (w *world) right(t float64) int {
	i, _ := slices.BinarySearchFunc(w.events, t, func(e, t float64) int {
		if e <= t {
			return -1
		}
		return 1
	})
	return w.rights[i]
}

type request struct {
	arrived, admitted float64
	work, rtt         float64
	ends              float64 // in the server's virtual time
	gate              *simGate
	inFlight          int // with it, when it was admitted
	tries             int
	state             requestState
	index             int // in the server's heap
	gone              bool
	failed            bool
}

type requestState int

const (
	queued requestState = iota
	admitted
	done
)

type simGate struct {
	controller
	inFlight, waiting int
	queue             []*request // with some that have left
}

// server works on all requests at once, more slowly the more there are (the universal scalability law), or on as many
// as it has workers while the others wait.
type server struct {
	workers      int // 0: all at once
	sigma, kappa float64
	most         int // that it accepts; 0 is no bound
	others       int // that do not come from the gates
	speed        float64
	virtual, at  float64 // work done for each request that runs, up to at
	running      requests
	backlog      []*request
	version      int
}

func (s *server) rate() float64 {
	n := float64(len(s.running) + s.others)
	switch {
	case len(s.running) == 0:
		return 0
	case s.workers > 0:
		return s.speed
	}
	return s.speed / (1 + s.sigma*(n-1) + s.kappa*n*(n-1))
}

type simResult struct {
	good                    int // answered in time
	limits, goods           []float64
	latencies               []float64 // of a sample
	arrived, failed, missed int
}

type event struct {
	at    float64
	order uint64
	do    func()
}

type events []event

func (h events) Len() int { return len(h) }
func (h events) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].order < h[j].order
}
func (h events) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *events) Push(x any)   { *h = append(*h, x.(event)) }
func (h *events) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = event{}
	*h = old[:len(old)-1]
	return e
}

type requests []*request

func (h requests) Len() int           { return len(h) }
func (h requests) Less(i, j int) bool { return h[i].ends < h[j].ends }
func (h requests) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *requests) Push(x any) {
	r := x.(*request)
	r.index = len(*h)
	*h = append(*h, r)
}

func (h *requests) Pop() any {
	old := *h
	r := old[len(old)-1]
	*h = old[:len(old)-1]
	return r
}

const stepEvery = 0.02

func simulate(w world, newController func() controller, seed uint64) *simResult {
	s := &sim{world: w, rng: rand.New(rand.NewPCG(seed, 77)), server: w.server}
	if s.server.speed == 0 {
		s.server.speed = 1
	}
	for range max(w.gates, 1) {
		s.gates = append(s.gates, &simGate{controller: newController()})
	}
	s.result.limits, s.result.goods = make([]float64, int(w.length)+2), make([]float64, int(w.length)+2)
	if w.clients == 0 {
		s.after(0, s.arrivesNext)
	}
	for range w.clients {
		s.after(s.rng.Float64(), func() { s.arrive(0) })
	}
	if w.batch > 0 {
		s.after(1, s.arriveBatch)
	}
	for _, c := range w.changes {
		s.after(c.at, func() { s.change(c) })
	}
	s.after(stepEvery, s.step)
	for len(s.events) > 0 && s.events[0].at <= w.length {
		e := heap.Pop(&s.events).(event)
		s.now = e.at
		e.do()
	}
	return &s.result
}

func (s *sim) after(d float64, do func()) {
	s.order++
	heap.Push(&s.events, event{s.now + d, s.order, do})
}

func (s *sim) step() {
	second := &s.result.limits[int(s.now)]
	for _, g := range s.gates {
		g.step(s.now)
		*second += float64(g.Limit()) * stepEvery
		s.dispatch(g)
	}
	s.after(stepEvery, s.step)
}

func (s *sim) change(c change) {
	s.advance()
	c.do(&s.server, s)
	s.settle()
	if c.every > 0 {
		s.after(c.every, func() { s.change(c) })
	}
}

func (s *sim) arrivesNext() {
	rate := s.arrivals(s)
	if rate > 0 {
		s.arrive(0)
	}
	s.after(s.rng.ExpFloat64()/max(rate, 1), s.arrivesNext)
}

func (s *sim) arriveBatch() {
	for range s.batch {
		s.arrive(0)
	}
	s.after(1, s.arriveBatch)
}

func (s *sim) arrive(tries int) {
	g := s.gates[s.rng.IntN(len(s.gates))]
	r := &request{arrived: s.now, work: s.work(s), rtt: s.rtt(s), gate: g, tries: tries}
	s.result.arrived++
	if g.waiting >= 1000 {
		s.miss(r)
		return
	}
	g.queue = append(g.queue, r)
	g.waiting++
	s.dispatch(g)
	if r.state == queued {
		s.after(min(s.wait, s.deadline), func() {
			if r.state == queued {
				r.state = done
				g.waiting--
				g.set(g.inFlight, g.waiting, s.now)
				s.miss(r)
			}
		})
	}
}

// miss is a request that was not served in time.
func (s *sim) miss(r *request) {
	s.result.missed++
	if r.tries < s.retries || s.clients > 0 {
		s.after(0.05+0.1*s.rng.Float64(), func() { s.arrive(r.tries + 1) })
	}
}

// dispatch admits who waits, and tells the controller.
func (s *sim) dispatch(g *simGate) {
	for g.waiting > 0 && g.inFlight < g.Limit() {
		r := g.queue[0]
		g.queue[0], g.queue = nil, g.queue[1:]
		if r.state == queued {
			g.waiting--
			s.admit(r)
		}
	}
	g.set(g.inFlight, g.waiting, s.now)
}

func (s *sim) admit(r *request) {
	r.state, r.admitted = admitted, s.now
	r.gate.inFlight++
	r.inFlight = r.gate.inFlight
	s.after(r.rtt/2, func() { s.reach(r) })
	if s.ghosts {
		s.after(r.arrived+s.deadline-s.now, func() {
			if r.state == admitted {
				r.gone = true
				s.free(r, left)
				s.miss(r)
			}
		})
	}
}

// free gives the slot of r back.
func (s *sim) free(r *request, how outcome) {
	g := r.gate
	r.state = done
	g.end(s.now-r.admitted, r.inFlight, how, s.now)
	g.inFlight--
	s.dispatch(g)
}

func (s *sim) reach(r *request) {
	sv := &s.server
	if sv.most > 0 && len(sv.running)+len(sv.backlog)+sv.others >= sv.most {
		s.fail(r)
		return
	}
	s.advance()
	sv.backlog = append(sv.backlog, r)
	s.settle()
}

func (s *sim) fail(r *request) {
	r.failed = true
	s.after(r.rtt/2, func() { s.back(r) })
}

// advance brings the server's work up to now.
func (s *sim) advance() {
	sv := &s.server
	sv.virtual += (s.now - sv.at) * sv.rate()
	sv.at = s.now
}

// settle gives work to idle workers, and arranges for the next end.
func (s *sim) settle() {
	sv := &s.server
	for len(sv.backlog) > 0 && (sv.workers == 0 || len(sv.running) < sv.workers) {
		r := sv.backlog[0]
		sv.backlog[0], sv.backlog = nil, sv.backlog[1:]
		r.ends = sv.virtual + r.work
		heap.Push(&sv.running, r)
	}
	sv.version++
	if rate := sv.rate(); rate > 0 {
		version := sv.version
		s.after(max(0, (sv.running[0].ends-sv.virtual)/rate), func() {
			if version == sv.version {
				s.finish()
			}
		})
	}
}

func (s *sim) finish() {
	s.advance()
	sv := &s.server
	for len(sv.running) > 0 && sv.running[0].ends <= sv.virtual+1e-9 {
		r := heap.Pop(&sv.running).(*request)
		s.after(r.rtt/2, func() { s.back(r) })
	}
	s.settle()
}

// kill fails n of the requests that run.
func (s *sim) kill(n int) {
	for range min(n, len(s.server.running)) {
		s.fail(heap.Remove(&s.server.running, s.rng.IntN(len(s.server.running))).(*request))
	}
}

func (s *sim) back(r *request) {
	if r.gone {
		return
	}
	m := &s.result
	took := s.now - r.arrived
	switch {
	case r.failed:
		m.failed++
		s.free(r, failed)
		s.miss(r)
		return
	case took <= s.deadline:
		m.good++
		m.goods[int(s.now)]++
	}
	if m.good%16 == 0 {
		m.latencies = append(m.latencies, s.now-r.admitted)
	}
	s.free(r, answered)
	if took > s.deadline {
		s.miss(r)
	} else if s.clients > 0 {
		s.after(s.think*s.rng.ExpFloat64(), func() { s.arrive(0) })
	}
}

// goodput is what was answered in time from on, a second.
func (m *simResult) goodput(from, to float64) float64 {
	sum := 0.0
	for _, n := range m.goods[int(from):int(to)] {
		sum += n
	}
	return sum / (to - from)
}

func quantile(x []float64, p float64) float64 {
	if len(x) == 0 {
		return math.NaN()
	}
	x = slices.Sorted(slices.Values(x))
	return x[min(len(x)-1, int(p*float64(len(x))))]
}

// ours is the Controller of this package.
type ours struct{ *Controller }

func newOurs() controller { return ours{New(1, 1000, 0, 0)} }

func at(t float64) leaky.Time { return ticks(t) }

func (c ours) set(inFlight, waiting int, now float64) { c.Set(inFlight, waiting, at(now)) }
func (c ours) step(now float64)                       { c.Step(at(now)) }
func (c ours) end(took float64, _ int, how outcome, now float64) {
	switch how {
	case answered:
		c.Answer(at(took), at(now))
	case failed:
		c.Fail(at(now))
	case left:
		c.Leave(at(now))
	}
}
