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
				joints[state] = j
			}
			j.Bound(l.MinConnections, l.MaxConnections, now)
			if found, _ := j.Found(); j.Leads() {
				report.Found = &found
			}
			limits[state], told[l.Name] = l, report
		}
		for state := range joints {
			if limits[state] == nil {
				delete(joints, state)
			}
		}
		m.Tell(ctx, g.info.Load().Text(told))
		others, err := g.readReports(ctx, m, name)
		if err != nil {
			continue // limits stay as they are
		}
		for state, l := range limits {
			reports := others[l.Name]
			if reports == nil {
				reports = map[string]adaptive.Report{}
			}
			reports[name] = told[l.Name]
			j := joints[state]
			j.Exchange(reports, leaky.FromDuration(interval), now)
			publish(state, j, now)
		}
		g.proxy.FollowAdaptive()
	}
}

// readReports returns what hosts but this one have reported, by limit and host.
func (g *group) readReports(ctx context.Context, m *member.Member, name string) (map[string]map[string]adaptive.Report, error) {
	ctx, cancel := context.WithTimeout(ctx, sharedTimeout)
	defer cancel()
	shot, err := m.Snapshot(ctx, noKey)
	if err != nil {
		return nil, err
	}
	all := map[string]map[string]adaptive.Report{}
	for _, h := range shot.Hosts {
		if h.Name == name {
			continue
		}
		for limit, report := range sharing.ParseInfo(h.Info).Adaptive {
			if all[limit] == nil {
				all[limit] = map[string]adaptive.Report{}
			}
			all[limit][h.Name] = report
		}
	}
	return all, nil
}

// publish makes what was found that of the limit.
func publish(state *shaper.LimitState, j *adaptive.Joint, now leaky.Time) {
	found, leader := j.Found()
	if found.Limit == 0 {
		return
	}
	state.Adaptive.Store(&shaper.AdaptiveStatus{
		Limit: found.Middle, Most: found.Most, Current: found.Limit, Leader: leader, Throughput: float64(found.Throughput),
		Changes: conn.DescribeChanges(j.History(), now),
	})
}
