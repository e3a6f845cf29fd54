// Owner: the loop's thread.

package conn

import (
	"time"

	"shaperd.dev/shaperd/conn/adaptive"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

const (
	adaptEvery   = leaky.Second / 20
	publishEvery = leaky.Second
)

// adapter finds out what the downstream behind a limit bears, and moves the limit's maximum in flight there unless it only
// observes. It outlives the gate, which is there only while it is in use.
type adapter struct {
	admission  *admission
	state      *shaper.LimitState
	gate       *gate                // nil while none is in use
	load       *adaptive.Load       // of controller or watcher
	controller *adaptive.Controller // nil if it only observes, or hosts share the limit
	watcher    *adaptive.Watcher    // if it observes
	timer      pacer.Event
	published  leaky.Time // when the status was
}

// adapt gives gt the adapter that its limit asks for, or none.
func (a *admission) adapt(gt *gate) {
	gt.adapter = nil
	if gt.key != (shaper.Key{Limit: gt.state.ID + 1}) || a.byKey[gt.key] != gt {
		return // of another policy, or on its way out
	}
	l, ad := gt.limit, a.adapters[gt.state]
	observes, now := l.Adapt == shaper.AdaptObserve || l.Observe, a.clock()
	joint := l.Shared && !observes
	switch {
	case l.Adapt == shaper.AdaptOff:
		return
	case ad == nil || (ad.watcher != nil) != observes || ad.joint() != joint:
		a.removeAdapter(gt.state)
		ad = &adapter{admission: a, state: gt.state}
		ad.timer.Fire = ad.step
		switch {
		case observes:
			ad.watcher = &adaptive.Watcher{}
			ad.load = &ad.watcher.Load
		case joint:
			ad.load = &adaptive.Load{}
		default:
			ad.controller = adaptive.New(l.MinConnections, l.MaxConnections, int(gt.state.InFlight.Load()), now)
			ad.load = &ad.controller.Load
		}
		a.adapters[gt.state] = ad
	case ad.controller != nil:
		ad.controller.Bound(l.MinConnections, l.MaxConnections, now)
	}
	ad.gate, gt.adapter = gt, ad
	ad.measure(now)
	if joint {
		return
	}
	if !ad.timer.Scheduled() {
		a.wheel.Schedule(&ad.timer, now+adaptEvery)
	}
	ad.publish(now)
}

// joint reports whether hosts share the limit: they find out together what the downstream bears.
func (ad *adapter) joint() bool { return ad.controller == nil && ad.watcher == nil }

// AdaptiveReports returns what p has measured for the adaptive limits that hosts share.
func (p *Proxy) AdaptiveReports() map[*shaper.LimitState]adaptive.Report {
	all := map[*shaper.LimitState]adaptive.Report{}
	p.home.loop.call(func(now leaky.Time) {
		policy := p.home.admission.policy
		for i := range policy.Shared().All {
			if l := policy.Limit(i); !l.HasPool() || l.Adapt != shaper.AdaptOn || l.Observe {
				continue
			}
			load := &adaptive.Load{} // nothing has passed
			if ad := p.home.admission.adapters[policy.State(i)]; ad != nil && ad.joint() {
				load = ad.load
			}
			all[policy.State(i)] = load.Report(now)
		}
	})
	return all
}

// FollowAdaptive makes the limits that hosts share follow the maximum in flight that their [shaper.LimitState] has now.
func (p *Proxy) FollowAdaptive() {
	p.home.loop.call(func(now leaky.Time) {
		a := p.home.admission
		for _, ad := range a.adapters {
			if ad.joint() && ad.gate != nil {
				a.sharing.lending.update(ad.gate)
				ad.measure(now)
			}
		}
		a.run(now)
	})
}

// removeAdapter forgets what was found out for a limit.
func (a *admission) removeAdapter(state *shaper.LimitState) {
	if ad := a.adapters[state]; ad != nil {
		a.wheel.Cancel(&ad.timer)
		delete(a.adapters, state)
		state.Adaptive.Store(nil)
	}
}

// updateAdapters forgets what was found out for limits that are not adaptive any more, and moves the others into the
// bounds that they have now.
func (a *admission) updateAdapters(now leaky.Time) {
	for state, ad := range a.adapters {
		i := a.policy.IndexOf(state)
		if i < 0 || a.policy.Limit(i).Adapt == shaper.AdaptOff {
			a.removeAdapter(state)
			continue
		}
		l := a.policy.Limit(i)
		if ad.gate == nil && ad.joint() != (l.Shared && l.Adapt == shaper.AdaptOn && !l.Observe) {
			a.removeAdapter(state)
			continue
		}
		if ad.controller != nil {
			ad.controller.Bound(l.MinConnections, max(l.MinConnections, l.MaxConnections), now)
			ad.publish(now)
		}
	}
}

// unadapt records that gt, which holds no connection, goes away.
func (gt *gate) unadapt(now leaky.Time) {
	if ad := gt.adapter; ad != nil && ad.gate == gt {
		ad.gate = nil
		ad.measure(now)
	}
}

// measure takes in how many are in flight and wait at the gate.
func (ad *adapter) measure(now leaky.Time) {
	gt := ad.gate
	if gt == nil {
		ad.load.Set(0, 0, now)
		return
	}
	waiting := gt.waiting
	if gt.inFlight < gt.slots {
		waiting = 0 // for the rate
	}
	ad.load.Set(gt.inFlight, waiting, now)
}

// step moves the limit.
func (ad *adapter) step(now leaky.Time) {
	if ad.gate == nil {
		return
	}
	ad.admission.wheel.Schedule(&ad.timer, now+adaptEvery)
	if ad.watcher != nil {
		ad.watcher.Step(now)
	} else if ad.controller.Step(now); ad.gate.slots != ad.controller.Limit() {
		ad.gate.slots = ad.controller.Limit()
		ad.measure(now)
		ad.admission.freed = append(ad.admission.freed, ad.gate)
		ad.admission.run(now)
	}
	if now >= ad.published+publishEvery {
		ad.publish(now)
	}
}

// answered records that the downstream has answered a connection that holds slots of s, after so long.
func (s *slots) answered(took, now leaky.Time) {
	for _, gt := range s.held {
		if gt.adapter != nil {
			gt.adapter.load.Answer(took, now)
		}
	}
}

// failed records that the downstream has refused or ended a connection that holds slots of s.
func (s *slots) failed(now leaky.Time) {
	for _, gt := range s.held {
		if gt.adapter != nil {
			gt.adapter.load.Fail(now)
		}
	}
}

// left records that the client of a connection that holds slots of s has gone before the answer came.
func (s *slots) left(now leaky.Time) {
	for _, gt := range s.held {
		if gt.adapter != nil {
			gt.adapter.load.Leave(now)
		}
	}
}

// publish tells what was found out.
func (ad *adapter) publish(now leaky.Time) {
	st := &shaper.AdaptiveStatus{Observed: ad.watcher != nil}
	if st.Observed {
		if limit, throughput, known := ad.watcher.Knee(); known {
			st.Limit, st.Throughput = limit, throughput
		}
	} else {
		st.Limit, st.Most, st.Current, st.Throughput = ad.controller.Middle(), ad.controller.Most(), ad.controller.Limit(), ad.controller.Throughput()
		st.Changes = DescribeChanges(ad.controller.History(), now)
	}
	ad.published = now
	ad.state.Adaptive.Store(st)
}

// DescribeChanges returns changes of an adaptive limit, as of now, in wall-clock time.
func DescribeChanges(changes []adaptive.Change, now leaky.Time) (all []shaper.AdaptiveChange) {
	wall := time.Now()
	for _, c := range changes {
		all = append(all, shaper.AdaptiveChange{At: wall.Add(-now.Sub(c.At).Duration()), From: c.From, To: c.To, Reason: c.Reason.String()})
	}
	return all
}
