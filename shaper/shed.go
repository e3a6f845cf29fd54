package shaper

import "time"

// Shed makes a limit refuse a growing part of the new connections that it matches while this host, or the downstream
// behind another limit, is short of something. Percentages are 1 to 100; 0 is not looked at.
type Shed struct {
	CPU         int           // percent of the processors' time, of the host or the control group's quota
	Memory      int           // percent of the memory of the control group, or of the host
	Pressure    int           // percent of the time in which something waits for a processor or for memory
	Late        time.Duration // in which the loop must answer; 0 is not looked at
	Descriptors int           // percent of those that the process may open
	Limit       string        // name of a limit that caps connections with one bucket at listeners, or ""
	Above       int           // percent of its maximum in flight
	Order       int           // 1 to MaxShedOrder: limits of the next order begin when those of this one refuse all
}

// MaxShedOrder is the maximum of [Shed.Order].
const MaxShedOrder = 16

// ShedRetryAfter is what a connection that was shed is told: when to come back.
const ShedRetryAfter = 10 * time.Second

// Any reports whether anything is looked at.
func (s *Shed) Any() bool {
	return s.CPU > 0 || s.Memory > 0 || s.Pressure > 0 || s.Late > 0 || s.Descriptors > 0 || s.Limit != ""
}

// validateShed reports what keeps l from shedding.
func (l *Limit) validateShed(limits []Limit, bad func(key, format string, args ...any)) {
	s := &l.Shed
	if l.InPacketPlane() {
		bad("shed", "unsupported at attachments")
	}
	for _, percent := range []struct {
		key   string
		value int
	}{{"shed.cpu", s.CPU}, {"shed.memory", s.Memory}, {"shed.pressure", s.Pressure}, {"shed.descriptors", s.Descriptors}, {"shed.above", s.Above}} {
		if percent.value < 0 || percent.value > 100 {
			bad(percent.key, "%d%%: must be from 1%% to 100%%", percent.value)
		}
	}
	if s.Late < 0 {
		bad("shed.late", "%v: must not be negative", s.Late)
	}
	if s.Order < 1 || s.Order > MaxShedOrder {
		bad("shed.order", "%d: must be from 1 to %d", s.Order, MaxShedOrder)
	}
	if s.Limit == "" {
		return
	}
	if s.Above < 1 {
		bad("shed.above", "missing: the part of the maximum of limit %q", s.Limit)
	}
	for i := range limits {
		if other := &limits[i]; other.Name == s.Limit {
			if other.MaxConnections == 0 || other.Key != 0 || other.InPacketPlane() {
				bad("shed.limit", "limit %q needs max_connections, without a key, at listeners", s.Limit)
			}
			return
		}
	}
	bad("shed.limit", "unknown limit %q", s.Limit)
}

// ShedStatus is how much a limit sheds, and why.
type ShedStatus struct {
	Share   float64 // of new connections that are refused, 0 to 1
	Signals []ShedSignal
}

// ShedSignal is what a limit that sheds looks at.
type ShedSignal struct {
	Name         string  // "cpu", "memory", "pressure", "late", "descriptors" or "limit"
	Limit        string  // name of the limit, with "limit"
	Value, Above float64 // parts of the whole, or seconds for "late"
	Err          string  // why it cannot be read: then it sheds nothing
}
