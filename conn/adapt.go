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
	controller *adaptive.Controller // nil if it only observes
	watcher    *adaptive.Watcher
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
	switch {
	case l.Adapt == shaper.AdaptOff:
		return
	case ad == nil || (ad.controller == nil) != observes:
		a.removeAdapter(gt.state)
		ad = &adapter{admission: a, state: gt.state}
		ad.timer.Fire = ad.step
		if observes {
			ad.watcher = &adaptive.Watcher{}
			ad.load = &ad.watcher.Load
		} else {
			ad.controller = adaptive.New(l.MinConnections, l.MaxConnections, int(gt.state.InFlight.Load()), now)
			ad.load = &ad.controller.Load
		}
		a.adapters[gt.state] = ad
	case !observes:
		ad.controller.Bound(l.MinConnections, l.MaxConnections, now)
	}
	ad.gate, gt.adapter = gt, ad
	ad.measure(now)
	if !ad.timer.Scheduled() {
		a.wheel.Schedule(&ad.timer, now+adaptEvery)
	}
	ad.publish(now)
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
		if l := a.policy.Limit(i); ad.controller != nil {
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
		st.Limit, st.Most, st.Throughput = ad.controller.Middle(), ad.controller.Most(), ad.controller.Throughput()
		wall := time.Now()
		for _, c := range ad.controller.History() {
			st.Changes = append(st.Changes, shaper.AdaptiveChange{At: wall.Add(-now.Sub(c.At).Duration()), From: c.From, To: c.To, Reason: c.Reason.String()})
		}
	}
	ad.published = now
	ad.state.Adaptive.Store(st)
}
