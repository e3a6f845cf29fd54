package member

import (
	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/shaper"
)

// slotDemands tells the host what it wants of pools of slots. It is to these what a [cluster.Estimator] is
// to rates, except that the planes know what they need of a pool.
type slotDemands struct {
	host  *cluster.Host
	pools map[string]*slotDemand
	retry cluster.Retry
}

// slotDemand is what this host needs of one pool.
type slotDemand struct {
	shaper.Demand              // in the last sample; 0 if it was not in that
	key           shaper.Key   // in the last sample that had it
	seenAt        cluster.Time // when it was last in a sample, or became hot
	told          int64        // that the host wants
	asked         bool         // since connections began to wait
	turn          turn
	settled       bool // what the host has beyond what it wants was given back, since the pool became hot
}

// forgetAfter is how long a pool that no sample has had is known.
const forgetAfter = 30 * cluster.Second

func newSlotDemands(h *cluster.Host) *slotDemands {
	return &slotDemands{host: h, pools: map[string]*slotDemand{}}
}

// begin begins a sample.
func (s *slotDemands) begin() {
	for _, u := range s.pools {
		u.Demand = shaper.Demand{}
	}
}

// add adds what a plane needs of a pool to the sample. If more is in use than a host may have of a cold pool, it is
// told with the next call: the connections were in flight before the host started, and the ledger keeps only as much
// for a host that has told nothing.
func (s *slotDemands) add(now cluster.Time, name string, d shaper.Demand) {
	u := s.know(now, name)
	u.Demand, u.key = d, d.Key
	u.asked = u.asked && d.Waiting > 0
	if b := s.host.Share(name, now); !b.Hot && u.told == 0 && int64(d.Held) > s.host.Params.SlotsFloor() {
		s.tell(name, u, u.wants(now, b))
	}
}

// know returns a pool that is hot, or in a sample.
func (s *slotDemands) know(now cluster.Time, name string) *slotDemand {
	u := s.pools[name]
	if u == nil {
		u = &slotDemand{}
		s.pools[name] = u
	}
	u.seenAt = now
	return u
}

// nameOf returns the name that the pool of a key had in a sample before, or "".
func (s *slotDemands) nameOf(k shaper.Key) string {
	for name, u := range s.pools {
		if u.key == k {
			return name
		}
	}
	return ""
}

// held returns the parts of a pool that were in use in the last sample.
func (s *slotDemands) held(name string) int64 {
	if u := s.pools[name]; u != nil {
		return int64(u.Held)
	}
	return 0
}

// wants returns what the host wants of a pool, of which it has b. What it wants for connections that may come it
// leaves to others that need it.
func (u *slotDemand) wants(now cluster.Time, b cluster.ShareStatus) int64 {
	want := int64(u.Want)
	if !b.Tight {
		want = min(want+int64(u.Spare), cluster.Whole)
	}
	if u.turn.away(now) {
		want = min(want, int64(u.Fit))
	}
	return want
}

// fraction reports whether some of the parts that the host has, and would use, are too few for a slot. Of a large
// pool that does not matter.
func (u *slotDemand) fraction(b cluster.ShareStatus) bool {
	return b.Hot && b.Tight && !b.Short && u.Waiting > 0 && b.Parts > int64(u.Fit) && int64(u.Next-u.Fit) > cluster.Whole/64
}

// next returns the parts with which connections that wait would have one slot more; 0 if none waits.
func (u *slotDemand) next() int64 {
	if u.Waiting == 0 {
		return 0
	}
	return int64(u.Next)
}

// settle gives back what the host has of pools that have just become hot, and does not want. It reports
// whether that is anything.
func (s *slotDemands) settle(now cluster.Time) (any bool) {
	for name, u := range s.pools {
		b := s.host.Share(name, now)
		if want := u.wants(now, b); b.Hot && !u.settled && want < b.Parts {
			any = true
			s.host.Lower(name, want)
		}
		u.settled = b.Hot
	}
	return any
}

// endWindow tells the host what has changed.
func (s *slotDemands) endWindow(now cluster.Time) {
	for name, u := range s.pools {
		if now-u.seenAt > forgetAfter {
			s.host.Want(name, 0, 1)
			delete(s.pools, name)
			continue
		}
		b := s.host.Share(name, now)
		want := u.wants(now, b)
		cold := !b.Hot && u.told == 0 && want <= b.Parts // that is enough, and nobody need know
		if !cold && (want > u.told || want < u.told-u.told/10) {
			s.tell(name, u, want)
		}
		if b.Hot && want < b.Parts-b.Parts/10 {
			s.host.Lower(name, want)
		}
	}
}

func (s *slotDemands) tell(name string, u *slotDemand, want int64) {
	weight := u.turn.weight(u.Waiting)
	if int64(u.Held) > s.host.Params.SlotsFloor() {
		s.host.WantInUse(name, want, weight)
	} else if !s.host.Want(name, want, weight) {
		u.asked = false
		return
	}
	u.told = want
}

// urgent tells the host what cannot wait for the end of the window, and reports whether it should call at
// once.
func (s *slotDemands) urgent(now, interval cluster.Time) (call bool) {
	var waits []string
	short := false
	for name, u := range s.pools {
		b := s.host.Share(name, now)
		changed := u.turn.observe(now, b.Parts, int64(u.Fit), u.next(), u.fraction(b))
		switch {
		case changed && u.turn.away(now):
			call = true
			s.tell(name, u, u.wants(now, b))
			s.host.Lower(name, u.wants(now, b))
		case u.Waiting == 0 || b.Parts == cluster.Whole || u.turn.away(now):
		case !u.asked || changed:
			u.asked, call = true, true
			s.tell(name, u, u.wants(now, b))
		default:
			waits, short = append(waits, name), short || b.Short || !b.Hot || !s.host.Joined()
		}
	}
	if !s.retry.Due(now, interval, len(waits) > 0, short) {
		return call
	}
	for _, name := range waits {
		u := s.pools[name]
		s.tell(name, u, u.wants(now, s.host.Share(name, now)))
	}
	return true
}
