package shaper

import "slices"

// Reserve is a part of the slots and of the rates of a limit that is reserved for a class.
type Reserve struct {
	Class   string
	Percent int // of each bucket, 1 to 100; slots are rounded down, but are at least one
}

// ReservedFor returns the percentage of l that is reserved for a class.
func (l *Limit) ReservedFor(class string) int {
	for i := range l.Reserve {
		if l.Reserve[i].Class == class {
			return l.Reserve[i].Percent
		}
	}
	return 0
}

// validateReserve reports what is wrong with Reserve.
func (l *Limit) validateReserve(classes []TrafficClass, bad func(key, format string, args ...any)) {
	if len(l.Reserve) == 0 {
		return
	}
	switch {
	case l.InPacketPlane():
		bad("reserve", "unsupported at attachments, where nothing waits for a slot")
	case l.MaxConnections == 0 && !l.HasRate():
		bad("reserve", "needs max_connections, rate or packets, of which it is a part")
	case l.HasRate() && l.Scheduling == ScheduleFIFO:
		bad("reserve", "unsupported with scheduling \"fifo\", where all leave in order of arrival")
	case l.Shared:
		bad("reserve", "unsupported with shared: hosts lend each other parts for any class")
	case l.Adapt != AdaptOff:
		bad("reserve", "unsupported with adapt, whose maximum varies")
	case l.MaxConnections > 0 && (l.QueueTimeout == 0 || l.MaxQueue == 0):
		bad("reserve", "needs max_queue and queue_timeout: only a waiting connection reclaims a lent slot")
	}
	sum := 0
	for i, r := range l.Reserve {
		key := "reserve." + r.Class
		switch {
		case r.Class != DefaultClass && !slices.ContainsFunc(classes, func(c TrafficClass) bool { return c.Name == r.Class }):
			bad(key, "unknown class %q", r.Class)
		case slices.ContainsFunc(l.Reserve[:i], func(o Reserve) bool { return o.Class == r.Class }):
			bad(key, "duplicate")
		case r.Percent < 1 || r.Percent > 100:
			bad(key, "%d%%: must be from 1%% to 100%%", r.Percent)
		}
		sum += r.Percent
	}
	if sum > 100 {
		bad("reserve", "%d%% in all: must be at most 100%%", sum)
	}
}

// Unreserved returns a class for which a part of MaxConnections is reserved that is no slot, and the part in percent, or "".
func (l *Limit) Unreserved() (class string, percent int) {
	for _, r := range l.Reserve {
		if l.MaxConnections > 0 && l.MaxConnections*r.Percent < 100 {
			return r.Class, r.Percent
		}
	}
	return "", 0
}
