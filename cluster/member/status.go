package member

import (
	"context"
	"errors"
	"time"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// Counters count the calls of a member since its start.
type Counters struct {
	Answered, Refused, Failed, TimedOut uint64
	Epochs                              uint64 // changes of the epoch
	Alone                               time.Duration
	Took                                [len(TookBounds) + 1]uint64
	TookSum                             time.Duration // of answered calls
}

// TookBounds are the upper bounds of Counters.Took.
var TookBounds = [...]time.Duration{
	250 * time.Microsecond, 500 * time.Microsecond, time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond,
	10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond,
}

func (c *Counters) add(r reply) {
	switch {
	case errors.Is(r.err, context.DeadlineExceeded):
		c.TimedOut++
	case r.err != nil:
		c.Failed++
	case r.Refused != cluster.NotRefused:
		c.Refused++
	default:
		c.Answered++
		i := 0
		for i < len(TookBounds) && r.took > TookBounds[i] {
			i++
		}
		c.Took[i]++
		c.TookSum += r.took
	}
}

// Status is what a member knows, and what it has done.
type Status struct {
	cluster.MemberStatus
	Counters  Counters
	Lease     shaper.Lease // of the planes
	At        leaky.Time   // by their clock: when the status was taken
	LastError string       // of the last call; "" if it was answered
	Server    string       // host:port of the store's server that answered last; "" if none has
}

// Status returns the current status. It reports false if m has ended.
func (m *Member) Status(ctx context.Context) (s Status, ok bool) {
	ok = m.do(ctx, func() {
		s.MemberStatus = m.host.Status(m.Clock())
		s.Counters, s.Lease, s.At = m.counters, m.planeLease(m.lease), m.Now()
		s.Server = m.server
		if m.lastError != nil {
			s.LastError = m.lastError.Error()
		}
	})
	return s, ok
}

// logStore logs that the store does not answer any more, or does again.
func (m *Member) logStore(err error) {
	if err != nil {
		m.Log.Warn("the store of shared limits does not answer; existing shares end with the lease", "err", err)
		return
	}
	m.Log.Info("the store of shared limits answers")
}

// logEpoch logs that the ledger has forgotten what hosts had.
func (m *Member) logEpoch(epoch int64) {
	if epoch == m.lastEpoch {
		return
	}
	if m.lastEpoch != 0 {
		m.counters.Epochs++
		m.Log.Warn("the store of shared limits has started over: its state was lost, its clock was set, or nobody reached it for a while; hosts claim their shares again")
	}
	m.lastEpoch = epoch
}
