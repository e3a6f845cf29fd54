// Owner: the loop's thread.

package conn

import (
	"errors"
	"net"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// downstream is the state of one downstream of a listener. It survives reloads while the
// configuration names it.
type downstream struct {
	shaper.Downstream
	listener *listener
	host     *host
	state    *shaper.DownstreamState
	id       uint16 // in keys

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

	probe   probe
	breaker breaker
}

// address returns the address of d for traffic to a port, as in logs and the API.
func (d *downstream) address(port uint16, same bool) string {
	return net.JoinHostPort(d.Host, strconv.Itoa(int(d.PortFor(port, same))))
}

// DrainDownstream starts or ends the draining of a downstream, named as Downstreams names
// it, at one listener, or at all if listener is "". A drained downstream gets no new
// connections; existing ones go on. It returns the number of listeners that have the
// downstream. The state survives reloads as long as the downstream does.
func (p *Proxy) DrainDownstream(listener, downstream string, drained bool) (found int) {
	p.eachWorker(func(w *worker, now leaky.Time) {
		for ln := range w.ownListeners() {
			for _, d := range ln.downstreams {
				if d.Name() != downstream || listener != "" && listener != ln.name {
					continue
				}
				found++
				was := ln.allShutOff()
				d.drained = drained
				switch {
				case was && !ln.allShutOff():
					ln.goOn(now)
				case !drained && !d.down && ln.config.Load().Check.Interval > 0:
					ln.reached(true, now)
				default:
					ln.followChecks(now)
				}
				ln.wakeWaiters(now)
			}
		}
	})
	return found
}

// Downstreams returns the status of all downstreams.
func (p *Proxy) Downstreams() (all []shaper.DownstreamStatus) {
	p.eachWorker(func(w *worker, now leaky.Time) {
		for ln := range w.ownListeners() {
			for _, d := range ln.downstreams {
				status := shaper.DownstreamStatus{
					Listen: ln.name, Downstream: d.Name(), Up: true, Down: d.down, Drained: d.drained, InFlight: d.inFlight, MaxConnections: d.MaxConnections,
					State: d.state,
				}
				if b := &d.breaker; b.openUntil > 0 {
					status.BreakerOpen, status.RetryIn = true, max(0, b.openUntil.Sub(now)).Duration()
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
func (ln *listener) setDownstreams(config *listenerConfig, now leaky.Time) {
	old := ln.downstreams
	ln.downstreams = nil
	for i, to := range config.Downstream {
		var d *downstream
		for j, o := range old {
			if o != nil && o.Host == to.Host && o.Port == to.Port {
				d, old[j] = o, nil
				break
			}
		}
		if d == nil {
			d = &downstream{listener: ln, id: ln.proxy.shaper.DownstreamID(to.Name()), drained: to.Drained, state: new(shaper.DownstreamState)}
			d.probe = probe{d: d, fd: -1}
		}
		d.Downstream, d.host = to, config.hosts[i]
		ln.downstreams = append(ln.downstreams, d)
		d.probe.configure(now)
		d.breaker.configure(&config.Breaker)
	}
	for _, d := range old {
		if d != nil {
			d.probe.stop()
			d.removed = true
		}
	}
}

// adoptDownstream moves one connection from the count of d, which belongs to another listener
// or was removed, to the same downstream of ln, if ln has it. It returns the downstream that
// counts the connection.
func (ln *listener) adoptDownstream(d *downstream) *downstream {
	for _, own := range ln.downstreams {
		if own.Host == d.Host && own.Port == d.Port {
			d.inFlight--
			own.inFlight++
			return own
		}
	}
	return d
}

// release gives back a connection of d. The waiters that it may let in belong to d's listener,
// which need not be the connection's own: a reload can move a port to another listener.
func (d *downstream) release() {
	d.inFlight--
	d.listener.wakeLater()
}

func (d *downstream) hasCapacity(now leaky.Time) bool {
	return d.MaxConnections == 0 || d.inFlight < d.capacity(now)
}

// capacity is how many connections d may have: MaxConnections, or less during slow start, at least one.
func (d *downstream) capacity(now leaky.Time) int {
	slow := leaky.FromDuration(d.listener.config.Load().SlowStart)
	if d.recoveredAt == 0 || now >= d.recoveredAt+slow {
		return d.MaxConnections
	}
	return max(1, int(float64(d.MaxConnections)*float64(now.Sub(d.recoveredAt))/float64(slow)))
}

// nextCapacity is when capacity has grown, at the latest, or Never.
func (d *downstream) nextCapacity(now leaky.Time) leaky.Time {
	slow := leaky.FromDuration(d.listener.config.Load().SlowStart)
	if d.MaxConnections == 0 || d.recoveredAt == 0 || now >= d.recoveredAt+slow {
		return leaky.Never
	}
	return min(now+max(slow/leaky.Time(d.MaxConnections), leaky.Second/1000), d.recoveredAt+slow)
}

// isLocalError reports whether this host, and not the downstream, caused err.
func isLocalError(err error) bool {
	local := [...]error{
		unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM, unix.ENOSPC, // of the system
		unix.EADDRNOTAVAIL, unix.EAFNOSUPPORT, sock.ErrSourceAddr, // no address or port of its own
	}
	return slices.ContainsFunc(local[:], func(target error) bool { return errors.Is(err, target) })
}
