package daemon

import (
	"context"
	"time"

	"shaperd.dev/shaperd/cluster/member"
	"shaperd.dev/shaperd/conn"
	"shaperd.dev/shaperd/conn/adaptive"
	"shaperd.dev/shaperd/internal/sharing"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// adaptivePlane measures adaptive limits that hosts share, and obeys what they find.
type adaptivePlane interface {
	AdaptiveReports() map[*shaper.LimitState]adaptive.Report
	FollowAdaptive()
}

// noKey is a key of no bucket: a snapshot with it has hosts only.
const noKey = "-"

// exchangeInterval is the time between two exchanges of reports: all hosts read those of all.
func exchangeInterval(s *config.Shared) time.Duration {
	return max(s.Interval, 100*time.Millisecond, time.Duration(s.Hosts)*10*time.Millisecond)
}

// adapt finds out, with the other hosts of the group, what downstreams behind adaptive limits bear that they share, until
// ctx ends. What a host reports goes with its calls to the ledger, and what the others have reported is read there.
func (g *group) adapt(ctx context.Context, m *member.Member, s config.Shared) {
	interval := exchangeInterval(&s)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	joints := map[*shaper.LimitState]*adaptive.Joint{}
	untold := false
	every, last := interval, g.clock.Boot() // a slow store makes it take longer
	name := sharing.HostName(&s)
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		own := g.proxy.AdaptiveReports()
		if len(own) == 0 && len(joints) == 0 {
			continue
		}
		policy, now := g.shaper.Policy(), g.clock.Boot()
		every, last = min(max((now-last).Duration(), interval), 10*sharedTimeout), now
		told := map[string]adaptive.Report{}
		limits := map[*shaper.LimitState]*shaper.Limit{}
		for state, report := range own {
			i := policy.IndexOf(state)
			if i < 0 {
				continue
			}
			l := policy.Limit(i)
			j := joints[state]
			if j == nil {
				j = adaptive.NewJoint(name, l.MinConnections, l.MaxConnections)
				if was := state.Adaptive.Load(); was != nil && was.Current > 0 { // by the member before
					j.Resume(adaptive.Found{Limit: was.Current, Middle: was.Limit, Most: was.Most, Throughput: int(was.Throughput)})
				}
				joints[state] = j
			}
			j.Bound(l.MinConnections, l.MaxConnections, now)
			if found, _ := j.Found(); found.Limit > 0 {
				report.Found = &found
			}
			report.Every = every.Microseconds()
			limits[state], told[sharing.ReportName(l.Name)] = l, report
		}
		for state := range joints {
			if limits[state] == nil {
				delete(joints, state)
				state.Adaptive.Store(nil)
			}
		}
		text := g.info.Load().Text(told)
		if (text == "") != untold {
			if untold = text == ""; untold {
				g.log.Error("what was measured of adaptive limits is too long to tell other hosts")
			}
		}
		m.Tell(ctx, text)
		others, heard, err := g.readReports(ctx, m, name, every)
		for state, l := range limits {
			j := joints[state]
			if err != nil {
				publish(state, j, false, now) // it stays as it is
				continue
			}
			reports := others[sharing.ReportName(l.Name)]
			if reports == nil {
				reports = map[string]adaptive.Report{}
			}
			if heard {
				reports[name] = told[sharing.ReportName(l.Name)]
			}
			j.Exchange(reports, leaky.FromDuration(every), now)
			publish(state, j, true, now)
		}
		g.proxy.FollowAdaptive()
	}
}

// readReports returns what hosts but this one have reported, by limit and host, and whether the ledger hears this one.
func (g *group) readReports(ctx context.Context, m *member.Member, name string, every time.Duration) (all map[string]map[string]adaptive.Report, heard bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, sharedTimeout)
	defer cancel()
	shot, err := m.Snapshot(ctx, noKey)
	if err != nil {
		return nil, false, err
	}
	all = map[string]map[string]adaptive.Report{}
	for _, h := range shot.Hosts {
		present := h.Age.Duration() <= adaptive.StaleAfter(every)
		if h.Name == name {
			heard = present
			continue
		}
		for limit, report := range sharing.ParseInfo(h.Info).Adaptive {
			if all[limit] == nil {
				all[limit] = map[string]adaptive.Report{}
			}
			if !present {
				report.Found = nil // nobody knows whether it still holds
			}
			all[limit][h.Name] = report
		}
	}
	return all, heard, nil
}

// publish makes what was found that of the limit. While the ledger is away it is what was found before.
func publish(state *shaper.LimitState, j *adaptive.Joint, live bool, now leaky.Time) {
	found, leader := j.Found()
	if found.Limit == 0 {
		return
	}
	st := &shaper.AdaptiveStatus{Limit: found.Middle, Most: found.Most, Current: found.Limit, Changes: conn.DescribeChanges(j.History(), now)}
	if live {
		st.Leader, st.Unheard, st.Throughput = leader, j.Unheard(), float64(found.Throughput)
	}
	state.Adaptive.Store(st)
}
