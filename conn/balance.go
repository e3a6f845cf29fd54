// Owner: the loop's thread.

package conn

import (
	"hash/fnv"
	"io"
	"math"
	"net/netip"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// target is what a new connection asks for: any downstream, at a port.
type target struct {
	source   netip.Addr
	port     uint16 // at the listener
	samePort bool   // port takes precedence over the downstream's own
}

// portOn returns the port of d that t leads to.
func (t target) portOn(d *downstream) uint16 { return d.PortFor(t.port, t.samePort) }

// suits reports whether d has not failed, has an address, and has the family of the source if that is
// to be seen by d.
func (d *downstream) suits(to target, failed []*downstream) bool {
	return !slices.Contains(failed, d) && d.host.addr().IsValid() &&
		(!d.listener.config.Load().Transparent || to.source.Is4() == d.host.addr().Is4())
}

// pick returns a downstream for a connection to target to, except those in failed.
// Unavailable ones are tried only when all are unavailable, and those of which the breaker is open never. Without
// candidates it returns nil, and whether the connection shall wait: for one that is full or drained, or shut off while
// on_down is "hold".
func (ln *listener) pick(to target, failed []*downstream, now leaky.Time) (_ *downstream, full bool) {
	list, full := ln.eligible(to, failed, now)
	if len(list) == 0 {
		return nil, full
	}
	return ln.choose(list, to, now), false
}

// eligible returns the candidates of pick. The list is valid until the next call.
func (ln *listener) eligible(to target, failed []*downstream, now leaky.Time) (_ []*downstream, full bool) {
	ln.candidates = ln.candidates[:0]
	wait, refuse := false, false
	for _, unavailable := range [...]bool{false, true} {
		for _, d := range ln.downstreams {
			if d.available(to.portOn(d), now) == unavailable || !d.suits(to, failed) {
				continue
			}
			switch {
			case d.drained:
				wait = true
			case d.shutOff(now):
				hold := ln.config.Load().OnDown == shaper.DownHold
				wait, refuse = wait || hold, refuse || !hold
			case d.hasCapacity(now):
				ln.candidates = append(ln.candidates, d)
			default:
				full = true
			}
		}
		if len(ln.candidates) > 0 {
			return ln.candidates, false
		}
		if full {
			return nil, true
		}
	}
	return nil, wait && !refuse
}

// fullDownstreams returns the full downstreams that could take a connection to to if they had one
// less. Those that are unavailable are only considered if all are.
func (ln *listener) fullDownstreams(to target, failed []*downstream, now leaky.Time) (full []*downstream) {
	for _, usable := range [...]bool{true, false} {
		found := false
		for _, d := range ln.downstreams {
			if d.available(to.portOn(d), now) != usable || d.drained || !d.suits(to, failed) {
				continue
			}
			found = true
			if d.MaxConnections > 0 && d.inFlight >= d.capacity(now) {
				full = append(full, d)
			}
		}
		if found {
			break
		}
	}
	return full
}

func (ln *listener) choose(list []*downstream, to target, now leaky.Time) *downstream {
	if len(list) == 1 {
		return list[0]
	}
	best := list[0]
	switch ln.config.Load().Balance {
	case shaper.SourceHash:
		// Rendezvous hashing (Thaler and Ravishankar, 1998), with weights: when a downstream
		// goes away, only its sources move.
		highest := math.Inf(-1)
		for _, d := range list {
			u := (float64(hashSource(to.source, d.Name())>>11) + 0.5) / (1 << 53)
			if score := -float64(d.effectiveWeight(to.portOn(d), now)) / math.Log(u); score > highest {
				best, highest = d, score
			}
		}
		return best
	case shaper.LeastConnections:
		highest := int64(math.MinInt64)
		least := list[:0]
		for _, d := range list {
			switch spare := -int64(d.inFlight+1) * 1e9 / d.effectiveWeight(to.portOn(d), now); {
			case spare > highest:
				highest, least = spare, append(least[:0], d)
			case spare == highest:
				least = append(least, d)
			}
		}
		list = least
	}
	// Smooth weighted round robin, as in nginx: a downstream of weight 5 does not get five
	// connections in a row.
	var sum int64
	best = list[0]
	for _, d := range list {
		w := d.effectiveWeight(to.portOn(d), now)
		d.currentWeight += w
		sum += w
		if d.currentWeight > best.currentWeight {
			best = d
		}
	}
	best.currentWeight -= sum
	return best
}

// effectiveWeight returns d's weight at a port, in thousandths. It is below the configured
// weight during slow start.
func (d *downstream) effectiveWeight(port uint16, now leaky.Time) int64 {
	const scale = 1000
	w := int64(max(d.Weight, 1)) * scale
	recovered := d.recoveredAt
	if h := d.ports[port]; h != nil {
		recovered = max(recovered, h.recoveredAt)
	}
	if slow := leaky.FromDuration(d.listener.config.Load().SlowStart); recovered > 0 && now < recovered+slow {
		w = max(w/10, int64(float64(w)*float64(now.Sub(recovered))/float64(slow)))
	}
	return w
}

// hashSource returns FNV-1a with a final mix. It is the same on all hosts.
func hashSource(source netip.Addr, name string) uint64 {
	sum := fnv.New64a()
	addr := source.As16()
	sum.Write(addr[:])
	io.WriteString(sum, name)
	h := sum.Sum64()
	h ^= h >> 32
	h *= 0xd6e8feb86659fd93
	return h ^ h>>32
}
