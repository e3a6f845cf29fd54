package conn

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// downstream is one of a listener's, and how it is doing. It belongs to the loop's
// thread, and stays from one configuration to the next.
type downstream struct {
	Downstream
	site *site
	host *host

	inFlight  int
	flows     roster
	failures  int        // checks that failed, one after the other
	lastError error      // of the last of them
	successes int        // checks that did not
	gone      bool       // from the configuration
	down      bool       // its checks fail
	drained   bool       // an operator wants it to get no connections
	back      leaky.Time // since when its checks succeed again
	turn      int64      // of round robin

	outlets  map[uint16]*outlet // by port, those that could not be reached once
	answered leaky.Time         // when one could be last, as far as there are such

	probe probe
}

// probe is an active check: it connects, and closes. Where d takes so many connections at
// once it is one of them, and is left out while d has all.
type probe struct {
	d     *downstream
	fd    int         // -1 while none is under way
	place bool        // it has one of d's connections
	timer leaky.Event // to begin the next one, or to give this one up
}

// DrainDownstream has a downstream, as Downstreams names it, get no connections any more,
// or get them again, at one listener or at all where listener is "". Those that it has go
// on. It returns at how many listeners there is such a one. A reload changes nothing of
// it while the downstream stays.
func (p *Proxy) DrainDownstream(listener, downstream string, drained bool) (found int) {
	p.loop.call(func(now leaky.Time) {
		for _, s := range p.sites {
			for _, d := range s.downstreams {
				if d.String() != downstream || listener != "" && listener != s.name {
					continue
				}
				found++
				d.drained = drained
				s.wake(now)
			}
		}
	})
	return found
}

// Downstreams returns how all downstreams are doing.
func (p *Proxy) Downstreams() (all []shaper.DownstreamStatus) {
	p.loop.call(func(now leaky.Time) {
		for _, s := range p.sites {
			for _, d := range s.downstreams {
				status := shaper.DownstreamStatus{
					Listen: s.name, Downstream: d.String(), Up: true, Down: d.down, Drained: d.drained, InFlight: d.inFlight, Most: d.Connections,
				}
				if err := d.failing(); err != nil {
					status.Up, status.Error = false, err.Error()
				}
				all = append(all, status)
			}
		}
	})
	return all
}

// setDownstreams puts those of config into effect, keeping what is known of those that
// stay.
func (s *site) setDownstreams(config *siteConfig, now leaky.Time) {
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
			d = &downstream{site: s, drained: to.Drained}
			d.probe = probe{d: d, fd: -1}
		}
		d.Downstream, d.host = to, config.hosts[i]
		s.downstreams = append(s.downstreams, d)
		d.probe.restart(now)
	}
	for _, d := range old {
		if d != nil {
			d.probe.stop()
			d.gone = true
		}
	}
}

// giveBack gives back a place at d. Those who wait for one may be another listener's than who
// had it: the listener of its port has changed.
func (d *downstream) giveBack() {
	d.inFlight--
	d.site.wakeSoon()
}

func (d *downstream) room() bool { return d.Connections == 0 || d.inFlight < d.Connections }

// weight is d's share of connections at a port, less than what is configured for a while
// after it has come back.
func (d *downstream) weight(port uint16, now leaky.Time) int64 {
	const whole = 1000
	w := int64(max(d.Weight, 1)) * whole
	back := d.back
	if o := d.outlets[port]; o != nil {
		back = max(back, o.back)
	}
	if slow := leaky.FromDuration(d.site.config.Load().SlowStart); back > 0 && now < back+slow {
		w = max(w/10, int64(float64(w)*float64(now.Sub(back))/float64(slow)))
	}
	return w
}

// target is who asks for a downstream, and at which port.
type target struct {
	source   netip.Addr
	port     uint16 // that it asked for
	samePort bool   // goes before the downstream's own
}

// at is the port at d that t stands for.
func (t target) at(d *downstream) uint16 { return d.port(t.port, t.samePort) }

// pick returns the downstream for a connection to to, of those that have not
// failed it yet. Those that are out are only tried when all are. It returns nil when
// there is none, and then whether there would be one if it were not full.
func (s *site) pick(to target, failed []*downstream, now leaky.Time) (_ *downstream, full bool) {
	list, full := s.eligible(to, failed, now)
	if len(list) == 0 {
		return nil, full
	}
	return s.choose(list, to, now), false
}

// eligible returns those of whom pick chooses one, or when there is none, whether there
// would be if they were not full. They are valid until the next call.
func (s *site) eligible(to target, failed []*downstream, now leaky.Time) (_ []*downstream, full bool) {
	s.candidates = s.candidates[:0]
	drained := false
	for _, out := range [...]bool{false, true} {
		for _, d := range s.downstreams {
			if d.usable(to.at(d), now) == out || slices.Contains(failed, d) || !d.host.addr().IsValid() || !d.reaches(to.source) {
				continue
			}
			if d.drained {
				drained = true
				continue
			}
			if d.room() {
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

func (s *site) choose(list []*downstream, to target, now leaky.Time) *downstream {
	if len(list) == 1 {
		return list[0]
	}
	best := list[0]
	switch s.config.Load().Balance {
	case SourceHash:
		// Rendezvous hashing (Thaler and Ravishankar, 1998), with weights: when one goes,
		// only its sources move.
		most := math.Inf(-1)
		for _, d := range list {
			u := (float64(hashOf(to.source, d.String())>>11) + 0.5) / (1 << 53)
			if score := -float64(d.weight(to.at(d), now)) / math.Log(u); score > most {
				best, most = d, score
			}
		}
		return best
	case LeastConnections:
		most := int64(math.MinInt64)
		least := list[:0]
		for _, d := range list {
			switch spare := -int64(d.inFlight+1) * 1e9 / d.weight(to.at(d), now); {
			case spare > most:
				most, least = spare, append(least[:0], d)
			case spare == most:
				least = append(least, d)
			}
		}
		list = least
	}
	// Smooth weighted round robin, as nginx has it: one with weight 5 does not get five in
	// a row.
	var sum int64
	best = list[0]
	for _, d := range list {
		w := d.weight(to.at(d), now)
		d.turn += w
		sum += w
		if d.turn > best.turn {
			best = d
		}
	}
	best.turn -= sum
	return best
}

// hashOf is FNV-1a, mixed. It is the same on all hosts.
func hashOf(source netip.Addr, name string) uint64 {
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

// ours reports whether an error is of this host and not of the downstream.
func ours(err error) bool {
	switch err {
	case unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.EADDRNOTAVAIL, errCannotShow:
		return true
	}
	return false
}

// restart begins to check, if that is asked for, or goes on with it.
func (p *probe) restart(now leaky.Time) {
	if p.d.site.config.Load().Check.Interval == 0 {
		p.stop()
		if p.d.down {
			p.d.down, p.d.failures = false, 0
		}
		return
	}
	if p.fd < 0 && !p.timer.Scheduled() {
		p.timer.Fire = p.begin
		// Not all at once.
		p.d.site.proxy.loop.pacer.Schedule(&p.timer, now+leaky.FromDuration(rand.N(p.d.site.config.Load().Check.Interval)))
	}
}

func (s *site) stopProbes() {
	for _, d := range s.downstreams {
		d.probe.stop()
	}
}

func (p *probe) stop() {
	l := p.d.site.proxy.loop
	l.pacer.Cancel(&p.timer)
	if p.fd >= 0 {
		l.close(p.fd)
		p.fd = -1
	}
	if p.place {
		p.place = false
		p.d.giveBack()
	}
}

func (p *probe) begin(now leaky.Time) {
	d := p.d
	proxy, config := d.site.proxy, d.site.config.Load()
	if !d.room() {
		p.next(now)
		return
	}
	if d.Connections > 0 {
		p.place = true
		d.inFlight++
	}
	addr := d.host.addr()
	fd := -1
	err := errNoAddress
	if addr.IsValid() {
		fd, err = proxy.connectTCP(netip.Addr{}, netip.AddrPortFrom(addr, d.checkPort()))
	}
	if err == nil {
		if err = proxy.loop.watch(fd, edges, p); err != nil {
			unix.Close(fd)
		}
	}
	if err != nil {
		p.result(err, now)
		return
	}
	p.fd = fd
	p.timer.Fire = func(now leaky.Time) { p.result(unix.ETIMEDOUT, now) }
	proxy.loop.pacer.Schedule(&p.timer, now+leaky.FromDuration(config.Check.Timeout))
}

// checkPort is the port to check: the downstream's, or the listener's first one.
func (d *downstream) checkPort() uint16 {
	e := d.site.config.Load().Endpoints[0]
	return d.port(e.Addr.Port(), e.SamePort)
}

func (p *probe) ready(events uint32, now leaky.Time) {
	switch {
	case events&(unix.EPOLLERR|unix.EPOLLHUP) != 0:
		errno, _ := unix.GetsockoptInt(p.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		p.result(unix.Errno(errno), now)
	case events&unix.EPOLLOUT != 0:
		_ = unix.SetsockoptLinger(p.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		p.result(nil, now)
	}
}

// result ends a check, and sees to the next one.
func (p *probe) result(err error, now leaky.Time) {
	p.stop()
	d, check := p.d, p.d.site.config.Load().Check
	log := d.site.proxy.log
	switch {
	case err != nil && ours(err): // says nothing of the downstream
	case err != nil:
		d.failures++
		d.successes = 0
		d.lastError = err
		if !d.down && d.failures >= check.Fall {
			d.down = true
			log.Warn("downstream is down", "listener", d.site.name, "downstream", d.String(), "err", err)
			d.leave(now, anyPort)
			d.site.wakeSoon() // if this was the last one, all are tried
		}
	default:
		d.failures = 0
		d.successes++
		if d.down && d.successes >= check.Rise {
			d.down, d.back = false, now
			clear(d.outlets)
			log.Info("downstream is up", "listener", d.site.name, "downstream", d.String())
			d.site.wakeSoon()
		}
	}
	p.next(now)
}

// next has the next check begin when an interval has passed.
func (p *probe) next(now leaky.Time) {
	site := p.d.site
	p.timer.Fire = p.begin
	jitter := time.Duration(float64(site.config.Load().Check.Interval) * (0.9 + 0.2*rand.Float64()))
	site.proxy.loop.pacer.Schedule(&p.timer, now+leaky.FromDuration(jitter))
}
