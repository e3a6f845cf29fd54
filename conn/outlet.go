package conn

import (
	"log/slog"

	"shaperd/leaky"
)

// outlet is how a downstream is doing at one port: behind a range of ports some may have
// nobody, whoever asks for them.
type outlet struct {
	failures  int        // dials and datagrams that failed, one after the other
	since     leaky.Time // of the first of them
	lastError error      // of the last
	ejected   leaky.Time // no sooner does it get connections, unless all are out
	back      leaky.Time // since when it can be reached again
}

// usable reports whether d gets connections to port though others could.
func (d *downstream) usable(port uint16, now leaky.Time) bool {
	if o := d.outlets[port]; o != nil && now < o.ejected {
		return false
	}
	return !d.down
}

// failing returns why d is taken for unreachable, which it is tried in spite of when there
// is no other: it has no address, its checks fail, or the last dials or datagrams to a port
// did, and none to another port has succeeded since.
func (d *downstream) failing() error {
	switch {
	case !d.host.addr().IsValid():
		return errUnresolved
	case d.down:
		return d.lastError
	}
	for _, o := range d.outlets {
		if o.failures >= d.patience() && d.answered <= o.since {
			return o.lastError
		}
	}
	return nil
}

// patience is how many failures make d count as failing.
func (d *downstream) patience() int {
	if n := d.site.config.Load().EjectAfter; n > 0 {
		return n
	}
	return usualPatience
}

// usualPatience is that of listeners that eject nothing.
const usualPatience = 3

// failed notes that d could not be reached at port. When that happens again and again it
// gets no connections there for a while, if there is another downstream.
func (d *downstream) failed(port uint16, err error, now leaky.Time) {
	o := d.outlets[port]
	if o == nil {
		if d.outlets == nil {
			d.outlets = map[uint16]*outlet{}
		}
		o = &outlet{}
		d.outlets[port] = o
	}
	if o.failures == 0 {
		o.since = now
	}
	o.failures++
	o.lastError = err
	if o.failures < d.patience() {
		return
	}
	config := d.site.config.Load()
	if config.EjectAfter == 0 || len(d.site.downstreams) == 1 {
		if o.failures == d.patience() {
			d.tell(slog.LevelWarn, "downstream is failing", port, "failures", o.failures, "err", err)
		}
		return
	}
	out := now < o.ejected
	o.ejected = now + leaky.FromDuration(config.EjectFor)
	if out {
		return
	}
	d.tell(slog.LevelWarn, "downstream ejected", port, "failures", o.failures, "err", err)
	d.leave(now, port)
	d.site.readmit(now)
}

// reached notes that d could be.
func (d *downstream) reached(port uint16, now leaky.Time) {
	d.answered = now
	o := d.outlets[port]
	if o == nil || o.failures == 0 {
		return
	}
	if o.ejected > 0 || o.failures >= d.patience() {
		d.tell(slog.LevelInfo, "downstream reached again", port)
	}
	if o.ejected > 0 {
		o.back = now
	}
	o.failures, o.ejected, o.lastError = 0, 0, nil
	d.site.wakeSoon()
}

// tell logs what became of d at port. It is sampled: whoever asks for the port can bring
// it about.
func (d *downstream) tell(level slog.Level, msg string, port uint16, attrs ...any) {
	attrs = append([]any{"downstream", d.String(), "listener", d.site.name, "port", port}, attrs...)
	d.site.proxy.changes.tell(level, msg, attrs...)
}

// anyPort stands for all ports of a downstream.
const anyPort = 0

// leave ends the UDP flows that go to a port of d: their next datagrams go to another.
func (d *downstream) leave(now leaky.Time, port uint16) {
	for _, f := range d.flows.all() {
		if port == anyPort || f.outlet == port {
			f.close(now)
		}
	}
}

// readmit wakes those that wait when the time out of an outlet is over.
func (s *site) readmit(now leaky.Time) {
	s.wakeSoon()
	next := leaky.Never
	for _, d := range s.downstreams {
		for _, o := range d.outlets {
			if o.ejected > now {
				next = min(next, o.ejected)
			}
		}
	}
	if next != leaky.Never {
		s.readmission.Fire = s.readmit
		s.proxy.loop.pacer.Schedule(&s.readmission, next)
	}
}
