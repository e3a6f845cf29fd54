// Owner: the loop's thread.

package conn

import (
	"net/netip"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// pool returns the gate of the downstreams that s may go to, or nil.
func (s *session) pool() *gate { return s.listener.pool(s.target(), s.failedDownstreams) }

// assignDownstream gives s, which has passed the gate of its pool, a slot of a downstream.
func (s *session) assignDownstream(now leaky.Time) {
	if d, _ := s.pick(s.target(), s.failedDownstreams, now); d != nil {
		s.enter(d)
	}
	s.letIn(s, now)
}

func (s *session) target() target { return target{s.flow.Source, s.flow.Port, s.samePort} }

// admitted is called when the last gate was passed.
func (s *session) admitted(now leaky.Time) {
	s.stage = stageDialing
	if s.proxy.loop.overloaded(shedWatermark) {
		s.proxy.trafficLog.warn("connection shed", "listener", s.name, "source", s.flow.Source)
		s.abort(shaper.Overload, now)
		return
	}
	s.timer.Fire = s.dialTimedOut
	s.dial(now)
}

func (s *session) dialTimedOut(now leaky.Time) {
	if due := s.dialedAt + leaky.FromDuration(s.config.Load().ConnectTimeout); !s.proxy.loop.unheard(&s.timer, due) {
		s.redial(unix.ETIMEDOUT, now)
	}
}

// dial connects to a downstream, and to the next one if that fails. If the next one is full, the
// session waits again, without slots.
func (s *session) dial(now leaky.Time) {
	config := s.config.Load()
	for {
		if s.downstream == nil {
			d, full := s.pick(s.target(), s.failedDownstreams, now)
			switch {
			case d == nil && s.unreachable(s, now):
				s.failedDownstreams = nil
				s.waitAgain(now)
				return
			case full:
				s.waitAgain(now)
				return
			case d == nil && s.refusedByBreaker(now):
				return
			case d == nil:
				s.counts.DialErrors.Add(1)
				s.abort(shaper.NotConnected, now)
				return
			}
			s.enter(d)
		}
		s.dialedAt = now
		err := s.connect(s.downstream)
		if err == nil {
			s.proxy.loop.pacer.Schedule(&s.timer, now+leaky.FromDuration(config.ConnectTimeout))
			return
		}
		s.dialFailed(err, now)
	}
}

// waitAgain makes s, which has no downstream, wait for one without slots.
func (s *session) waitAgain(now leaky.Time) {
	s.endTrial(now)
	if s.client.mustPoll && s.client.hasLeft(unix.EPOLLRDHUP) { // while it was being dialed
		s.abort(shaper.ResetByClient, now)
		return
	}
	s.stage, s.paid, s.failedHere = stageWaiting, true, false
	s.release(now)
	s.admission.acquire(&s.waiter, now)
}

// connect starts to connect to d.
func (s *session) connect(d *downstream) error {
	var from netip.Addr
	if s.config.Load().Transparent {
		from = s.flow.Source
	}
	delayAck := s.client.readable || s.config.Load().SendProxy != shaper.NoProxy
	fd, err := s.proxy.connectTCP(from, netip.AddrPortFrom(d.host.addr(), s.target().portOn(d)), delayAck)
	if err != nil {
		return err
	}
	s.server = endpoint{session: s, fd: fd, delaysAck: delayAck}
	if err = s.proxy.loop.watch(fd, endpointEvents, &s.server); err != nil {
		s.server.fd = -1
		unix.Close(fd)
	}
	return err
}

// connectTCP starts a non-blocking connect to to, from the address from if that is valid. delayAck is for one that will send
// something as soon as it is connected.
func (p *Proxy) connectTCP(from netip.Addr, to netip.AddrPort, delayAck bool) (int, error) {
	fd, err := sock.NewTCP(to.Addr())
	if err != nil {
		return -1, err
	}
	p.tagSocket(fd)
	if delayAck {
		sock.DelayAck(fd)
	}
	if err := sock.Connect(fd, from, to); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// dialReady handles the events of a connect.
func (s *session) dialReady(events uint32, now leaky.Time) {
	if events&(unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		s.redial(sock.PendingError(s.server.fd), now)
		return
	}
	if events&unix.EPOLLOUT != 0 {
		s.proxy.loop.pacer.Cancel(&s.timer)
		s.downstream.recordSuccess(s.target().portOn(s.downstream), now)
		s.turns.connected(s.downstream.state, now.Sub(s.dialedAt), now)
		s.endTrial(now)
		s.reached(false, now)
		s.dialSucceeded(now)
		header, err := s.proxyHeader(now)
		if err != nil {
			s.abort(shaper.NotConnected, now)
			return
		}
		s.relay(header, now)
	}
}

func (s *session) redial(err error, now leaky.Time) {
	l := s.proxy.loop
	l.pacer.Cancel(&s.timer)
	l.close(s.server.fd)
	s.server.fd = -1
	s.dialFailed(err, now)
	if s.hold.until > 0 { // since the dial began
		s.failedDownstreams = nil
		s.waitAgain(now)
		return
	}
	s.dial(now)
}

// dialFailed records that the connection to the downstream of s failed.
func (s *session) dialFailed(err error, now leaky.Time) {
	d := s.downstream
	s.proxy.trafficLog.warn("dialing downstream failed", "listener", s.name, "downstream", d.address(s.flow.Port, s.samePort), "err", err)
	if isLocalError(err) {
		s.failedHere = true
		s.postponeTrial(now)
	} else {
		countFailedDial(d.state, err)
		s.failed(now)
		d.recordFailure(s.target().portOn(d), err, now)
		s.attemptFailed(shaper.FailedDial, err, now)
	}
	s.releaseDownstream(now)
	s.failedDownstreams = append(s.failedDownstreams, d)
}

// releaseDownstream frees the slot of s at its downstream.
func (s *session) releaseDownstream(now leaky.Time) {
	if s.downstream == nil {
		return
	}
	s.endTrying()
	s.downstream.release()
	s.downstream = nil
}
