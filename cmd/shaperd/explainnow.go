package main

import (
	"time"

	"shaperd/control"
	"shaperd/shaper"
)

// mostExplained is how many connections of a source are shown.
const mostExplained = 20

// Explain tells what a connection or a packet would meet now.
func (s *server) Explain(ask control.Question) (control.Explanation, error) {
	var x control.Explanation
	q, err := parseQuestion(ask)
	if err != nil {
		return x, &refused{err}
	}
	l, _ := s.inForce()
	p := s.shaper.Policy()
	found, err := q.answer(l.config, p)
	if err != nil {
		return x, &refused{err}
	}
	s.addBuckets(found, p)
	s.addConnections(found, p)
	s.addDownstreams(found)
	if found.attach == nil && found.flow.Protocol == shaper.UDP {
		room := control.FlowRoom(s.proxy.FlowRoom(found.Listener, found.flow.Source))
		found.Flows = &room
	}
	return found.Explanation, nil
}

// addBuckets adds the state of each bucket, and what a unit that came now would get.
func (s *server) addBuckets(x *explained, p *shaper.Policy) {
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
	for i := range x.route.Limits().All {
		l, at := p.Limit(i), &x.Limits[n]
		n++
		if l.Block {
			if at.Mode == mode(false) {
				worse(l, shaper.Refuse, shaper.Blocked, time.Hour)
			}
			continue
		}
		b, ok := s.bucketOf(x, p, i)
		if !ok {
			continue
		}
		at.Bucket = control.NewBucket(b)
		if at.Mode == mode(true) {
			continue
		}
		waits := l.Rate != 0 || l.Packets.N != 0
		switch {
		case waits && b.NextIn > l.MaxDelay && (x.attach != nil || x.flow.Protocol == shaper.UDP):
			worse(l, shaper.Refuse, shaper.QueueFull, b.NextIn)
		case waits && b.NextIn > 0:
			worse(l, shaper.Delay, shaper.ByRate, b.NextIn)
		}
		full := l.Connections > 0 && (b.InFlight >= l.Connections || b.Reserved)
		switch {
		case full && x.attach != nil:
			worse(l, shaper.Refuse, shaper.ByConnections, 0)
		case full && b.Waiting >= l.MaxWaiting:
			worse(l, shaper.Refuse, shaper.WaitingFull, 0)
		case full:
			worse(l, shaper.Delay, shaper.ByConnections, l.MaxWait)
		case b.NewIn > l.MaxWait:
			worse(l, shaper.Refuse, shaper.ByNew, b.NewIn)
		case b.NewIn > 0, b.Reserved:
			worse(l, shaper.Delay, shaper.ByNew, b.NewIn)
		}
	}
}

// bucketOf returns the state of the bucket that x has under limit i; false when that is not
// known.
func (s *server) bucketOf(x *explained, p *shaper.Policy, i int) (shaper.BucketState, bool) {
	if x.attach != nil {
		return s.plane.bucketOf(i, &x.flow, x.route)
	}
	if p.Limit(i).Key&shaper.KeyConnection != 0 { // that of a new one is empty
		return shaper.BucketState{}, true
	}
	return s.proxy.Buckets(i, p.Key(i, &x.flow, x.route))[0], true
}

// addDownstreams adds why nobody is served at the listener.
func (s *server) addDownstreams(x *explained) {
	var all []control.DownstreamStatus
	for _, d := range s.proxy.Downstreams() {
		if x.attach == nil && d.Listen == x.Listener {
			all = append(all, control.NewDownstream(d))
		}
	}
	x.Unserved = control.Unserved(all)
}

// addConnections adds what connections the source has at the listener.
func (s *server) addConnections(x *explained, p *shaper.Policy) {
	if x.attach != nil {
		return
	}
	s.proxy.Connections(func(c *shaper.ConnectionStatus) {
		if len(x.Connections) < mostExplained && c.Listen == x.Listener && c.Protocol == x.flow.Protocol && c.Addr() == x.flow.Source {
			x.Connections = append(x.Connections, control.NewConnection(c, p))
		}
	})
}
