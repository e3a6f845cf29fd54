// Owner: the loop's thread.

package conn

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
)

// probe is an active check: it connects, may wait for an answer, and closes. It counts as one of the downstream's
// max_connections, and is skipped while all are in use.
type probe struct {
	d       *downstream
	fd      int         // -1 while no check is running
	asked   bool        // it is connected, and waits for the answer
	counted bool        // the check holds one of d's max_connections
	timer   pacer.Event // starts the next check, or is the timeout of this one
	due     leaky.Time  // the timeout

	interval time.Duration // that the next check was scheduled with
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
	if interval := p.d.listener.config.Load().Check.Interval; p.fd < 0 && (!p.timer.Scheduled() || interval != p.interval) {
		p.timer.Fire, p.interval = p.start, interval
		// Spread the first checks over an interval.
		p.d.listener.proxy.loop.pacer.Schedule(&p.timer, now+leaky.FromDuration(rand.N(interval)))
	}
}

func (p *probe) start(now leaky.Time) {
	d := p.d
	proxy, config := d.listener.proxy, d.listener.config.Load()
	if !d.hasCapacity(now) {
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
		fd, err = proxy.connectTCP(netip.Addr{}, netip.AddrPortFrom(addr, d.checkPort()), d.listener.config.Load().Check.Send != "")
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
	p.timer.Fire = func(now leaky.Time) {
		if !proxy.loop.unheard(&p.timer, p.due) {
			p.finish(unix.ETIMEDOUT, now)
		}
	}
	p.wait(config, now)
}

// wait gives the downstream until the timeout to answer.
func (p *probe) wait(config *listenerConfig, now leaky.Time) {
	p.due = now + leaky.FromDuration(config.Check.Timeout)
	p.d.listener.proxy.loop.pacer.Schedule(&p.timer, p.due)
}

// checkPort returns the port to check: the downstream's, or else the listener's first one.
func (d *downstream) checkPort() uint16 {
	a := d.listener.config.Load().Addresses[0]
	return d.PortFor(a.Ports.First, !a.Single())
}

func (p *probe) ready(events uint32, now leaky.Time) {
	switch {
	case events&(unix.EPOLLERR|unix.EPOLLHUP) != 0:
		p.finish(cmp.Or(sock.PendingError(p.fd), error(unix.ECONNRESET)), now)
	case p.asked:
		p.readAnswer(now)
	case events&unix.EPOLLOUT != 0:
		config := p.d.listener.config.Load()
		p.asked = true
		if config.Check.Send != "" {
			if _, errno := sock.Send(p.fd, []byte(config.Check.Send)); errno != 0 { // it fits into the buffer of a new connection
				p.finish(errno, now)
				return
			}
			if p.due <= now { // it could not be asked before
				p.wait(config, now)
			}
		}
		p.readAnswer(now)
	}
}

// readAnswer ends the check if the answer is there, or none is expected.
func (p *probe) readAnswer(now leaky.Time) {
	expect := p.d.listener.config.Load().Check.Expect
	got := make([]byte, len(expect))
	n, errno := 0, unix.Errno(0)
	if expect != "" {
		if n, errno = sock.Peek(p.fd, got); errno == unix.EAGAIN || errno == 0 && n > 0 && n < len(expect) && strings.HasPrefix(expect, string(got[:n])) {
			return // more is to come
		}
	}
	sock.ResetOnClose(p.fd)
	switch {
	case errno != 0:
		p.finish(errno, now)
	case string(got[:n]) != expect:
		p.finish(fmt.Errorf("answered %q, expected %q", got[:n], expect), now)
	default:
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
			log.Warn("downstream is down", "listener", d.listener.name, "downstream", d.Name(), "err", err)
			d.closeFlows(now, anyPort)
			d.listener.followChecks(now)
			d.listener.wakeLater() // if this was the last available one, all are tried
		}
	default:
		d.failures = 0
		d.successes++
		if d.successes < check.Rise {
			break
		}
		if d.down {
			d.recover(now)
			d.down, d.recoveredAt = false, now
			d.listener.scheduleHold(now)
			clear(d.ports)
			log.Info("downstream is up", "listener", d.listener.name, "downstream", d.Name())
			d.listener.wakeLater()
		}
		if !d.drained {
			d.listener.reached(true, now)
		}
	}
	p.scheduleNext(now)
}

// scheduleNext schedules the next check, one interval from now.
func (p *probe) scheduleNext(now leaky.Time) {
	ln := p.d.listener
	p.timer.Fire, p.interval = p.start, ln.config.Load().Check.Interval
	jitter := time.Duration(float64(p.interval) * (0.9 + 0.2*rand.Float64()))
	ln.proxy.loop.pacer.Schedule(&p.timer, now+leaky.FromDuration(jitter))
}

func (p *probe) stop() {
	l := p.d.listener.proxy.loop
	l.pacer.Cancel(&p.timer)
	if p.fd >= 0 {
		l.close(p.fd)
		p.fd, p.asked = -1, false
	}
	if p.counted {
		p.counted = false
		p.d.release()
	}
}

func (ln *listener) stopProbes() {
	for _, d := range ln.downstreams {
		d.probe.stop()
	}
}
