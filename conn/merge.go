// Owner: the thread that runs what stopAll was given, while all workers stand still.

package conn

import (
	"cmp"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky"
)

// merge makes two workers one: a change is under way after which their listeners have something in common. Everything that from
// has goes to into as it is: connections, queues with their buckets and turns, gates with what is in flight there, timers and sockets.
// Nothing that they have in common exists before. So no bucket passes more because of it, no gate admits more, and nobody who
// waits loses a place: tickets have one order over all workers.
type merge struct{ from, into *worker }

func (m merge) run(now leaky.Time) {
	from, into := m.from, m.into
	from.loop.train.flush()
	m.moveDecisions()
	m.moveGates()
	m.moveQueues()
	m.moveConnections()
	m.moveLoop()
	into.absorbed = append(append(into.absorbed, from.absorbed...), from)
	for _, w := range into.absorbed { // what has ended, and is known to a timer or to work for the next round
		w.loop, w.admission, w.absorbed = into.loop, into.admission, nil
	}
	into.scheduleAckCheck(now)
	into.scheduleStats(now)
}

// moveWaiters makes what waits at workers that become one try the gates of the next policy, in the order of the turns, as after each
// change. It is for all merges at once: several workers may become one.
func (c *change) moveWaiters(now leaky.Time) {
	turns := map[*admission][]suspended{}
	for _, m := range c.merges {
		from, into := m.from.admission, m.into.admission
		turns[into] = slices.Concat(turns[into], into.dequeueAll(now), from.dequeueAll(now))
	}
	for into, all := range turns {
		slices.SortStableFunc(all, compareTurns)
		into.retries = append(into.retries, waitersOf(all)...)
	}
}

// moveDecisions moves what admission has to do in the next run.
func (m merge) moveDecisions() {
	from, into := m.from.admission, m.into.admission
	into.retries = append(into.retries, from.retries...)
	for _, w := range into.retries {
		w.admission = into
	}
	for i := range from.outcomes {
		from.outcomes[i].waiter.admission = into
	}
	into.outcomes = append(into.outcomes, from.outcomes...)
	into.freed = append(into.freed, from.freed...)
	from.retries, from.outcomes, from.freed = nil, nil, nil
}

// moveGates moves the gates, at which nothing waits.
func (m merge) moveGates() {
	from, into := m.from.admission, m.into.admission
	for _, gt := range slices.SortedFunc(maps.Values(from.byKey), func(a, b *gate) int { return cmp.Compare(a.id, b.id) }) {
		into.lastGateID++
		gt.id = into.lastGateID
		into.own(gt)
	}
	for state, ad := range from.adapters {
		ad.admission = into
		into.adapters[state] = ad
	}
	if into.returns == nil {
		into.returns = returns{}
	}
	maps.Copy(into.returns, from.returns) // perhaps more than maxLines, until some are over
	into.decisions.absorb(&from.decisions)
	clear(from.byKey)
	clear(from.adapters)
	from.returns = nil
}

func (m merge) moveQueues() {
	from, into := m.from.loop.scheduler, m.into.loop.scheduler
	for _, q := range from.byKey {
		into.own(q)
	}
	into.lastBooking = max(into.lastBooking, from.lastBooking)
	if len(from.work) > 0 {
		into.work = append(into.work, from.work...)
		m.into.loop.runLater(into.run)
	}
	clear(from.byKey)
	from.work = nil
}

// moveConnections moves listeners, ports, and connections.
func (m merge) moveConnections() {
	from, into := m.from, m.into
	for ln := range from.ownListeners() {
		ln.proxy = into
	}
	for _, s := range from.sessions.all {
		s.proxy, s.admission, s.listener.proxy, s.port.proxy = into, into.admission, into, into
		if s.turn != nil {
			s.turn.admission = into.admission
		}
	}
	for _, f := range from.flowList.all {
		f.proxy, f.slots.admission, f.listener.proxy, f.key.port.proxy = into, into.admission, into, into
	}
	for _, w := range from.pendingFlows.all {
		w.udp.proxy, w.admission, w.udp.listener.proxy, w.udp.key.port.proxy = into, into.admission, into, into
	}
	for _, l := range from.ports {
		b := l.bound()
		if b.proxy == from { // the listener is removed
			b.proxy = into
		}
		if b.proxy == into {
			l.bind(*b)
		}
	}
	into.sessions.absorb(&from.sessions)
	into.flowList.absorb(&from.flowList)
	into.pendingFlows.absorb(&from.pendingFlows)
	maps.Copy(into.flows, from.flows)
	maps.Copy(into.pendingByKey, from.pendingByKey)
	into.pendingBytes += from.pendingBytes
	clear(from.flows)
	clear(from.pendingByKey)
	from.pendingBytes = 0
}

// moveLoop moves timers, sockets, memory, and work for the next round.
func (m merge) moveLoop() {
	from, into := m.from.loop, m.into.loop
	from.pacer.Cancel(&m.from.ackMonitor.timer)
	from.pacer.Cancel(&m.from.statsSampler.timer)
	into.pacer.Absorb(from.pacer)
	into.hearing.begun = min(into.hearing.begun, from.hearing.until)
	for fd := range from.registrations {
		at := from.registrations[fd]
		if at.watcher == nil || fd == from.wakeFD {
			continue
		}
		from.clearWatch(fd) // its epoll instance is closed as soon as all go on
		err := into.watch(fd, at.events, at.watcher)
		if err != nil { // a user may have so many registrations, and both instances count: see fs.epoll.max_user_watches
			_ = unix.EpollCtl(from.epoll, unix.EPOLL_CTL_DEL, fd, nil)
			err = into.watch(fd, at.events, at.watcher)
		}
		if err != nil { // as if the socket had failed
			m.into.log.Error("moving a connection to another loop failed", "err", err)
			into.runLater(func(now leaky.Time) { at.watcher.ready(unix.EPOLLERR|unix.EPOLLHUP, now) })
		}
	}
	into.deferred = append(into.deferred, from.deferred...)
	from.deferred = nil
	into.memory.absorb(&from.memory)
	into.pipes.Absorb(&from.pipes)
	from.stopping = true
}
