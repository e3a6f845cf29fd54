// Owner: the loop's thread.

package conn

import (
	"log/slog"

	"shaperd.dev/shaperd/leaky"
)

// portHealth is the health of a downstream at one port. It is kept by port because a listener
// can forward a range of ports, and some of them may be closed.
type portHealth struct {
	failures     int        // consecutive dials and datagrams that failed
	failingSince leaky.Time // when the first of them failed
	lastError    error      // of the last of them
	ejectedUntil leaky.Time // until then it gets connections only if all are ejected
	recoveredAt  leaky.Time // when the last ejection ended by success
}

// available reports whether d gets connections to port though others could.
func (d *downstream) available(port uint16, now leaky.Time) bool {
	if h := d.ports[port]; h != nil && now < h.ejectedUntil {
		return false
	}
	return !d.down
}

// statusError returns why d is considered unreachable, or nil: it has no address, its checks
// fail, or the last dials or datagrams to a port failed and none to another port has succeeded
// since. It is tried all the same if there is no other downstream.
func (d *downstream) statusError() error {
	switch {
	case !d.host.addr().IsValid():
		return errNotResolved
	case d.down:
		return d.lastError
	case d.breaker.openUntil > 0:
		return breakerError{d.breaker.lastError}
	}
	for _, h := range d.ports {
		if h.failures >= d.failureThreshold() && d.reachedAt <= h.failingSince {
			return h.lastError
		}
	}
	return nil
}

// failureThreshold returns the number of consecutive failures at which d counts as failing.
func (d *downstream) failureThreshold() int {
	if n := d.listener.config.Load().EjectAfter; n > 0 {
		return n
	}
	return defaultFailureThreshold
}

// defaultFailureThreshold applies to listeners that do not eject.
const defaultFailureThreshold = 3

// recordFailure records that d could not be reached at port, and ejects it at that port after
// too many failures in a row, if there is another downstream.
func (d *downstream) recordFailure(port uint16, err error, now leaky.Time) {
	h := d.ports[port]
	if h == nil {
		if d.ports == nil {
			d.ports = map[uint16]*portHealth{}
		}
		h = &portHealth{}
		d.ports[port] = h
	}
	if h.failures == 0 {
		h.failingSince = now
	}
	h.failures++
	h.lastError = err
	if h.failures < d.failureThreshold() {
		return
	}
	config := d.listener.config.Load()
	if config.EjectAfter == 0 || len(d.listener.downstreams) == 1 {
		if h.failures == d.failureThreshold() {
			d.logState(slog.LevelWarn, "downstream is failing", port, "failures", h.failures, "err", err)
		}
		return
	}
	ejected := now < h.ejectedUntil
	h.ejectedUntil = now + leaky.FromDuration(config.EjectFor)
	if ejected {
		return
	}
	d.logState(slog.LevelWarn, "downstream ejected", port, "failures", h.failures, "err", err)
	d.closeFlows(now, port)
	d.listener.readmit(now)
}

// recordSuccess records that d was reached at port.
func (d *downstream) recordSuccess(port uint16, now leaky.Time) {
	d.reachedAt = now
	h := d.ports[port]
	if h == nil || h.failures == 0 {
		return
	}
	if h.ejectedUntil > 0 || h.failures >= d.failureThreshold() {
		d.logState(slog.LevelInfo, "downstream recovered", port)
		d.recover(now)
	}
	if h.ejectedUntil > 0 {
		h.recoveredAt, d.recoveredAt = now, now
		d.listener.scheduleHold(now)
	}
	h.failures, h.ejectedUntil, h.lastError = 0, 0, nil
	d.listener.wakeLater()
}

// logState logs a state change of d at port. The rate is limited, because clients can cause
// state changes.
func (d *downstream) logState(level slog.Level, msg string, port uint16, attrs ...any) {
	attrs = append([]any{"downstream", d.Name(), "listener", d.listener.name, "port", port}, attrs...)
	d.listener.proxy.stateLog.write(level, msg, attrs...)
}

// anyPort means all ports of a downstream.
const anyPort = 0

// closeFlows ends the UDP flows to a port of d. Their next datagrams go to another downstream.
func (d *downstream) closeFlows(now leaky.Time, port uint16) {
	for _, f := range d.flows.all() {
		if port == anyPort || f.downstreamPort == port {
			f.close(now)
		}
	}
}

// readmit wakes the waiters of ln, and again at the end of each ejection, and when an open breaker lets one try.
func (ln *listener) readmit(now leaky.Time) {
	ln.wakeLater()
	next := leaky.Never
	for _, d := range ln.downstreams {
		if d.breaker.openUntil > now {
			next = min(next, d.breaker.openUntil)
		}
		for _, h := range d.ports {
			if h.ejectedUntil > now {
				next = min(next, h.ejectedUntil)
			}
		}
	}
	if next != leaky.Never {
		ln.readmission.Fire = ln.readmit
		ln.proxy.loop.pacer.Schedule(&ln.readmission, next)
	}
}
