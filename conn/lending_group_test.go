package conn

import (
	"context"
	"errors"
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

// lender is a host whose gates lend and borrow slots. It is the plane of its member.
type lender struct {
	mu     sync.Mutex
	rig    *admissionRig
	start  time.Time
	rnd    *rand.Rand
	member *member.Member
	stop   func()
	load   int // connections that are in flight or wait
	served int // that have ended
}

// do runs f when the gates have come to the present.
func (l *lender) do(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rig.until(leaky.Second + leaky.FromDuration(time.Since(l.start)))
	f()
}

func (l *lender) SetShares(s shaper.Shares) { l.do(func() { l.rig.setShares(s) }) }

func (l *lender) Demands(all []shaper.Demand) []shaper.Demand {
	l.do(func() { all = append(all, l.rig.demands()...) })
	return all
}

// churn ends some connections, and keeps up the load with new ones.
func (l *lender) churn() {
	l.do(func() {
		for v := range l.rig.in {
			if l.rnd.IntN(20) == 0 {
				v.finish()
				l.served++
			}
		}
		waiting := 0
		for _, q := range l.rig.admission.queues {
			waiting += q.len
		}
		for range l.load - len(l.rig.in) - waiting {
			l.rig.visit(fmt.Sprint("10.0.0.", l.rnd.IntN(40)), nil)
		}
	})
}

func (l *lender) inFlight() (n int) {
	l.do(func() { n = len(l.rig.in) })
	return n
}

// lenders are hosts that share a cap.
type lenders struct {
	*testing.T
	mu     sync.Mutex
	ledger cluster.Ledger
	away   bool
	clock  func() cluster.Time
	rnd    *rand.Rand
	limit  shaper.Limit
	hosts  []*lender
	worst  int
	used   []int // in flight, at each time
}

func (s *lenders) Call(_ context.Context, q *cluster.Request) (*cluster.Reply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away {
		return nil, errors.New("away")
	}
	return s.ledger.Call(s.clock(), q), nil
}

func (s *lenders) Snapshot(context.Context, ...string) (cluster.Snapshot, error) {
	return cluster.Snapshot{}, errors.ErrUnsupported
}

func (s *lenders) Forget(context.Context, string) (bool, error) { return false, errors.ErrUnsupported }
func (s *lenders) Server() string                               { return "memory" }

func (s *lenders) Close() {}

type onePool struct{ key shaper.Key }

func (n onePool) Name(_ shaper.Key, slots bool) string {
	return map[bool]string{true: "#cap", false: "cap"}[slots]
}
func (n onePool) Key(name string) (shaper.Key, int, bool) { return n.key, 0, name == "#cap" }
func (onePool) Always() []string                          { return nil }
func (onePool) Policy() *shaper.Policy                    { return nil }

// begin starts host i anew. Of a host that ran, all connections end.
func (s *lenders) begin(i int) {
	now := time.Now()
	if s.hosts[i] != nil {
		s.hosts[i].stop()
	}
	s.hosts[i] = &lender{rig: newAdmissionRig(s, s.limit), start: now, rnd: s.rnd}
	s.join(i)
}

// join makes host i a member of the group.
func (s *lenders) join(i int) {
	l := s.hosts[i]
	ctx, cancel := context.WithCancel(context.Background())
	l.member = member.Start(ctx, member.Options{
		Host: cluster.HostOptions{
			Params: cluster.Params{Hosts: len(s.hosts), Lease: cluster.Second, Step: cluster.Second / 2}, Name: string(rune('a' + i)), Start: int64(s.clock()),
		},
		Interval: 100 * time.Millisecond, Store: s, Planes: []member.Plane{l}, Names: onePool{l.rig.poolKey(0)},
		Clock: s.clock, Now: func() leaky.Time { return leaky.Second + leaky.FromDuration(time.Since(l.start)) }, Log: slog.New(slog.DiscardHandler),
	})
	l.rig.admission.sharing.onShort = l.member.Short
	l.stop = func() { cancel(); l.member.Wait() }
}

// loseLedger has the ledger start again without its state.
func (s *lenders) loseLedger() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ledger = cluster.Ledger{Run: fmt.Sprint(s.rnd.Uint64())}
}

func startLenders(t *testing.T, hosts, most int, slotFor shaper.SlotFor) *lenders {
	start := time.Now()
	s := &lenders{
		T: t, ledger: cluster.Ledger{Run: "a"}, rnd: testutil.Rand(t), hosts: make([]*lender, hosts),
		clock: func() cluster.Time { return cluster.FromDuration(time.Since(start)) + cluster.Second },
		limit: shaper.Limit{Name: "cap", Match: shaper.Match{Protocol: shaper.TCP}, Shared: true, MaxConnections: most, SlotFor: slotFor, QueueTimeout: time.Hour, MaxQueue: 1000},
	}
	for i := range hosts {
		s.begin(i)
	}
	return s
}

// run lets d pass, and checks all the time that no more are in flight than there may be.
func (s *lenders) run(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		sum := 0
		for _, l := range s.hosts {
			l.churn()
			sum += l.inFlight()
		}
		s.used = append(s.used, sum)
		if s.worst = max(s.worst, sum); sum > s.limit.MaxConnections {
			s.Fatalf("%d in flight, more than %d", sum, s.limit.MaxConnections)
		}
	}
}

// until lets time pass until each host has so many in flight, all at the same time.
func (s *lenders) until(what string, least int) {
	s.Helper()
	for range 600 {
		s.run(5 * time.Millisecond)
		if !slices.ContainsFunc(s.hosts, func(l *lender) bool { return l.inFlight() < least }) {
			return
		}
	}
	s.Fatalf("%s: not all hosts have come to %d in flight", what, least)
}

func (s *lenders) expect(what string, i, least int) {
	s.Helper()
	if n := s.hosts[i].inFlight(); n < least {
		s.Errorf("%s: %d in flight at host %d, want %d at least", what, n, i, least)
	}
}

func (s *lenders) setLoad(load ...int) {
	for i, l := range s.hosts {
		l.load = load[i]
	}
}

func (s *lenders) setAway(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = away
}

func (s *lenders) end() {
	for _, l := range s.hosts {
		l.stop()
	}
}

// Slots go where connections wait, and back, within a second, while there is a ledger; without one each host
// keeps what it has.
func TestLending_Group(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := startLenders(t, 3, 30, shaper.PerConnection)
		defer s.end()
		s.run(3 * time.Second)
		s.setLoad(100, 0, 0)
		s.run(time.Second)
		s.expect("all load at one host", 0, 20)
		s.setLoad(100, 100, 100)
		s.run(time.Second)
		for i := range s.hosts {
			s.expect("load at all", i, 9)
		}
		s.setLoad(100, 100, 0)
		s.run(time.Second)
		s.setAway(true)
		s.run(5 * time.Second)
		s.expect("no ledger", 0, 8)
		s.expect("no ledger", 1, 8)
		s.setAway(false)
		s.setLoad(0, 100, 0)
		s.run(5 * time.Second) // hosts find the ledger again at different times
		s.expect("the load has moved", 1, 18)
		s.begin(2)
		s.setLoad(0, 100, 100)
		s.run(3 * time.Second)
		s.expect("after a restart", 1, 11)
		s.expect("after a restart", 2, 11)
	})
}

// Fewer slots than hosts, or hardly more, are all used, and each host has its turn.
func TestLending_FewSlots(t *testing.T) {
	for _, most := range []int{1, 2, 3, 4, 5, 8, 30} {
		for hosts := 2; hosts <= 4; hosts++ {
			t.Run(fmt.Sprintf("%d slots of %d hosts", most, hosts), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := startLenders(t, hosts, most, shaper.PerConnection)
					defer s.end()
					s.run(3 * time.Second)
					for _, l := range s.hosts {
						l.load = 20
					}
					s.run(3 * time.Second)
					s.used = nil
					for _, l := range s.hosts {
						l.served = 0
					}
					s.run(30 * time.Second)
					sum := 0
					for _, n := range s.used {
						sum += n
					}
					if use := float64(sum) / float64(len(s.used)*most); use < 0.4 {
						t.Errorf("%.0f %% of the slots were used", 100*use)
					}
					for i, l := range s.hosts {
						if l.served < 3 {
							t.Errorf("host %d served %d connections in 30 s", i, l.served)
						}
					}
				})
			})
		}
	}
}

// TestLending_FewSlotsWithoutQueue has clients that are refused try again at hosts that want the same slot.
func TestLending_FewSlotsWithoutQueue(t *testing.T) {
	for _, queue := range []int{0, 1000} { // of the second host
		synctest.Test(t, func(t *testing.T) {
			begun := time.Now()
			s := &lenders{
				T: t, ledger: cluster.Ledger{Run: "a"}, rnd: testutil.Rand(t), hosts: make([]*lender, 2),
				clock: func() cluster.Time { return cluster.FromDuration(time.Since(begun)) + cluster.Second },
				limit: shaper.Limit{Name: "cap", Shared: true, MaxConnections: 1, QueueTimeout: time.Hour, MaxQueue: queue},
			}
			s.begin(1)
			s.limit.MaxQueue = 0
			s.begin(0)
			var served [2]int
			for range 900 { // in each of which one connection is possible
				time.Sleep(100 * time.Millisecond)
				for i, l := range s.hosts {
					l.do(func() {
						for v := range l.rig.in {
							v.finish()
							served[i]++
						}
						waiting := 0
						for _, q := range l.rig.admission.queues {
							waiting += q.len
						}
						for n := waiting; n < 4; n++ {
							l.rig.visit(fmt.Sprint("10.0.0.", n), nil)
						}
					})
				}
			}
			if min(served[0], served[1]) < 180 {
				t.Errorf("%v connections of two hosts were served, max_queue %d at the second", served, queue)
			}
			for _, l := range s.hosts {
				l.stop()
			}
		})
	}
}

// Whatever happens to the hosts and the ledger, and however few slots there are, no more are in flight than
// there may be.
func TestLending_GroupNeverExceeds(t *testing.T) {
	for i := range 10 {
		most, slotFor := []int{1, 2, 7, 30, 200}[i/2], shaper.SlotFor(i%2)
		t.Run(fmt.Sprintf("%d for a %v", most, slotFor), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := startLenders(t, 2+most%3, most, slotFor)
				defer s.end()
				rnd := s.rnd
				for range 150 {
					switch rnd.IntN(8) {
					case 0:
						s.begin(rnd.IntN(len(s.hosts)))
					case 1:
						s.setAway(!s.away)
					case 2:
						s.loseLedger()
					default:
						s.hosts[rnd.IntN(len(s.hosts))].load = rnd.IntN(3) * rnd.IntN(1+2*most)
					}
					s.run(time.Duration(rnd.IntN(600)) * time.Millisecond)
				}
				t.Logf("at most %d of %d were in flight", s.worst, most)
				if s.worst < (85*most+99)/100 {
					t.Errorf("at most %d of %d were in flight: the test exercises nothing", s.worst, most)
				}
			})
		})
	}
}
