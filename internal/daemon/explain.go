package daemon

import (
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control"
	"shaperd.dev/shaperd/internal/explain"
	"shaperd.dev/shaperd/shaper"
)

// maxExplained is the number of connections of a source that an explanation lists.
const maxExplained = 20

// Explain explains which limits a connection or packet would meet now, and their state.
func (s *server) Explain(ask control.ExplainRequest) (api.Explanation, error) {
	var x api.Explanation
	q, err := explain.Parse(explain.Request(ask))
	if err != nil {
		return x, &refusedError{err}
	}
	l, _ := s.current()
	p := s.shaper.Policy()
	found, err := q.Answer(l.Config, p)
	if err != nil {
		return x, &refusedError{err}
	}
	s.addBuckets(found, p)
	s.addPenalties(found, p)
	s.addConnections(found, p)
	s.addDownstreams(found)
	if found.Attach == nil && found.Flow.Protocol == shaper.UDP {
		quota := api.FlowQuota(s.proxy.FlowQuota(found.Listener, found.Flow.Source))
		found.Flows = &quota
	}
	return found.Explanation, nil
}

// addBuckets adds the state of each bucket, and the verdict for a unit that arrives now.
func (s *server) addBuckets(x *explain.Explanation, p *shaper.Policy) {
	x.Verdict, x.Reason = shaper.Pass.String(), shaper.None.String()
	var worst shaper.Verdict
	var longest time.Duration
	worse := func(l *shaper.Limit, v shaper.Verdict, why shaper.Reason, wait time.Duration) {
		if v > worst || v == worst && wait > longest {
			worst, longest = v, wait
			x.Verdict, x.Reason, x.By = v.String(), why.String(), l.Name
		}
	}
	n := 0
	for i := range x.Route.Limits().All {
		key := p.Key(i, &x.Flow, x.Route)
		l, at := p.LimitFor(i, &key), &x.Limits[n]
		n++
		if l.Block {
			if at.Mode == shaper.Enforce.String() {
				worse(l, shaper.Refuse, shaper.Blocked, time.Hour)
			}
			continue
		}
		if l.Shed.Any() {
			if st := p.State(i).Shed.Load(); st != nil && x.Attach == nil {
				if at.Shed = st.Share; st.Share == 1 && at.Mode == shaper.Enforce.String() {
					worse(l, shaper.Refuse, shaper.ShedLoad, shaper.ShedRetryAfter)
				}
			}
			continue
		}
		b, ok := s.bucketOf(x, p, i)
		if !ok {
			continue
		}
		at.Bucket = control.NewBucket(b)
		if at.Mode == shaper.Observe.String() {
			continue
		}
		if q := b.Quota; q != nil && q.Used >= q.Quota.Amount && q.Slow == 0 {
			worse(l, shaper.Refuse, shaper.QuotaUsed, q.Ends)
			continue
		}
		waits := l.Paces()
		switch {
		case waits && b.NextDeparture > l.MaxDelay && (x.Attach != nil || x.Flow.Protocol == shaper.UDP):
			worse(l, shaper.Refuse, shaper.QueueFull, b.NextDeparture)
		case waits && b.NextDeparture > 0:
			worse(l, shaper.Delay, shaper.ByRate, b.NextDeparture)
		}
		most := l.MaxConnections
		if b.Slots > 0 || l.HasPool() {
			most = b.Slots
		}
		full := l.MaxConnections > 0 && (b.InFlight >= most || b.Reserved)
		switch {
		case full && x.Attach != nil:
			worse(l, shaper.Refuse, shaper.ByConnections, 0)
		case full && b.Waiting >= l.MaxQueue:
			worse(l, shaper.Refuse, shaper.WaitingFull, 0)
		case full:
			worse(l, shaper.Delay, shaper.ByConnections, l.QueueTimeout)
		case b.NextAdmission > l.QueueTimeout:
			worse(l, shaper.Refuse, shaper.ByNewConnections, b.NextAdmission)
		case b.NextAdmission > 0, b.Reserved:
			worse(l, shaper.Delay, shaper.ByNewConnections, b.NextAdmission)
		}
	}
}

// addPenalties adds the penalties of the source, which refuse it at all listeners, and how near it is to others.
func (s *server) addPenalties(x *explain.Explanation, p *shaper.Policy) {
	if x.Attach != nil {
		return
	}
	now := time.Now()
	for i := range p.Penalties().All {
		l := p.Limit(i)
		if block, blocked := s.proxy.PenaltyOf(l.Name, x.Flow.Source); blocked {
			x.Penalties = append(x.Penalties, control.NewPenalty(block, now))
			if block.Enforced {
				x.Verdict, x.Reason, x.By = shaper.Refuse.String(), shaper.Blocked.String(), l.Name
			}
		}
	}
	for i := range x.Limits {
		if near := x.Limits[i].Penalty; near != nil {
			refusals, left := s.proxy.PenaltyCount(x.Limits[i].Limit, x.Flow.Source)
			near.Refusals, near.Left = refusals, left.Seconds()
		}
	}
}

// bucketOf returns the state of the bucket of x under limit i, or false when it is unknown.
func (s *server) bucketOf(x *explain.Explanation, p *shaper.Policy, i int) (shaper.BucketState, bool) {
	if x.Attach != nil {
		return s.plane.bucketOf(i, &x.Flow, x.Route)
	}
	if p.Limit(i).Key&shaper.KeyConnection != 0 { // that of a new connection is empty
		return shaper.BucketState{}, true
	}
	return s.proxy.Buckets(i, p.Key(i, &x.Flow, x.Route))[0], true
}

// addDownstreams adds why the listener is unavailable, if it is.
func (s *server) addDownstreams(x *explain.Explanation) {
	var all []api.DownstreamStatus
	for _, d := range s.proxy.Downstreams() {
		if x.Attach == nil && d.Listen == x.Listener {
			all = append(all, control.NewDownstream(d))
		}
	}
	x.Unavailable = control.UnavailableReason(all)
	for _, st := range s.proxy.Listeners() {
		if x.Attach == nil && st.Listen == x.Listener {
			x.Waiting, x.Hold = st.Waiting, control.NewHold(&st)
		}
	}
}

// addConnections adds the connections that the source has at the listener.
func (s *server) addConnections(x *explain.Explanation, p *shaper.Policy) {
	if x.Attach != nil {
		return
	}
	s.proxy.Connections(func(c *shaper.ConnectionStatus) {
		if len(x.Connections) < maxExplained && c.Listen == x.Listener && c.Protocol == x.Flow.Protocol && c.Addr() == x.Flow.Source {
			x.Connections = append(x.Connections, control.NewConnection(c, p))
		}
	})
}
