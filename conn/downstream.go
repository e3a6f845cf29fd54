package conn

import (
	"errors"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// downstream is the state of one downstream of a listener. The loop's thread owns it. It
// survives reloads while the configuration names it.
type downstream struct {
	Downstream
	listener *listener
	host     *host

	inFlight      int
	flows         flowLRU
	failures      int        // consecutive failed checks
	lastError     error      // of the last failed check
	successes     int        // consecutive successful checks
	removed       bool       // no longer in the configuration
	down          bool       // the checks fail
	drained       bool       // an operator drains it
	recoveredAt   leaky.Time // when checks began to succeed again
	currentWeight int64      // of smooth weighted round robin

	ports     map[uint16]*portHealth // only ports that have failed once
	reachedAt leaky.Time             // the last success at any port, once ports has an entry

	probe probe
}

// probe is an active check: it connects, and closes. It counts as one of the downstream's
// max_connections, and is skipped while all are in use.
type probe struct {
	d       *downstream
	fd      int         // -1 while no check is running
	counted bool        // the check holds one of d's max_connections
	timer   pacer.Event // starts the next check, or is the timeout of this one
}

// DrainDownstream starts or ends the draining of a downstream, named as Downstreams names
// it, at one listener, or at all if listener is "". A drained downstream gets no new
// connections; existing ones go on. It returns the number of listeners that have the
// downstream. The state survives reloads as long as the downstream does.
func (p *Proxy) DrainDownstream(listener, downstream string, drained bool) (found int) {
	p.loop.call(func(now leaky.Time) {
		for _, s := range p.listeners {
			for _, d := range s.downstreams {
				if d.String() != downstream || listener != "" && listener != s.name {
					continue
				}
				found++
				d.drained = drained
				s.wakeWaiters(now)
			}
		}
	})
	return found
}

// Downstreams returns the status of all downstreams.
func (p *Proxy) Downstreams() (all []shaper.DownstreamStatus) {
	p.loop.call(func(now leaky.Time) {
		for _, s := range p.listeners {
			for _, d := range s.downstreams {
				status := shaper.DownstreamStatus{
					Listen: s.name, Downstream: d.String(), Up: true, Down: d.down, Drained: d.drained, InFlight: d.inFlight, MaxConnections: d.MaxConnections,
				}
				if err := d.statusError(); err != nil {
					status.Up, status.Error = false, err.Error()
				}
				all = append(all, status)
			}
		}
	})
	return all
}

// setDownstreams applies the downstreams of config, and retains the state of those that stay.
func (s *listener) setDownstreams(config *listenerConfig, now leaky.Time) {
	old := s.downstreams
	s.downstreams = nil
	for i, to := range config.Downstream {
		var d *downstream
		for j, o := range old {
			if o != nil && o.Host == to.Host && o.Port == to.Port {
				d, old[j] = o, nil
				break
			}
		}
		if d == nil {
			d = &downstream{listener: s, drained: to.Drained}
			d.probe = probe{d: d, fd: -1}
		}
		d.Downstream, d.host = to, config.hosts[i]
		s.downstreams = append(s.downstreams, d)
		d.probe.configure(now)
	}
	for _, d := range old {
		if d != nil {
			d.probe.stop()
			d.removed = true
		}
	}
}

// release gives back a connection of d. The waiters that it may let in belong to d's listener,
// which need not be the connection's own: a reload can move a port to another listener.
func (d *downstream) release() {
	d.inFlight--
	d.listener.wakeLater()
}

func (d *downstream) hasCapacity() bool {
	return d.MaxConnections == 0 || d.inFlight < d.MaxConnections
}

// effectiveWeight returns d's weight at a port, in thousandths. It is below the configured
// weight during slow start.
func (d *downstream) effectiveWeight(port uint16, now leaky.Time) int64 {
	const scale = 1000
	w := int64(max(d.Weight, 1)) * scale
	recovered := d.recoveredAt
	if h := d.ports[port]; h != nil {
		recovered = max(recovered, h.recoveredAt)
	}
	if slow := leaky.FromDuration(d.listener.config.Load().SlowStart); recovered > 0 && now < recovered+slow {
		w = max(w/10, int64(float64(w)*float64(now.Sub(recovered))/float64(slow)))
	}
	return w
}

// target is what a new connection asks for: any downstream, at a port.
type target struct {
	source   netip.Addr
	port     uint16 // at the listener
	samePort bool   // port takes precedence over the downstream's own
}

// portOn returns the port of d that t leads to.
func (t target) portOn(d *downstream) uint16 { return d.port(t.port, t.samePort) }

// pick returns a downstream for a connection to target to, except those in failed.
// Unavailable ones are tried only when all are unavailable. If there is none it returns nil,
// and whether one would be eligible if it were not full or drained.
func (s *listener) pick(to target, failed []*downstream, now leaky.Time) (_ *downstream, full bool) {
	list, full := s.eligible(to, failed, now)
	if len(list) == 0 {
		return nil, full
	}
	return s.choose(list, to, now), false
}

// eligible returns the candidates of pick. If there are none, full reports whether one would
// be eligible if it were not full or drained. The list is valid until the next call.
func (s *listener) eligible(to target, failed []*downstream, now leaky.Time) (_ []*downstream, full bool) {
	s.candidates = s.candidates[:0]
	drained := false
	for _, unavailable := range [...]bool{false, true} {
		for _, d := range s.downstreams {
			if d.available(to.portOn(d), now) == unavailable || slices.Contains(failed, d) || !d.host.addr().IsValid() || !d.matchesFamily(to.source) {
				continue
			}
			if d.drained {
				drained = true
				continue
			}
			if d.hasCapacity() {
				s.candidates = append(s.candidates, d)
			} else {
				full = true
			}
		}
		if len(s.candidates) > 0 {
			return s.candidates, false
		}
		if full {
			return nil, true
		}
	}
	return nil, drained
}

func (s *listener) choose(list []*downstream, to target, now leaky.Time) *downstream {
	if len(list) == 1 {
		return list[0]
	}
	best := list[0]
	switch s.config.Load().Balance {
	case SourceHash:
		// Rendezvous hashing (Thaler and Ravishankar, 1998), with weights: when a downstream
		// goes away, only its sources move.
		highest := math.Inf(-1)
		for _, d := range list {
			u := (float64(hashSource(to.source, d.String())>>11) + 0.5) / (1 << 53)
			if score := -float64(d.effectiveWeight(to.portOn(d), now)) / math.Log(u); score > highest {
				best, highest = d, score
			}
		}
		return best
	case LeastConnections:
		highest := int64(math.MinInt64)
		least := list[:0]
		for _, d := range list {
			switch spare := -int64(d.inFlight+1) * 1e9 / d.effectiveWeight(to.portOn(d), now); {
			case spare > highest:
				highest, least = spare, append(least[:0], d)
			case spare == highest:
				least = append(least, d)
			}
		}
		list = least
	}
	// Smooth weighted round robin, as in nginx: a downstream of weight 5 does not get five
	// connections in a row.
	var sum int64
	best = list[0]
	for _, d := range list {
		w := d.effectiveWeight(to.portOn(d), now)
		d.currentWeight += w
		sum += w
		if d.currentWeight > best.currentWeight {
			best = d
		}
	}
	best.currentWeight -= sum
	return best
}

// hashSource returns FNV-1a with a final mix. It is the same on all hosts.
func hashSource(source netip.Addr, name string) uint64 {
	h := uint64(14695981039346656037)
	add := func(b byte) { h = (h ^ uint64(b)) * 1099511628211 }
	for _, b := range source.As16() {
		add(b)
	}
	for i := range len(name) {
		add(name[i])
	}
	h ^= h >> 32
	h *= 0xd6e8feb86659fd93
	return h ^ h>>32
}

// isLocalError reports whether this host, and not the downstream, caused err.
func isLocalError(err error) bool {
	local := [...]error{unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.EADDRNOTAVAIL, errSourceAddr}
	return slices.ContainsFunc(local[:], func(target error) bool { return errors.Is(err, target) })
}

// configure starts or stops the checks as the configuration says. Checks that run go on.
func (p *probe) configure(now leaky.Time) {
	if p.d.listener.config.Load().Check.Interval == 0 {
		p.stop()
		if p.d.down {
			p.d.down, p.d.failures = false, 0
		}
		return
	}
	if p.fd < 0 && !p.timer.Scheduled() {
		p.timer.Fire = p.start
		// Spread the first checks over an interval.
		p.d.listener.proxy.loop.pacer.Schedule(&p.timer, now+leaky.FromDuration(rand.N(p.d.listener.config.Load().Check.Interval)))
	}
}

func (s *listener) stopProbes() {
	for _, d := range s.downstreams {
		d.probe.stop()
	}
}

func (p *probe) stop() {
	l := p.d.listener.proxy.loop
	l.pacer.Cancel(&p.timer)
	if p.fd >= 0 {
		l.close(p.fd)
		p.fd = -1
	}
	if p.counted {
		p.counted = false
		p.d.release()
	}
}

func (p *probe) start(now leaky.Time) {
	d := p.d
	proxy, config := d.listener.proxy, d.listener.config.Load()
	if !d.hasCapacity() {
		p.scheduleNext(now)
		return
	}
	if d.MaxConnections > 0 {
		p.counted = true
		d.inFlight++
	}
	addr := d.host.addr()
	fd := -1
	err := errNoAddress
	if addr.IsValid() {
		fd, err = proxy.connectTCP(netip.Addr{}, netip.AddrPortFrom(addr, d.checkPort()))
	}
	if err == nil {
		if err = proxy.loop.watch(fd, endpointEvents, p); err != nil {
			unix.Close(fd)
		}
	}
	if err != nil {
		p.finish(err, now)
		return
	}
	p.fd = fd
	p.timer.Fire = func(now leaky.Time) { p.finish(unix.ETIMEDOUT, now) }
	proxy.loop.pacer.Schedule(&p.timer, now+leaky.FromDuration(config.Check.Timeout))
}

// checkPort returns the port to check: the downstream's, or else the listener's first one.
func (d *downstream) checkPort() uint16 {
	e := d.listener.config.Load().Endpoints[0]
	return d.port(e.Addr.Port(), e.SamePort)
}

func (p *probe) ready(events uint32, now leaky.Time) {
	switch {
	case events&(unix.EPOLLERR|unix.EPOLLHUP) != 0:
		errno, _ := unix.GetsockoptInt(p.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		p.finish(unix.Errno(errno), now)
	case events&unix.EPOLLOUT != 0:
		_ = unix.SetsockoptLinger(p.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		p.finish(nil, now)
	}
}

// finish records the result of a check, and schedules the next one.
func (p *probe) finish(err error, now leaky.Time) {
	p.stop()
	d, check := p.d, p.d.listener.config.Load().Check
	log := d.listener.proxy.log
	switch {
	case err != nil && isLocalError(err): // says nothing about the downstream
	case err != nil:
		d.failures++
		d.successes = 0
		d.lastError = err
		if !d.down && d.failures >= check.Fall {
			d.down = true
			log.Warn("downstream is down", "listener", d.listener.name, "downstream", d.String(), "err", err)
			d.closeFlows(now, anyPort)
			d.listener.wakeLater() // if this was the last available one, all are tried
		}
	default:
		d.failures = 0
		d.successes++
		if d.down && d.successes >= check.Rise {
			d.down, d.recoveredAt = false, now
			clear(d.ports)
			log.Info("downstream is up", "listener", d.listener.name, "downstream", d.String())
			d.listener.wakeLater()
		}
	}
	p.scheduleNext(now)
}

// scheduleNext schedules the next check, one interval from now.
func (p *probe) scheduleNext(now leaky.Time) {
	ln := p.d.listener
	p.timer.Fire = p.start
	jitter := time.Duration(float64(ln.config.Load().Check.Interval) * (0.9 + 0.2*rand.Float64()))
	ln.proxy.loop.pacer.Schedule(&p.timer, now+leaky.FromDuration(jitter))
}
