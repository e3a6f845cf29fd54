// Owner: the loop's thread.

package conn

import (
	"sort"
	"strconv"
	"time"

	proxyproto "github.com/pires/go-proxyproto"

	"shaperd.dev/shaperd/leaky"
)

// Types of the TLVs that tell a downstream how a connection stands with its limits, in the range for custom ones. Their
// values are decimal numbers as text, and the name of its class.
const (
	tlvLimit     proxyproto.PP2Type = 0xE0
	tlvRemaining proxyproto.PP2Type = 0xE1
	tlvReset     proxyproto.PP2Type = 0xE2 // in seconds
	tlvClass     proxyproto.PP2Type = 0xE3
)

// standing is what a limit leaves those who share a bucket with a connection that it has admitted, in connections.
type standing struct {
	limit     uint64 // that there may be in flight, or come at once after a pause
	remaining uint64 // of these, now
	reset     time.Duration
	refills   bool // after reset remaining is limit again; when slots are free is not known
}

// standing returns that of the enforced limit which leaves the fewest, the most specific of several; false if no limit
// counts s.
func (s *session) standing(now leaky.Time) (least standing, ok bool) {
	for _, gt := range s.waiter.held {
		if gt.limit.Observe || gt.pool != nil {
			continue
		}
		for _, st := range gt.standings(now) {
			if !ok || st.remaining < least.remaining {
				least, ok = st, true
			}
		}
	}
	return least, ok
}

// standings returns those by the cap and by the rate of gt.
func (gt *gate) standings(now leaky.Time) (all []standing) {
	if gt.slots != noCap {
		all = append(all, standing{limit: uint64(gt.slots), remaining: uint64(max(gt.slots-gt.inFlight, 0))})
	}
	l := gt.limit
	switch {
	case l.NewConnections.N == 0:
	case gt.history != nil:
		n := l.NewConnections.N
		all = append(all, standing{limit: n, remaining: n - min(gt.history.Used(now), n), reset: gt.history.EmptyAt().Sub(now).Duration(), refills: true})
	default:
		n := max(l.BurstConnections, 1)
		if gt.shape.Window > 0 {
			n = l.NewConnections.N
		}
		left := sort.Search(int(n), func(before int) bool { return gt.nextAdmission(before, now) > now })
		bucket, share := gt.current(now)
		all = append(all, standing{limit: n, remaining: uint64(left), reset: bucket.RefillsAt(&share.Shape, now).Sub(now).Duration(), refills: true})
	}
	return all
}

// standingTLVs returns the standing of s as it is sent, nothing if no limit counts it, and its class, if there are any.
func (s *session) standingTLVs(now leaky.Time) (all []proxyproto.TLV) {
	if s.waiter.policy != nil && s.waiter.policy.Classes() > 1 {
		all = append(all, proxyproto.TLV{Type: tlvClass, Value: []byte(s.waiter.precedence.name())})
	}
	st, ok := s.standing(now)
	if !ok {
		return all
	}
	number := func(kind proxyproto.PP2Type, n uint64) proxyproto.TLV {
		return proxyproto.TLV{Type: kind, Value: strconv.AppendUint(nil, n, 10)}
	}
	all = append(all, number(tlvLimit, st.limit), number(tlvRemaining, st.remaining))
	if st.refills {
		all = append(all, number(tlvReset, uint64((st.reset+time.Second-1)/time.Second)))
	}
	return all
}
