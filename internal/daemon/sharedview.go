package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/cluster/member"
	"shaperd.dev/shaperd/control"
	"shaperd.dev/shaperd/control/metrics"
	"shaperd.dev/shaperd/internal/sharing"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// sharedTimeout bounds how long a reader waits for the group.
const sharedTimeout = 2 * time.Second

// Shared returns what this host knows of its group, and what it may use of shared limits. It does not ask the
// ledger.
func (s *server) Shared() api.Shared {
	shared, _ := s.shared()
	return shared
}

// SharedMetrics returns the same with the counters of the calls to the ledger.
func (s *server) SharedMetrics() metrics.Shared {
	shared, c := s.shared()
	m := metrics.Shared{Shared: shared}
	if len(shared.Stores) > 0 {
		m.Calls = map[string]uint64{"answered": c.Answered, "refused": c.Refused, "failed": c.Failed, "timed-out": c.TimedOut}
		m.Epochs, m.Alone, m.TookBounds, m.Took, m.TookSum = c.Epochs, c.Alone, member.TookBounds[:], c.Took[:], c.TookSum
	}
	return m
}

// shared returns what this host knows of its group, and counts of its calls.
func (s *server) shared() (out api.Shared, counters member.Counters) {
	l, _ := s.current()
	c, p := &l.Config.Shared, s.shaper.Policy()
	out = newShared(c)
	if c.Hosts == 0 {
		return out, counters
	}
	known := sharedNames{s.shaper, sharing.Params(c)}
	names := unkeyedShares(known, p)
	lease, at := shaper.Lease{}, leaky.Time(0)
	cold, shares := int64(0), make([]cluster.ShareStatus, len(names))
	if out.State == sharedStatic {
		lease = staticLease(c.Hosts)
		cold = int64(lease.Cold)
	}
	for i, name := range names {
		shares[i] = cluster.ShareStatus{Key: name, Parts: cold}
	}
	if m := s.group.current.Load(); m != nil {
		ctx, cancel := context.WithTimeout(context.Background(), sharedTimeout)
		defer cancel()
		status, known := m.Status(ctx)
		ofNames, alsoKnown := m.Shares(ctx, names...)
		if known && alsoKnown {
			describeMember(&out, c, &status)
			lease, at, cold, shares, counters = status.Lease, status.At, status.Cold, ofNames, status.Counters
			for _, h := range status.Shares {
				if !slices.Contains(names, h.Key) {
					shares = append(shares, h)
				}
			}
		}
	}
	slots := func(pool shaper.SlotPool, parts int64) int { return lease.Slots(pool, uint32(parts), at) }
	describeLimits(&out, known, p, cold, int64(lease.SlotsCold), shares, slots)
	return out, counters
}

// AddLedger adds what the ledger knows of the group to what [server.Shared] returned, and the problems that
// only it tells. It asks the store at most once a second, and not while that does not answer calls.
func (s *server) AddLedger(to *api.Shared) {
	l, _ := s.current()
	m := s.group.current.Load()
	switch {
	case m == nil:
	case to.StoreError != "":
		to.LedgerError = to.StoreError
	default:
		shot, err := s.group.ledger.get(m, bucketNames(to))
		if err != nil {
			to.LedgerError = err.Error()
			break
		}
		describeLedger(to, &shot, l.Config.SharedLimits(), l.Config.SharedDigest())
		describeHolders(to, &shot, slotPools(s.shaper.Policy(), to.Hosts))
	}
	to.Problems = append(to.Problems, disagreements(to)...)
	slices.SortStableFunc(to.Problems, func(a, b api.Problem) int { return cmp.Compare(a.Severity, b.Severity) })
}

// ledgerCache has the last snapshot of the ledger, for all readers.
type ledgerCache struct {
	mu   sync.Mutex
	of   *member.Member
	at   time.Time
	shot cluster.Snapshot
	err  error
}

// snapshotAge is how old a snapshot may be.
const snapshotAge = time.Second

// get returns what the ledger knows, of buckets those with keys. A snapshot that others have asked for may lack
// some.
func (c *ledgerCache) get(m *member.Member, keys []string) (cluster.Snapshot, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of != m || time.Since(c.at) >= snapshotAge {
		ctx, cancel := context.WithTimeout(context.Background(), sharedTimeout)
		defer cancel()
		c.shot, c.err = m.Snapshot(ctx, keys...)
		c.of, c.at = m, time.Now()
	}
	return c.shot, c.err
}

// ForgetHost tells the ledger that a host of the group is gone for good, so that the others may use its part, or with
// failover = "strict" another host may take its place.
func (s *server) ForgetHost(ctx context.Context, host string) error {
	m := s.group.current.Load()
	if m == nil {
		return &refusedError{errors.New("there is no ledger: [shared] has no store")}
	}
	l, _ := s.current()
	if host == sharing.HostName(&l.Config.Shared) {
		return &refusedError{fmt.Errorf("%s is this host itself: stop it, and forget it at another one", host)}
	}
	done, err := m.Forget(ctx, host)
	if err != nil {
		return fmt.Errorf("tell the ledger: %w", err)
	}
	if !done {
		shot, err := m.Snapshot(ctx, "-") // no bucket has this name
		if err != nil {
			shot = cluster.Snapshot{}
		}
		return &refusedError{errors.New(whyKept(&shot, host))}
	}
	s.log.Warn("host of the group forgotten by operator", append([]any{"host", host}, control.CallerAttrs(ctx)...)...)
	return nil
}

// whyKept says why the ledger does not forget a host, as far as a snapshot that was taken afterwards tells.
func whyKept(shot *cluster.Snapshot, host string) string {
	var known []string
	at := slices.IndexFunc(shot.Hosts, func(h cluster.HostStatus) bool { return h.Name == host })
	for i := range shot.Hosts {
		known = append(known, shot.Hosts[i].Name)
	}
	for _, g := range shot.Gone {
		known = append(known, g.Host)
	}
	slices.Sort(known)
	switch expiry := 2*shot.Params.Lease + shot.Params.Step; {
	case at >= 0 && shot.Hosts[at].Age < expiry:
		return fmt.Sprintf("%s called %s: stop it first, and try again after %s", host, ago(shot.Hosts[at].Age.Duration()), roughly(expiry.Duration()))
	case shot.Epoch != 0 && !shot.Settled:
		return fmt.Sprintf("the ledger began %s and does not know yet what all hosts use: try again after %s", ago(shot.Age.Duration()), roughly(expiry.Duration()))
	case len(known) >= shot.Params.Hosts && len(known) > 0 && !slices.Contains(known, host):
		return fmt.Sprintf("there is no host %q in this group: known are %s", host, strings.Join(known, ", "))
	}
	return fmt.Sprintf("the ledger keeps the part of %q: it has called lately, or may have while the ledger was another one, or all hosts "+
		"that may exist are others; \"shaperd shared status\" lists them", host)
}
