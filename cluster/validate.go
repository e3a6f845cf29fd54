package cluster

import (
	"fmt"
	"regexp"
	"time"
)

// MaxKey is the maximum length of a bucket's key, in bytes.
const MaxKey = 256

var hostPattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,64}$`)

// Validate returns an error if q is no call that a [Host] would make: it came from another program, and
// must not reach a ledger. It bounds what a ledger remembers of a host.
func (q *Request) Validate() error {
	p := &q.Params
	switch {
	case p.Hosts < 1 || p.Hosts > MaxHosts:
		return fmt.Errorf("%d hosts: must be 1 to %d", p.Hosts, MaxHosts)
	case p.Lease < 100*Millisecond || p.Lease > FromDuration(time.Hour):
		return fmt.Errorf("a lease of %v: must be 100ms to 1h", p.Lease.Duration())
	case p.Step < 10*Millisecond || p.Step > FromDuration(time.Hour):
		return fmt.Errorf("a step of %v: must be 10ms to 1h", p.Step.Duration())
	case !hostPattern.MatchString(q.Host):
		return fmt.Errorf("host %.70q: must be 1 to 64 letters, digits, dots, dashes and underscores", q.Host)
	case q.N < 1 || min(q.Start, q.Got, int64(q.GotAge), q.Epoch, q.Known) < 0:
		return fmt.Errorf("a number of the call is negative")
	case len(q.Items) > MaxItems:
		return fmt.Errorf("%d items: must be at most %d", len(q.Items), MaxItems)
	case len(q.Info) > MaxInfo:
		return fmt.Errorf("%d bytes of information about the host: must be at most %d", len(q.Info), MaxInfo)
	case len(q.Gone) > p.Hosts:
		return fmt.Errorf("%d hosts are gone, of %d", len(q.Gone), p.Hosts)
	}
	for _, it := range q.Items {
		if it.Key == "" || len(it.Key) > MaxKey {
			return fmt.Errorf("a key of %d bytes: must be 1 to %d", len(it.Key), MaxKey)
		}
		if min(it.Has, it.Want, it.Weight) < 0 || max(it.Has, it.Want) > Whole || it.Weight > MaxWeight {
			return fmt.Errorf("bucket %q: has %d, wants %d with weight %d: must be parts of %d, and at most %d", it.Key, it.Has, it.Want, it.Weight, Whole, MaxWeight)
		}
	}
	for _, g := range q.Gone {
		if !hostPattern.MatchString(g.Host) {
			return fmt.Errorf("host %.70q, which is gone: must be 1 to 64 letters, digits, dots, dashes and underscores", g.Host)
		}
	}
	return nil
}
