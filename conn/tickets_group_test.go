package conn

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/member"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// ticketHost is a host of which a few new connections arrive, under a low rate that hosts share. It is the plane of
// its member.
type ticketHost struct {
	*ticketGroup
	mu       sync.Mutex
	rig      *admissionRig
	begun    time.Time
	stop     func()
	arrivals []time.Duration // since the start of the group
	wait     time.Duration   // of all that passed
	passed   int
}

func (c *ticketHost) do(f func(r *admissionRig)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rig.until(leaky.Second + leaky.FromDuration(time.Since(c.begun)))
	f(c.rig)
}

func (c *ticketHost) SetShares(s shaper.Shares) {
	c.do(func(r *admissionRig) {
		r.admission.sharing.set(&s)
		r.admission.sharing.giveTickets(s.Tickets)
	})
}

func (c *ticketHost) Demands(all []shaper.Demand) []shaper.Demand {
	c.do(func(r *admissionRig) {
		sg := r.admission.sharing
		span := sg.beginReport()
		for more := true; more; {
			all, more = sg.report(all, span, r.now)
		}
	})
	return all
}

// arrive has connections arrive that are due.
func (c *ticketHost) arrive() {
	for len(c.arrivals) > 0 && c.arrivals[0] <= time.Since(c.start) {
		c.arrivals = c.arrivals[1:]
		c.do(func(r *admissionRig) {
			arrived := r.now
			r.visit(fmt.Sprint("10.0.0.", len(c.arrivals)%5), func(v *visitor) {
				if !v.granted {
					c.Error("a connection was refused")
					return
				}
				c.wait += (v.at - arrived).Duration()
				c.passed++
				c.pass(c.begun.Add((v.at - leaky.Second).Duration()).Sub(c.start))
				r.after(time.Millisecond, v.finish)
			})
		})
	}
}

// ticketGroup are hosts that share a rate of new connections.
type ticketGroup struct {
	*testing.T
	mu      sync.Mutex
	ledger  cluster.Ledger
	start   time.Time
	away    bool
	tickets bool
	every   time.Duration
	hosts   []*ticketHost
	level   float64 // of a leaky bucket of all that passed
	worst   float64
	last    time.Duration
}

func (s *ticketGroup) Call(_ context.Context, q *cluster.Request) (*cluster.Reply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away {
		return nil, context.DeadlineExceeded
	}
	return s.ledger.Call(cluster.FromDuration(time.Since(s.start))+cluster.Second, q), nil
}

func (s *ticketGroup) Snapshot(context.Context, ...string) (cluster.Snapshot, error) {
	return cluster.Snapshot{}, nil
}
func (s *ticketGroup) Forget(context.Context, string) (bool, error) { return false, nil }
func (s *ticketGroup) Server() string                               { return "memory" }

func (s *ticketGroup) Close() {}

func (s *ticketGroup) setAway(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = away
}

// pass fills the bucket when a connection passes.
func (s *ticketGroup) pass(at time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.level = max(0, s.level-float64(at-s.last)/float64(s.every)) + 1
	s.last = at
	s.worst = max(s.worst, s.level)
}

type oneRate struct {
	key  shaper.Key
	name string
}

func (n oneRate) Name(shaper.Key, bool) string { return n.name }
func (n oneRate) Key(name string) (shaper.Key, int, bool) {
	return n.key, 0, name == n.name
}
func (oneRate) Always() []string       { return nil }
func (oneRate) Policy() *shaper.Policy { return nil }

// startTicketGroup starts hosts that share a rate. So many times of what it allows arrive, at random times.
func startTicketGroup(t *testing.T, hosts int, every time.Duration, tickets bool, load float64, random *rand.Rand) *ticketGroup {
	s := &ticketGroup{T: t, ledger: cluster.Ledger{Run: "a"}, start: time.Now(), tickets: tickets, every: every}
	name := "calls/new"
	if tickets {
		name = cluster.TicketsPrefix + name
	}
	limit := shaper.Limit{Name: "calls", Shared: true, QueueTimeout: time.Hour, MaxQueue: 10_000}
	limit.NewConnections.N, limit.NewConnections.Per = 1, every
	for i := range hosts {
		c := &ticketHost{ticketGroup: s, rig: newAdmissionRig(t, limit), begun: s.start}
		for at := time.Duration(0); at < 10*time.Minute; {
			at += time.Duration(random.ExpFloat64() * float64(every) * float64(hosts) / load)
			c.arrivals = append(c.arrivals, at+10*time.Second)
		}
		key := c.rig.poolKey(0)
		key.Limit++
		ctx, cancel := context.WithCancel(context.Background())
		m := member.Start(ctx, member.Options{
			Host: cluster.HostOptions{
				Params: cluster.Params{Hosts: hosts, Lease: cluster.Second, Step: cluster.Second / 2}, Name: string(rune('a' + i)), Start: 1,
			},
			Interval: 100 * time.Millisecond, Store: s, Planes: []member.Plane{c}, Names: oneRate{key, name},
			Clock: func() cluster.Time { return cluster.FromDuration(time.Since(s.start)) + cluster.Second },
			Now:   func() leaky.Time { return leaky.Second + leaky.FromDuration(time.Since(s.start)) }, Log: slog.New(slog.DiscardHandler),
		})
		c.rig.admission.sharing.onShort = m.Short
		c.stop = func() { cancel(); m.Wait() }
		s.hosts = append(s.hosts, c)
	}
	return s
}

func (s *ticketGroup) run(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		for _, c := range s.hosts {
			c.arrive()
			c.do(func(*admissionRig) {})
		}
	}
}

func (s *ticketGroup) end() (passed int, wait time.Duration) {
	for _, c := range s.hosts {
		c.stop()
		passed += c.passed
		wait += c.wait
	}
	return passed, wait / time.Duration(max(1, passed))
}

// Connections of all hosts wait for one bucket, not those of each for a part of it. Together they keep the rate,
// also while the ledger is away, and after.
func TestTickets_Group(t *testing.T) {
	seed := testutil.Rand(t).Uint64()
	waits := map[bool]time.Duration{}
	for _, tickets := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			const every = 2 * time.Second
			s := startTicketGroup(t, 4, every, tickets, 0.7, rand.New(rand.NewPCG(seed, 1)))
			arrive := 0
			for _, h := range s.hosts {
				arrive += len(h.arrivals)
			}
			s.run(time.Minute) // until hosts ask the ledger, each has a part and so a bucket of its own
			asked := func() bool {
				return !slices.ContainsFunc(s.hosts, func(h *ticketHost) bool { return h.rig.shaper.Policy().State(0).UsedTickets.Load() == 0 })
			}
			for more := 0; tickets && !asked() && more < 30; more++ {
				s.run(10 * time.Second)
			}
			s.mu.Lock()
			first := s.worst
			s.worst, s.level = 0, 0 // what passed before is judged with the first minute
			s.mu.Unlock()
			s.run(10 * time.Minute)
			passed, wait := s.end()
			waits[tickets] = wait
			var used, void uint64
			for _, h := range s.hosts {
				state := h.rig.shaper.Policy().State(0)
				used, void = used+state.UsedTickets.Load(), void+state.VoidTickets.Load()
			}
			if tickets != (used > 0) || used > uint64(passed) {
				t.Errorf("%d passed, and %d tickets were used", passed, used)
			}
			t.Logf("%d tickets were used, %d were void", used, void)
			t.Logf("tickets %v: %d passed, %v waited on average, at most %.1f more than the rate", tickets, passed, wait, s.worst)
			if passed < arrive-10 { // those of the last seconds
				t.Errorf("%d of %d passed", passed, arrive)
			}
			if most := map[bool]float64{true: 2, false: 5}[tickets]; s.worst > most || first > 5 {
				t.Errorf("%.1f units too many have passed, and %.1f in the first minute", s.worst, first)
			}
		})
	}
	if waits[true] > waits[false]*8/10 {
		t.Errorf("waits with tickets are %v, and with parts %v", waits[true], waits[false])
	}
}

// More arrive than may pass: all of the rate is used, by hosts in turn. Without a ledger each has its part.
func TestTickets_GroupIsBusy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const every = time.Second
		s := startTicketGroup(t, 3, every, true, 4, testutil.Rand(t))
		s.run(40 * time.Second)
		before := s.passedEach()
		s.run(60 * time.Second)
		sum := 0
		for i, n := range s.passedEach() {
			n -= before[i]
			sum += n
			if n < 15 {
				t.Errorf("host %d: %d have passed, of 60 that all may", i, n)
			}
		}
		if sum < 54 {
			t.Errorf("%d have passed in a minute, of 60", sum)
		}
		s.setAway(true)
		s.run(10 * time.Second)
		before = s.passedEach()
		s.run(60 * time.Second)
		for i, n := range s.passedEach() {
			if n -= before[i]; n < 18 || n > 21 {
				t.Errorf("host %d, alone: %d have passed in a minute, not a third of 60", i, n)
			}
		}
		s.setAway(false)
		s.run(30 * time.Second)
		s.end()
		t.Logf("at most %.1f more than the rate", s.worst)
		if s.worst > 5 { // one for the ledger, and one for each host that was alone
			t.Errorf("%.1f units too many have passed", s.worst)
		}
	})
}

func (s *ticketGroup) passedEach() (each []int) {
	for _, c := range s.hosts {
		c.do(func(*admissionRig) { each = append(each, c.passed) })
	}
	return each
}
