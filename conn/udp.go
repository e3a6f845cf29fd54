package conn

import (
	"container/list"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// udpPort is a socket that datagrams of clients arrive at. It belongs to the
// loop's thread once it serves.
type udpPort struct {
	proxy   *Proxy
	fd      int
	port    uint16
	service atomic.Pointer[service]
}

// flowKey tells flows apart: by the client and by the address it asked, from
// which the replies have to come.
type flowKey struct {
	port   *udpPort
	client netip.AddrPort
	scope  uint32
	asked  netip.Addr
}

// udpFlow is the datagrams between one client and one downstream. It belongs to
// the loop's thread.
type udpFlow struct {
	account
	key        flowKey
	proxy      *Proxy
	site       *site
	flow       shaper.Flow
	route      shaper.Route
	slots      slots
	fd         int // connected to downstream
	downstream *downstream
	apart      bool   // its datagrams cannot leave as a train
	prefix     []byte // of each datagram to the downstream
	asked      uint64 // bytes from the source
	told       uint64 // bytes back to it
	many       bool   // the source does not ask one host alone
	known      bool   // it has sent something since it was told something
	to         replyTo
	up         udpDirection
	down       udpDirection
	seen       leaky.Time
	queued     *datagram // the first of a list
	expiry     leaky.Event
	mute       *list.Element // in site.unanswered, until the downstream has answered
}

// udpDirection is one way of a flow.
type udpDirection struct {
	path     []stop
	observed shaper.Set
	moved    uint64 // bytes
}

// flowList is the flows without an answer, the longest idle first. They are what a
// flood of spoofed sources leaves behind, and make room when there is none.
type flowList struct{ list.List }

// datagram is a queued datagram.
type datagram struct {
	unit
	flow *udpFlow
	down bool
	data []byte
	held bool // data is a buffer of the loop, not lent

	next, prev *datagram // of the flow
}

const (
	// maxQueued bounds the memory of queued datagrams: bytes of their buffers.
	maxQueued = 128 << 20

	// muteTimeout is when a flow ends at the latest that was never answered.
	muteTimeout = 10 * leaky.Second

	// muteGrace is how long such a flow is left alone: an answer takes its time, and
	// a flood of sources must not push out one that waits for it.
	muteGrace = leaky.Second / 2

	// udpCredit is how many datagrams a late wake-up gives back.
	udpCredit = 1

	// UDPBuffer, in bytes, is asked for as the receive buffer of a port, so that it
	// holds what arrives while the loop is busy elsewhere.
	UDPBuffer = 4 << 20
)

func (p *Proxy) openUDP(e Endpoint, transparent bool) (port, error) {
	fd, err := p.inheritedSocket(e), error(nil)
	if fd >= 0 {
		err = setUDPOptions(fd, e.Addr.Addr())
	} else {
		fd, err = bindUDP(e.Addr, transparent)
	}
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return nil, explainBind(err, "udp://"+e.Addr.String())
	}
	return &udpPort{proxy: p, fd: fd, port: localAddr(fd).Port()}, nil
}

func (u *udpPort) descriptor() int { return u.fd }

func (u *udpPort) serve(s service) {
	if u.service.Swap(&s) != nil {
		return
	}
	u.proxy.loop.call(func(leaky.Time) {
		if err := u.proxy.loop.watch(u.fd, unix.EPOLLIN, u); err != nil {
			u.proxy.log.Error("watch UDP port", "listener", s.name, "port", u.port, "err", err)
		}
	})
}

// close ends the port and its flows, which have nothing to reply from any more.
func (u *udpPort) close() {
	u.proxy.loop.call(func(now leaky.Time) {
		for _, f := range u.proxy.flows {
			if f.key.port == u {
				f.close(now)
			}
		}
		u.proxy.loop.forget(u.fd) // systemd may have a duplicate
		unix.Close(u.fd)
	})
}

// pause has datagrams left where they are; replies go on.
func (u *udpPort) pause() { u.proxy.loop.forget(u.fd) }

// ready takes in a batch of datagrams; epoll reports the port again when there
// are more.
func (u *udpPort) ready(_ uint32, now leaky.Time) {
	l := u.proxy.loop
	n, _ := l.batch.receive(u.fd)
	for i := range n {
		m := l.batch.message(i)
		if m.truncated || !m.from.IsValid() {
			u.service.Load().counts.SendErrors.Add(1)
			continue
		}
		if f := u.flow(m, now); f != nil {
			f.seen = now
			f.asked += uint64(len(m.data))
			f.known = f.known || f.told > 0
			if f.mute != nil {
				f.site.unanswered.MoveToBack(f.mute)
			}
			f.forward(m, false, now)
		}
	}
	l.batch.train.leave()
}

// flow returns the flow of m, made if need be, or nil when there is no room or no
// slot for it.
func (u *udpPort) flow(m message, now leaky.Time) *udpFlow {
	p, s := u.proxy, u.service.Load()
	key := flowKey{port: u, client: m.from, scope: m.scope, asked: m.to}
	if f := p.flows[key]; f != nil {
		return f
	}
	f := &udpFlow{key: key, proxy: p, site: s.site, fd: -1, to: newReplyTo(m), many: m.many, seen: now}
	f.begun = now
	f.flow = shaper.Flow{
		Source: m.from.Addr().Unmap().WithZone(""), Port: u.port, Protocol: shaper.UDP,
		Connection: p.nextID.Add(1),
	}
	if !s.room(turnAddr(f.flow.Source), now) {
		s.counts.FlowsRefused.Add(1)
		p.shaper.Note(f.flow.Source, shaper.Tally{Dropped: 1}, now)
		return nil
	}
	var full *shaper.Limit
	if f.slots, full = p.gates.take(&f.flow, s.name, now); full != nil && s.unanswered.evict(now) {
		f.slots, full = p.gates.take(&f.flow, s.name, now) // it may have had the slot
	}
	if full != nil {
		if full.Excess == shaper.ExcessReject && !m.many {
			p.reject(&key, u.port, m.size)
		}
		return nil
	}
	err := f.dial(s.samePort, now)
	if err == errFull && s.unanswered.evict(now) {
		err = f.dial(s.samePort, now)
	}
	if err != nil {
		f.slots.release(now)
		s.counts.DialErrors.Add(1)
		p.refused.note("open UDP flow", "listener", s.name, "err", err)
		return nil
	}
	p.flows[key] = f
	s.counts.Flows.Add(1)
	s.counts.FlowsOpened.Add(1)
	s.flowsOf[turnAddr(f.flow.Source)]++
	f.prefix = f.announcement(m)
	f.mute = s.unanswered.PushBack(f)
	f.reroute(p.shaper.Policy())
	f.expiry.Fire = f.expire
	p.loop.pacer.Schedule(&f.expiry, now+f.idleTimeout())
	return f
}

// room reports whether there is room for another flow of a source, and makes some if
// need be.
func (s *site) room(source netip.Addr, now leaky.Time) bool {
	config := s.config.Load()
	if most := config.MaxFlowsPerSource; most > 0 && s.flowsOf[source] >= most {
		return false
	}
	full := s.counts.Flows.Load() >= int64(config.MaxFlows) || s.proxy.loop.short(enough)
	return !full || s.unanswered.evict(now)
}

// dial connects a socket of f to a downstream.
func (f *udpFlow) dial(samePort bool, now leaky.Time) error {
	d, full := f.site.pick(f.flow.Source, nil, now)
	switch {
	case full || d != nil && f.site.queue.first() != nil: // others have waited for longer
		return errFull
	case d == nil:
		return errNoAddress
	}
	to := netip.AddrPortFrom(d.host.addr(), d.port(f.flow.Port, samePort))
	var from netip.Addr
	if f.site.config.Load().Transparent {
		from = f.flow.Source
	}
	fd, err := connectUDP(from, to)
	if err != nil {
		return fmt.Errorf("connect to %s: %w", to, err)
	}
	if err := f.proxy.loop.watch(fd, unix.EPOLLIN, f); err != nil {
		unix.Close(fd)
		return err
	}
	f.fd, f.downstream = fd, d
	d.inFlight++
	return nil
}

func (f *udpFlow) idleTimeout() leaky.Time {
	d := leaky.FromDuration(f.site.config.Load().IdleTimeout)
	if f.mute != nil {
		d = min(d, muteTimeout)
	}
	return d
}

func (f *udpFlow) reroute(policy *shaper.Policy) {
	f.settle(f.proxy.clock.Now())
	f.flow.Listen = policy.ListenIndex(f.site.name)
	f.route = policy.Route(&f.flow)
	f.up.reroute(f, policy, f.route.ToDownstream)
	f.down.reroute(f, policy, f.route.FromDownstream)
}

func (d *udpDirection) reroute(f *udpFlow, policy *shaper.Policy, set shaper.Set) {
	lines, old := f.proxy.loop.lines, d.path
	f.fold(old)
	d.path = lines.path(policy, &f.flow, f.route, set, f.mute != nil)
	lines.release(old, f.proxy.clock.Now())
	d.observed = policy.Observed(set)
}

// ready takes in the downstream's datagrams.
func (f *udpFlow) ready(_ uint32, now leaky.Time) {
	l := f.proxy.loop
	n, errno := l.batch.receive(f.fd)
	if n == 0 {
		if errno != unix.EAGAIN {
			f.site.counts.SendErrors.Add(1)
		}
		if errno == unix.ECONNREFUSED {
			f.downstream.failed(now)
		}
		return
	}
	f.seen = now
	if f.downstream.failures > 0 {
		f.downstream.reached(now)
	}
	if f.mute != nil {
		f.answered(now)
	}
	for i := range n {
		if m := l.batch.message(i); !m.truncated && f.mayAnswer(len(m.data)) {
			f.forward(m, true, now)
		}
	}
	l.batch.train.leave()
}

// mayAnswer reports whether so many bytes may go back to the source.
func (f *udpFlow) mayAnswer(n int) bool {
	most := f.site.config.Load().Amplification
	if most > 0 && !f.known && f.told+uint64(n) > uint64(most)*f.asked {
		f.site.counts.Withheld.Add(1)
		f.proxy.refused.note("answer withheld", "listener", f.site.name, "source", f.flow.Source,
			"asked", f.asked, "answer", n, "amplification", most)
		return false
	}
	f.told += uint64(n)
	return true
}

// answered is called when the downstream has answered f for the first time: what it has
// queued is a stranger's no more.
func (f *udpFlow) answered(now leaky.Time) {
	f.site.unanswered.Remove(f.mute)
	f.mute = nil
	if len(f.up.path)+len(f.down.path) == 0 {
		return
	}
	var queued []*unit
	for dg := f.queued; dg != nil; dg = dg.next {
		queued = append(queued, &dg.unit)
	}
	f.proxy.loop.lines.withdraw(now, queued...)
	f.reroute(f.proxy.shaper.Policy())
	for _, u := range slices.Backward(queued) { // the oldest is the last one
		u.owner.resubmit(now)
	}
}

// forward sends datagrams on, at once, later, or not at all. Their data are only lent.
func (f *udpFlow) forward(m message, down bool, now leaky.Time) {
	d := &f.up
	if down {
		d = &f.down
	}
	if now.Sub(f.settled) > tellEvery {
		f.settle(now)
	}
	if d.observed == 0 && len(d.path) == 0 {
		f.proxy.loop.batch.load(f, down, m.data, m.size)
		return
	}
	for data := m.data; ; {
		one := data[:min(m.size, len(data))]
		data = data[len(one):]
		f.submit(d, one, down, now)
		if len(data) == 0 {
			return
		}
	}
}

// submit puts a datagram under the limits of its direction.
func (f *udpFlow) submit(d *udpDirection, data []byte, down bool, now leaky.Time) {
	p := f.proxy
	n := charged(data)
	if d.observed != 0 {
		p.observe(&f.flow, f.route, d.observed, n, 1, now)
	}
	if len(d.path) == 0 {
		p.loop.batch.load(f, down, data, len(data))
		return
	}
	if p.loop.queuedBytes+bufferSize(len(data)) > p.loop.maxQueued {
		d.path[0].state.Bytes.Add(shaper.Refuse, shaper.MemoryFull, n)
		d.path[0].state.Packets.Add(shaper.Refuse, shaper.MemoryFull, 1)
		d.path[0].did.dropped++
		f.reject(d.path[0].line, down, data)
		return
	}
	dg := p.loop.newDatagram()
	dg.flow, dg.down, dg.data = f, down, data
	dg.unit = unit{owner: dg, path: d.path, bytes: n, packets: 1, credit: udpCredit, grain: n, droppable: true}
	if dg.next = f.queued; dg.next != nil {
		dg.next.prev = dg
	}
	f.queued = dg
	p.loop.lines.submit(&dg.unit, now)
	if dg.unit.queued {
		p.loop.hold(dg)
	}
}

// charged is what a datagram costs in bytes. An empty one costs one, or a limit in
// bytes would let any number of them wait.
func charged(data []byte) uint64 { return max(uint64(len(data)), 1) }

func (dg *datagram) send(leaky.Time) (bytes, packets uint64, again bool) {
	n := charged(dg.data)
	t := &dg.flow.proxy.loop.batch.one
	t.add(dg.flow, dg.down, dg.data, len(dg.data))
	sent := t.leave()
	dg.free()
	if !sent {
		return 0, 0, false
	}
	return n, 1, false
}

func (dg *datagram) refused(by *line) {
	by.state.Bytes.Add(shaper.Refuse, shaper.QueueFull, charged(dg.data))
	by.state.Packets.Add(shaper.Refuse, shaper.QueueFull, 1)
	dg.flow.reject(by, dg.down, dg.data)
	dg.free()
}

// reject tells the source of a datagram that a line has refused it, if it is to.
func (f *udpFlow) reject(by *line, down bool, data []byte) {
	if by.reject && !down && !f.many {
		f.proxy.reject(&f.key, f.flow.Port, len(data))
	}
}

// free takes dg out of its flow. It may be used again for another one.
func (dg *datagram) free() {
	if dg.prev == nil {
		dg.flow.queued = dg.next
	} else {
		dg.prev.next = dg.next
	}
	if dg.next != nil {
		dg.next.prev = dg.prev
	}
	dg.flow.proxy.loop.freeDatagram(dg)
}

func (dg *datagram) resubmit(now leaky.Time) {
	dg.path = dg.flow.up.path
	if dg.down {
		dg.path = dg.flow.down.path
	}
	if len(dg.path) == 0 {
		dg.send(now)
		return
	}
	dg.admitted = true
	arrived := dg.arrived
	dg.flow.proxy.loop.lines.submit(&dg.unit, now)
	if dg.queued {
		dg.arrived = arrived
	}
}

func (f *udpFlow) expire(now leaky.Time) {
	if end := f.seen + f.idleTimeout(); end > now || f.queued != nil {
		f.proxy.loop.pacer.Schedule(&f.expiry, max(end, now+leaky.Second))
		return
	}
	f.close(now)
}

// close forgets f, and drops what it has queued.
func (f *udpFlow) close(now leaky.Time) {
	l := f.proxy.loop
	if l.batch.train.flow == f {
		l.batch.train.leave()
	}
	l.pacer.Cancel(&f.expiry)
	var queued []*unit
	for dg := f.queued; dg != nil; dg = dg.next {
		queued = append(queued, &dg.unit)
	}
	l.lines.withdraw(now, queued...)
	for f.queued != nil {
		f.queued.free()
	}
	f.logAccess(now)
	f.settle(now)
	l.lines.release(f.up.path, now)
	l.lines.release(f.down.path, now)
	l.close(f.fd)
	delete(f.proxy.flows, f.key)
	if f.mute != nil {
		f.site.unanswered.Remove(f.mute)
	}
	f.downstream.inFlight--
	f.site.wakeSoon()
	f.site.counts.Flows.Add(-1)
	source := turnAddr(f.flow.Source)
	if f.site.flowsOf[source]--; f.site.flowsOf[source] == 0 {
		delete(f.site.flowsOf, source)
	}
	f.slots.release(now)
}

// evict closes the flow of l that has been idle longest.
func (l *flowList) evict(now leaky.Time) bool {
	e := l.Front()
	if e == nil || now-e.Value.(*udpFlow).seen < muteGrace {
		return false
	}
	e.Value.(*udpFlow).close(now)
	return true
}
