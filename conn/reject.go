// Owner: the loop's thread, once Apply has opened the sockets.

package conn

import (
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/time/rate"

	"shaperd.dev/shaperd/conn/internal/sock"
	"shaperd.dev/shaperd/shaper"
)

// rejecter sends "port unreachable" (RFC 792, RFC 4443) to the sources of refused datagrams,
// so that they need not wait for a reply.
type rejecter struct {
	icmp    *sock.ICMP
	limiter *rate.Limiter
}

// The defaults of Linux for its own ICMP messages, icmp_msgs_per_sec and icmp_msgs_burst. The
// sources may be forged.
const (
	rejectRate  = 1000
	rejectBurst = 50
)

// needsRejecter reports whether a limit of policy needs a rejecter.
func needsRejecter(policy *shaper.Policy) bool {
	for i := range policy.Len() {
		if l := policy.Limit(i); l.RefuseWith == shaper.RefuseReject && !l.Observe {
			return true
		}
	}
	return false
}

func newRejecter() (*rejecter, error) {
	c, err := sock.NewICMP()
	if err != nil {
		return nil, fmt.Errorf("refuse_with = \"reject\" needs CAP_NET_RAW: %w", err)
	}
	return &rejecter{icmp: c, limiter: rate.NewLimiter(rejectRate, rejectBurst)}, nil
}

// reject answers a datagram of n bytes, from key.client to key.local at port, with "port
// unreachable".
func (p *Proxy) reject(key *flowKey, port uint16, n int) {
	r := p.rejecter.Load()
	if r == nil || !key.local.IsValid() || key.client.Addr().IsUnspecified() || !r.limiter.AllowN(time.Now(), 1) {
		return
	}
	r.icmp.SendPortUnreachable(key.client, key.scope, netip.AddrPortFrom(key.local, port), n)
}
