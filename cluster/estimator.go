package cluster

// Estimator decides what a host wants of each bucket, from what has left and what waits. A bucket that
// something waits for is wanted whole: what a TCP sender would send is not known while it is held up.
// Of any other it wants what it used of late and some headroom, less of it where there is not enough
// for all.
//
// It is not safe for concurrent use.
type Estimator struct {
	host        *Host
	interval    Time
	usage       map[string]*usage
	windowBegin Time
	retry       Retry
}

// usage is what a host uses of one bucket.
type usage struct {
	sampledAt    Time
	pending      float64 // parts x time, not in samples yet
	pendingSince Time
	sum          float64    // parts x time, in the current window
	peaks        [3]float64 // parts, in the last windows
	samples      [2]float64 // parts, in the last samples
	waiting      int64      // sources
	want         int64      // as the ledger was told, and when
	weight       int64
	toldAt       Time
	asked        bool // since something began to wait
}

const (
	shortSample = 10 * Millisecond
	idleAfter   = 30 * Second // a bucket without samples for so long is not in use
	askAgain    = Second      // for what a host that is gone without a word had
)

// NewEstimator returns an estimator of what h wants, which calls about once in an interval.
func NewEstimator(h *Host, interval, now Time) *Estimator {
	return &Estimator{host: h, interval: interval, usage: map[string]*usage{}, windowBegin: now}
}

// SetInterval replaces the interval between calls.
func (e *Estimator) SetInterval(interval Time) { e.interval = interval }

// Sample records that since the last sample of a bucket, units have left that take used at its whole
// rate, and that sources wait for it now.
func (e *Estimator) Sample(now Time, key string, used Time, waiting int64) {
	u := e.usage[key]
	if u == nil {
		u = &usage{pendingSince: e.windowBegin}
		e.usage[key] = u
	}
	parts := float64(used) * float64(Whole)
	u.sum += parts
	u.pending += parts
	if span := now - u.pendingSince; span >= shortSample {
		u.samples = [2]float64{u.samples[1], u.pending / float64(span)}
		u.pending, u.pendingSince = 0, now
	}
	u.sampledAt, u.waiting = now, waiting
	if waiting == 0 {
		u.asked = false
	}
}

// InUse reports whether a bucket was used, or waited for, of late.
func (e *Estimator) InUse(key string) bool { return e.usage[key] != nil }

// EndWindow ends a window, of one interval between calls, and tells the host what has changed.
func (e *Estimator) EndWindow(now Time) {
	span := float64(max(now-e.windowBegin, Millisecond))
	for key, u := range e.usage {
		if now-u.sampledAt > idleAfter {
			e.tell(now, key, u, 0, true)
			delete(e.usage, key)
			continue
		}
		u.peaks = [3]float64{u.peaks[1], u.peaks[2], u.sum / span}
		u.sum = 0
		switch {
		case u.waiting == 0:
			e.tell(now, key, u, e.headroom(key, u), e.isTight(key))
		case abs(u.waiting-u.weight) > u.weight/4 || now-u.toldAt > askAgain:
			u.weight, u.toldAt = u.waiting, now
			e.host.Want(key, u.want, u.weight)
		}
	}
	e.windowBegin = now
}

// headroom returns what to want of a bucket that nothing waits for.
func (e *Estimator) headroom(key string, u *usage) int64 {
	peak := max(u.peaks[0], u.peaks[1], u.peaks[2])
	if e.isTight(key) {
		return int64(1.02*peak + e.least()/4)
	}
	return int64(1.25*peak + e.least())
}

// least is what is wanted of a bucket that was used of late, for the first unit to find.
func (e *Estimator) least() float64 { return float64(e.host.floor()) / 16 }

func (e *Estimator) isTight(key string) bool {
	b := e.host.hot[key]
	return b != nil && b.tight
}

// Urgent tells the host what cannot wait for the end of the window, and reports whether it should call
// at once.
func (e *Estimator) Urgent(now Time) (call bool) {
	waits, short := false, false
	for key, u := range e.usage {
		parts, hot := e.host.Parts(key)
		switch {
		case u.waiting > 0 && parts < Whole && !u.asked:
			u.asked, call = true, true
			e.tell(now, key, u, Whole, false)
		case u.waiting > 0 && parts < Whole:
			waits, short = true, short || e.isShort(key)
		case u.waiting == 0 && hot && e.isTight(key) && float64(parts) > 1.5*u.recent()+float64(e.host.floor())/10:
			before := u.want
			u.sum, u.peaks = 0, [3]float64{} // or the end of the window would ask for it again
			e.tell(now, key, u, int64(1.1*u.recent()+e.least()/4), true)
			call = call || u.want != before
		}
	}
	return e.retry.Due(now, e.interval, waits, short) || call
}

// NextUrgent returns when Urgent is to be called again.
func (e *Estimator) NextUrgent() Time { return e.retry.Next() }

// isShort reports whether the ledger has less to give of a bucket than the host should get.
func (e *Estimator) isShort(key string) bool {
	b := e.host.hot[key]
	return b == nil || b.short || !e.host.leased || !e.host.counted
}

// tell tells the host that the parts of a bucket that it would use are want, if that is news. With
// giveBack it stops using what is more at once, not when the ledger says so.
func (e *Estimator) tell(now Time, key string, u *usage, want int64, giveBack bool) {
	if e.host.hot[key] == nil && want <= e.host.floor()*9/10 && u.want == 0 {
		return // cold: the floor is enough, and nobody need know
	}
	live := int64(max(1, e.host.live))
	want = min(want*int64(e.host.Params.Hosts)/live, Whole)
	if abs(want-u.want) <= u.want/10 {
		return
	}
	weight := max(1, u.waiting)
	if !e.host.Want(key, want, weight) {
		u.asked = false
		return
	}
	u.want, u.weight, u.toldAt = want, weight, now
	if giveBack {
		e.host.Lower(key, want)
	}
}

func (u *usage) recent() float64 { return max(u.samples[0], u.samples[1]) }

func abs(n int64) int64 { return max(n, -n) }
