package conn

import (
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

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
	enrolled
	account
	key         flowKey
	proxy       *Proxy
	site        *site
	source      *udpSource
	flow        shaper.Flow
	route       shaper.Route
	routed      *shaper.Policy // that its lines are of
	slots       slots
	fd          int // connected to downstream
	downstream  *downstream
	outlet      uint16 // its port
	transparent bool   // what it showed downstream when it was connected
	apart       bool   // its datagrams cannot leave as a train
	prefix      []byte // of each datagram to the downstream
	asked       uint64 // bytes from the source
	told        uint64 // bytes for it, an empty datagram as one
	many        bool   // the source does not ask one host alone
	known       bool   // it has sent something since it was told something
	to          replyTo
	up          udpDirection
	down        udpDirection
	seen        leaky.Time
	queued      *datagram // the first of a list
	expiry      leaky.Event
	mute        bool // the downstream has not answered yet
	regular     bool // it has sent again meanwhile
	closed      bool

	places []place // in rosters, as rank
	rank   rank
	filed  leaky.Time // there
}

// udpDirection is one way of a flow.
type udpDirection struct {
	path     []stop
	observed shaper.Set
	moved    uint64 // bytes
}

// muteTimeout is when a flow ends at the latest that was never answered.
const muteTimeout = 10 * leaky.Second

// dial connects a socket of f to d, where it has a place, or if that is nil to a downstream
// that has one.
func (f *udpFlow) dial(to target, d *downstream, now leaky.Time) error {
	placed := d != nil
	if !placed {
		full := false
		switch d, full = f.site.pick(to, nil, now); {
		case full:
			return errFull
		case d == nil:
			return errNoAddress
		}
	}
	f.outlet = to.at(d)
	addr := netip.AddrPortFrom(d.host.addr(), f.outlet)
	var from netip.Addr
	transparent := f.site.config.Load().Transparent
	if transparent {
		from = f.flow.Source
	}
	fd, err := connectUDP(from, addr)
	if err != nil {
		if !ours(err) {
			d.failed(f.outlet, err, now)
		}
		return fmt.Errorf("connect to %s: %w", addr, err)
	}
	if err := f.proxy.loop.watch(fd, unix.EPOLLIN, f); err != nil {
		unix.Close(fd)
		return err
	}
	f.fd, f.downstream, f.transparent = fd, d, transparent
	if !placed {
		d.inFlight++
	}
	return nil
}

func (f *udpFlow) idleTimeout() leaky.Time {
	d := leaky.FromDuration(f.site.config.Load().IdleTimeout)
	if f.mute {
		d = min(d, muteTimeout)
	}
	return d
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
			f.downstream.failed(f.outlet, errno, now)
			if f.proxy.flows[f.key] == f && !f.downstream.usable(f.outlet, now) {
				f.close(now) // the next datagram may go to another
			}
		}
		return
	}
	f.touch(now)
	if len(f.downstream.outlets) > 0 {
		f.downstream.reached(f.outlet, now)
	}
	if f.mute {
		f.answered(now)
	}
	for i := range n {
		m := l.batch.message(i)
		if m.truncated {
			f.site.counts.SendErrors.Add(1)
			continue
		}
		if f.withhold(&m) {
			f.forward(m, true, now)
		}
	}
	l.batch.train.leave()
}

// withhold takes from an answer, or several, what may not go back to the source, and
// reports whether anything is left.
func (f *udpFlow) withhold(m *message) bool {
	most := f.site.config.Load().Amplification
	left := max(uint64(most)*f.asked, f.told) - f.told
	if most > 0 && charged(m.data) > left {
		fit := 0
		if m.size > 0 {
			fit = int(left) / m.size
		}
		f.site.counts.Withheld.Add(uint64(m.count() - fit))
		f.proxy.refused.note("answer withheld", "listener", f.site.name, "source", f.flow.Source,
			"asked", f.asked, "told", f.told, "answer", len(m.data), "amplification", most)
		if m.data = m.data[:fit*m.size]; fit == 0 {
			return false
		}
	}
	f.told += charged(m.data)
	return true
}

// answered is called when the downstream has answered f for the first time: what it has
// queued is a stranger's no more.
func (f *udpFlow) answered(now leaky.Time) {
	f.mute = false
	f.file(now)
	f.proxy.loop.memory.transfer(f)
	f.recount(now)
	f.reroute(f.proxy.shaper.Policy(), now)
}

// goesOn is called when f has sent again, and nobody has answered: it is no stranger of
// whom nothing more comes.
func (f *udpFlow) goesOn(now leaky.Time) {
	f.regular = true
	var queued []*datagram
	for dg := f.queued; dg != nil; dg = dg.next {
		queued = append(queued, dg)
	}
	if f.withdraw(now); f.closed {
		return
	}
	apart(f.up.path)
	apart(f.down.path)
	for _, dg := range slices.Backward(queued) { // the oldest is the last one
		dg.resubmit(now)
	}
}

// withdraw takes what f has queued out of its lines.
func (f *udpFlow) withdraw(now leaky.Time) {
	var queued []*unit
	for dg := f.queued; dg != nil; dg = dg.next {
		queued = append(queued, &dg.unit)
	}
	f.proxy.loop.lines.withdraw(now, queued...)
}

func (f *udpFlow) expire(now leaky.Time) {
	if end := f.seen + f.idleTimeout(); end > now || f.queued != nil {
		f.proxy.loop.pacer.ScheduleCoarse(&f.expiry, max(end, now+leaky.Second))
		return
	}
	f.close(now)
}

// close forgets f, and drops what it has queued. What others do in its place, or with its
// slots, may close more flows: among them those that the caller was to close next.
func (f *udpFlow) close(now leaky.Time) {
	if f.closed {
		return
	}
	f.closed = true
	l := f.proxy.loop
	if l.batch.train.flow == f {
		l.batch.train.leave()
	}
	l.pacer.Cancel(&f.expiry)
	f.withdraw(now)
	for f.queued != nil {
		f.queued.lose()
	}
	f.logAccess(now)
	f.settle(now)
	l.lines.release(f.up.path, now)
	l.lines.release(f.down.path, now)
	f.up.path, f.down.path = nil, nil
	l.close(f.fd)
	f.fd = -1
	delete(f.proxy.flows, f.key)
	f.proxy.flowList.remove(f)
	f.delist()
	f.downstream.giveBack()
	f.site.counts.Flows.Add(-1)
	f.site.forget(f.source, f.flow.Source)
	f.slots.release(now)
}
