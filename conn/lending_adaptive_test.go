package conn

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/shaper"
)

// level makes n the maximum that host i has found. It takes effect with follow.
func (s *lenders) level(i, n int) {
	l := s.hosts[i]
	l.do(func() {
		l.rig.shaper.Policy().State(0).Adaptive.Store(&shaper.AdaptiveStatus{Limit: n, Most: n, Current: n})
	})
}

func (s *lenders) follow(i int) {
	l := s.hosts[i]
	l.do(func() {
		for _, ad := range l.rig.admission.adapters {
			if ad.joint() && ad.gate != nil {
				l.rig.admission.sharing.lending.update(ad.gate)
				ad.measure(l.rig.now)
			}
		}
		l.rig.admission.run(l.rig.now)
	})
}

// reload gives the limit other bounds at host i alone.
func (s *lenders) reload(i, least, most int) {
	l := s.hosts[i]
	l.do(func() {
		limit := s.limit
		limit.MaxConnections = most
		if limit.Adapt == shaper.AdaptOn {
			limit.MinConnections = min(least, most)
		}
		l.rig.swap(limit)
		l.rig.admission.sharing.reload(l.rig.now)
		l.rig.admission.run(l.rig.now)
	})
}

// rejoin has host i start another member, as a reload of [shared] does. Connections stay in flight.
func (s *lenders) rejoin(i int) {
	s.hosts[i].stop()
	s.join(i)
}

// checkSlots checks that all hosts together may not have more in flight than the operator's maximum, whatever maxima they
// have found.
func (s *lenders) checkSlots() {
	s.Helper()
	slots, atMost, text := 0, 0, ""
	whole := shaper.SlotPool{Most: s.limit.MaxConnections, Hosts: len(s.hosts), Lent: true}
	for _, l := range s.hosts {
		l.do(func() {
			ld := l.rig.admission.sharing.lending
			key := gateKeyOf(l.rig.poolKey(0))
			parts, hot := ld.given[key]
			if !hot && !ld.fresh {
				parts = ld.terms.SlotsCold
			}
			n := len(l.rig.in)
			if gt := l.rig.admission.byKey[key]; gt != nil {
				n = max(n, gt.slots)
			}
			if ld.terms.Hosts > 0 {
				policy := l.rig.shaper.Policy()
				n = max(n, policy.Limit(0).Pool(policy.State(0), ld.terms.Hosts).Slots(parts))
				atMost += whole.Slots(parts)
			}
			slots += n
			text += fmt.Sprintf(" [%d parts, %d in flight]", parts, len(l.rig.in))
		})
	}
	if most := s.limit.MaxConnections; slots > most || atMost > most {
		s.Fatalf("%d slots, %d if all had found the maximum, of %d:%s", slots, atMost, most, text)
	}
}

// Hosts that find other maxima from moment to moment have no more slots together than the operator's maximum, whatever happens
// to them and to the ledger.
func TestLending_AdaptiveNeverExceeds(t *testing.T) {
	for _, most := range []int{2, 3, 7, 30, 1000} {
		for hosts := 2; hosts <= 4; hosts++ {
			t.Run(fmt.Sprintf("%d slots of %d hosts", most, hosts), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := startLenders(t, hosts, most, shaper.PerConnection)
					s.limit.Adapt, s.limit.MinConnections = shaper.AdaptOn, 1
					for i := range hosts {
						s.begin(i)
					}
					defer s.end()
					rnd, reloads := s.rnd, hosts%2 == 0
					every := []int{4, 40, 400}
					quick := rnd.IntN(len(every))
					late := make([]bool, hosts)
					for range 150 {
						switch host := rnd.IntN(hosts); rnd.IntN(14) {
						case 0:
							s.begin(host)
						case 1:
							s.setAway(!s.away)
						case 2:
							s.loseLedger()
						case 3:
							quick = rnd.IntN(len(every))
						case 4:
							s.rejoin(host)
						case 5:
							if reloads {
								s.reload(host, 1+rnd.IntN(most), most/(1+rnd.IntN(2)))
							}
						default:
							s.hosts[host].load = rnd.IntN(3) * rnd.IntN(1+2*min(most, 60))
						}
						for range rnd.IntN(100) {
							for i := range s.hosts {
								switch {
								case rnd.IntN(every[quick]) == 0:
									s.level(i, []int{1, most, 1 + rnd.IntN(most)}[rnd.IntN(3)])
									late[i] = true
								case late[i] && rnd.IntN(2) == 0:
									s.follow(i)
									late[i] = false
								}
							}
							s.run(5 * time.Millisecond)
							s.checkSlots()
						}
					}
				})
			})
		}
	}
}

// partedStore is the way of one host to the ledger.
type partedStore struct {
	*lenders
	parted *atomic.Bool
}

func (s partedStore) Call(ctx context.Context, q *cluster.Request) (*cluster.Reply, error) {
	if s.parted.Load() {
		return nil, errors.New("parted")
	}
	return s.lenders.Call(ctx, q)
}

// An operator lowers the maximum at one host, where more is in flight then than its part, and puts it back. It has no more
// slots than before: another host, which is cut off all the time, has the rest.
func TestLending_LoweredAndRaised(t *testing.T) {
	for _, adapt := range []shaper.Adaptation{shaper.AdaptOff, shaper.AdaptOn} {
		t.Run(adapt.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := startLenders(t, 2, 100, shaper.PerConnection)
				defer s.end()
				if adapt == shaper.AdaptOn {
					s.limit.Adapt, s.limit.MinConnections = adapt, 1
					for i := range s.hosts {
						s.begin(i)
						s.level(i, 100)
						s.follow(i)
					}
				}
				var parted atomic.Bool
				s.hosts[1].member.SetStore(partedStore{s, &parted}, 100*time.Millisecond)
				s.run(4 * time.Second)
				s.setLoad(50, 50)
				s.run(2 * time.Second)
				s.until("half the load", 45)
				parted.Store(true)
				s.run(200 * time.Millisecond)
				s.setLoad(200, 50)
				s.run(300 * time.Millisecond)
				s.reload(0, 1, 60)
				time.Sleep(500 * time.Millisecond) // none ends
				s.reload(0, 1, 100)
				s.run(2 * time.Second)
			})
		})
	}
}
