// Owner: the loop's thread.

package conn

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/fairq"
	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// flowKey identifies a flow.
type flowKey struct {
	port   *udpPort
	client netip.AddrPort
	scope  uint32     // interface index of a link-local client
	local  netip.Addr // destination address of the client's datagrams, and source of the replies
}

// udpFlow forwards the datagrams between one client and one downstream.
type udpFlow struct {
	registryEntry
	account
	key            flowKey
	proxy          *worker
	listener       *listener
	source         *udpSource
	flow           shaper.Flow
	route          shaper.Route
	policy         *shaper.Policy // the policy of its queues
	slots          slots
	fd             int // connected to the downstream
	downstream     *downstream
	downstreamPort uint16
	transparent    bool   // fd has the client's address
	noGSO          bool   // datagrams must be sent one by one
	prefix         []byte // PROXY header before each datagram to the downstream
	rxBytes        uint64 // bytes from the client
	txBytes        uint64 // bytes to the client, at least one a datagram
	broadcast      bool   // the client sends to a broadcast or multicast address
	verified       bool   // the client has sent something after it got a reply
	to             sock.ReplyAddr
	up             udpDirection         // to-downstream
	down           udpDirection         // from-downstream
	lastActive     leaky.Time           // when a datagram last came or went
	queued         fairq.List[datagram] // those that wait, oldest first
	expiry         pacer.Event
	unanswered     bool // the downstream has not replied yet
	repeated       bool // the client has sent again while unanswered
	closed         bool
	turns          turns

	lruEntries []lruEntry // its entries in flowLRUs, all of the same rank
	rank       flowRank
	refiledAt  leaky.Time // when the entries were last moved
}

// udpDirection is one direction of a flow.
type udpDirection struct {
	path     []hop
	observed shaper.Set
	moved    uint64 // bytes sent
}

// unansweredTimeout bounds the idle timeout of a flow that was never answered.
const unansweredTimeout = 10 * leaky.Second

// receive forwards datagrams from the client.
func (f *udpFlow) receive(m sock.Message, now leaky.Time) {
	if f.unanswered && !f.repeated && f.rxBytes > 0 {
		f.markRepeated(now)
	}
	f.rxBytes += chargedBytes(m.Data)
	f.touch(now)
	if !f.verified && f.txBytes > 0 {
		f.verified = true
		f.refile(now)
	}
	f.forward(m, false, now)
}

// markRepeated is called when the client has sent again without a reply. Such a flow is not a
// single forged datagram, and gets queues of its own.
func (f *udpFlow) markRepeated(now leaky.Time) {
	f.repeated = true
	queued := slices.Collect(f.queued.All())
	if f.withdrawQueued(now); f.closed {
		return
	}
	giveOwnQueues(f.up.path)
	giveOwnQueues(f.down.path)
	for _, dg := range queued {
		dg.resubmit(now)
	}
}

// ready receives datagrams from the downstream.
func (f *udpFlow) ready(_ uint32, now leaky.Time) {
	l := f.proxy.loop
	n, errno := l.batch.Receive(f.fd)
	if n == 0 {
		if errno != unix.EAGAIN {
			f.listener.counts.SendErrors.Add(1)
			f.downstream.state.ICMPErrors.Add(1)
		}
		if errno == unix.ECONNREFUSED {
			f.downstream.recordFailure(f.downstreamPort, errno, now)
			if f.proxy.flows[f.key] == f && !f.downstream.available(f.downstreamPort, now) {
				f.close(now) // the next datagram may go to another downstream
			}
		}
		return
	}
	l.moderation.received += n
	f.touch(now)
	f.turns.arrives(now)
	f.turns.answered(f.downstream.state)
	if len(f.downstream.ports) > 0 {
		f.downstream.recordSuccess(f.downstreamPort, now)
	}
	if f.unanswered {
		f.markAnswered(now)
	}
	for i := range n {
		m := l.batch.Message(i)
		if m.Truncated {
			f.listener.counts.SendErrors.Add(1)
			continue
		}
		if f.capReply(&m) {
			f.forward(m, true, now)
		}
	}
	l.train.flush()
}

// capReply removes the datagrams of a reply that would exceed the amplification limit, and
// reports whether any are left.
func (f *udpFlow) capReply(m *sock.Message) bool {
	limit := f.listener.config.Load().Amplification
	left := max(uint64(limit)*f.rxBytes, f.txBytes) - f.txBytes
	if limit > 0 && chargedBytes(m.Data) > left {
		fit := 0
		if m.Size > 0 {
			fit = int(left) / m.Size
		}
		f.listener.counts.RepliesSuppressed.Add(uint64(m.Count() - fit))
		f.proxy.trafficLog.warn("reply suppressed", "listener", f.listener.name, "source", f.flow.Source,
			"received", f.rxBytes, "sent", f.txBytes, "reply", len(m.Data), "amplification", limit)
		if m.Data = m.Data[:fit*m.Size]; fit == 0 {
			return false
		}
	}
	f.txBytes += chargedBytes(m.Data)
	return true
}

// markAnswered is called at the first reply of the downstream. It moves the queued datagrams of
// f from the unverified sources to its own source.
func (f *udpFlow) markAnswered(now leaky.Time) {
	f.unanswered = false
	f.refile(now)
	f.proxy.loop.memory.transfer(f)
	f.slots.verified(&f.flow, f.route, now)
	f.updateSlots(now)
	f.reroute(f.proxy.shaper.Policy(), now)
}

// forward sends, queues or drops the datagrams of m. The data are valid only during the
// call.
func (f *udpFlow) forward(m sock.Message, down bool, now leaky.Time) {
	d := &f.up
	if down {
		d = &f.down
	}
	if now.Sub(f.reportedAt) > reportInterval {
		f.reportUsage(now)
	}
	if d.observed == 0 && len(d.path) == 0 {
		f.proxy.loop.train.append(f, down, m.Data, m.Size)
		return
	}
	for data := m.Data; ; {
		one := data[:min(m.Size, len(data))]
		data = data[len(one):]
		f.submit(d, one, down, now)
		if len(data) == 0 {
			return
		}
	}
}

// submit puts a datagram through the limits of its direction.
func (f *udpFlow) submit(d *udpDirection, data []byte, down bool, now leaky.Time) {
	p := f.proxy
	n := f.chargedBytes(data, down)
	if d.observed != 0 && f.policy == p.shaper.Policy() {
		p.observe(&f.flow, f.route, d.observed, n, 1, now)
	}
	if len(d.path) == 0 {
		p.loop.train.append(f, down, data, len(data))
		return
	}
	dg := p.loop.memory.newDatagram()
	dg.flow, dg.down, dg.data = f, down, data
	dg.unit = unit{owner: dg, path: d.path, bytes: n, packets: 1, credit: udpCredit, grain: n, droppable: true}
	f.queued.Push(&dg.link, dg)
	p.loop.scheduler.submit(&dg.unit, now)
	if dg.unit.queued {
		p.loop.store(dg, now)
	}
}

// udpCredit is the lateness, in datagrams, that is given back after a late wake-up.
const udpCredit = 1

// chargedBytes returns the bytes that a datagram of f is charged for, including the PROXY
// header that the downstream gets.
func (f *udpFlow) chargedBytes(data []byte, down bool) uint64 {
	n := chargedBytes(data)
	if !down {
		n += uint64(len(f.prefix))
	}
	return n
}

// reject sends the source of a refused datagram an ICMP error, if the limit asks for it.
func (f *udpFlow) reject(by *queue, down bool, data []byte) {
	if by.sendReject && !down && !f.broadcast {
		f.proxy.reject(&f.key, f.flow.Port, len(data))
	}
}

// reroute moves the datagrams of f to the queues of policy. A direction whose queues stay the
// same keeps its position in them.
func (f *udpFlow) reroute(policy *shaper.Policy, now leaky.Time) {
	sched := f.proxy.loop.scheduler
	oldPolicy := f.policy
	f.policy = policy
	f.reportUsage(now)
	for _, d := range []*udpDirection{&f.up, &f.down} {
		if f.closed { // withdrawing from queues can end flows
			return
		}
		set := f.route.ToDownstream
		if d == &f.down {
			set = f.route.FromDownstream
		}
		d.observed = policy.Observed(set)
		spec := pathSpec{policy: policy, flow: &f.flow, route: f.route, set: set, unverified: f.unanswered}
		if !f.listener.removed && sched.keepsPath(d.path, spec, now) {
			continue
		}
		var queued []*unit
		for dg := range f.queued.Backward() {
			if dg.down == (d == &f.down) {
				queued = append(queued, &dg.unit)
			}
		}
		if sched.withdraw(now, queued...); f.closed {
			return
		}
		path := sched.newPath(spec)
		if f.repeated {
			giveOwnQueues(path)
		}
		d.path = sched.replacePath(&f.account, d.path, path, f.listener.removed, oldPolicy, now)
		for _, u := range slices.Backward(queued) { // oldest first
			u.owner.resubmit(now)
		}
	}
}

// withdrawQueued takes the queued datagrams of f out of their queues.
func (f *udpFlow) withdrawQueued(now leaky.Time) {
	var queued []*unit
	for dg := range f.queued.Backward() {
		queued = append(queued, &dg.unit)
	}
	f.proxy.loop.scheduler.withdraw(now, queued...)
}

func (f *udpFlow) idleTimeout() leaky.Time {
	d := leaky.FromDuration(f.listener.config.Load().UDPIdleTimeout)
	if f.unanswered {
		d = min(d, unansweredTimeout)
	}
	return d
}

func (f *udpFlow) expire(now leaky.Time) {
	if end := f.lastActive + f.idleTimeout(); end > now || !f.queued.Empty() {
		f.proxy.loop.pacer.ScheduleCoarse(&f.expiry, max(end, now+leaky.Second))
		return
	}
	if !f.proxy.loop.unheard(&f.expiry, f.lastActive+f.idleTimeout()) {
		f.close(now)
	}
}

// close ends f, and drops its queued datagrams. The units and connections that this lets go on
// may close further flows, even those that the caller is about to close.
func (f *udpFlow) close(now leaky.Time) {
	if f.closed {
		return
	}
	f.closed = true
	l := f.proxy.loop
	if l.train.flow == f {
		l.train.flush()
	}
	l.pacer.Cancel(&f.expiry)
	f.withdrawQueued(now)
	for dg := f.queued.Last(); dg != nil; dg = f.queued.Last() {
		dg.drop()
	}
	f.logAccess(now)
	f.reportUsage(now)
	l.scheduler.releasePath(f.up.path, now)
	l.scheduler.releasePath(f.down.path, now)
	f.up.path, f.down.path = nil, nil
	l.close(f.fd)
	f.fd = -1
	delete(f.proxy.flows, f.key)
	f.proxy.flowList.remove(f)
	f.removeLRU()
	f.downstream.release()
	f.listener.counts.Flows.Add(-1)
	f.listener.removeFlow(f.source, f.flow.Source)
	f.slots.release(now)
}

// rebind moves f to the listener that its port belongs to now. Flows of a removed port end
// with it.
func (f *udpFlow) rebind(now leaky.Time) {
	from, to := f.listener, f.key.port.binding.listener
	if from == to {
		return
	}
	f.listener = to
	from.counts.Flows.Add(-1)
	to.counts.Flows.Add(1)
	from.removeFlow(f.source, f.flow.Source)
	f.source = to.sourceOf(f.flow.Source)
	f.source.count++
	to.sources[sourceKey(f.flow.Source)] = f.source
	f.downstream = to.adoptDownstream(f.downstream)
	f.prefix = f.proxyHeader()
	f.insertLRU(now)
}

func (f *udpFlow) updateSlots(now leaky.Time) {
	policy := f.slots.admission.policy
	f.flow.Origin = policy.ListenerIndex(f.listener.name)
	f.route = policy.Route(&f.flow)
	held := f.slots.held
	f.slots.update(&f.flow, f.route, f.listener.removed, now)
	if !slices.Equal(held, f.slots.held) {
		f.insertLRU(now)
	}
}

func (f *udpFlow) applyPolicy(policy *shaper.Policy, now leaky.Time) {
	f.updateSlots(now)
	if policy.EnforcedBlock(f.route.Limits()) >= 0 {
		f.close(now)
		return
	}
	if f.downstream.removed {
		f.downstream = f.listener.adoptDownstream(f.downstream)
		f.insertLRU(now)
	}
	if (f.downstream.removed || f.transparent != f.listener.config.Load().Transparent) && !f.redial(now) {
		f.close(now)
		return
	}
	f.reroute(policy, now)
}
