package cluster

import "math"

// Retry decides when a host that waits for more calls again, instead of after an interval.
type Retry struct {
	at    Time // of the next call
	gap   Time
	waits bool
}

// Due reports whether a host should call at now, of which something waits. While the ledger has less to
// give than the host should get, it calls soon at first, and then less and less often.
func (r *Retry) Due(now, interval Time, waits, short bool) bool {
	switch {
	case !short:
		r.gap = interval / 5
	case now >= r.at:
		r.gap = min(r.gap*5/4, interval)
	}
	if r.waits = waits; !waits || now < r.at {
		return false
	}
	r.at = now + interval/2
	if short {
		r.at = now + r.gap
	}
	return true
}

// Next returns when Due may report true, if the host has nothing else to do until then.
func (r *Retry) Next() Time {
	if !r.waits {
		return math.MaxInt64
	}
	return r.at
}
