// Package member makes a daemon one of the hosts that share limits: one goroutine samples what the planes
// pass, calls the store of the ledger, and tells the planes what they may pass. Data never waits for it.
package member

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// Store runs the ledger, or reaches the one that does. What returns an error may have been done all the
// same. A Store is used by one goroutine at a time.
type Store interface {
	Call(context.Context, *cluster.Request) (*cluster.Reply, error)
	Snapshot(ctx context.Context, keys ...string) (cluster.Snapshot, error) // see [cluster.Ledger.Snapshot]
	Forget(ctx context.Context, host string) (bool, error)                  // see [cluster.Ledger.Forget]
	Server() string                                                         // host:port of the one that was called last; "" if none has answered
	Close()                                                                 // after the last call has returned
}

// Plane enforces what this host may use of its shared buckets.
type Plane interface {
	// SetShares returns when nothing leaves and no connection is admitted any more under larger parts
	// than these.
	SetShares(shaper.Shares)
	// Demands appends what the plane needs of its buckets since it was last called. Pools of slots
	// that are hot are always among them.
	Demands([]shaper.Demand) []shaper.Demand
}

// Names translates the keys of buckets and pools of slots, which differ from host to host, to names, which do
// not. Those of pools begin with [cluster.SlotsPrefix]. It is safe for concurrent use.
type Names interface {
	Name(k shaper.Key, slots bool) string
	// Key returns the key of a bucket or pool, and which of the planes has it; false if it has none such.
	Key(name string) (key shaper.Key, plane int, ok bool)
	// Policy returns the policy to which keys and names belong now.
	Policy() *shaper.Policy
	// Always returns the names of buckets that are sampled even if they are idle: those of limits
	// without key.
	Always() []string
}

// Options are the settings of a member.
type Options struct {
	Host     cluster.HostOptions // without InUse
	Interval time.Duration       // between two calls, on average
	Store    Store
	Planes   []Plane
	Names    Names
	Clock    func() cluster.Time // CLOCK_BOOTTIME
	Now      func() leaky.Time   // the daemon's clock, which the planes use
	Log      *slog.Logger
	Joined   func() // called in the goroutine of the member when the host has joined; it must not block
}

// Member is a running member. Its methods are safe for concurrent use.
type Member struct {
	Options
	commands chan func()
	short    chan struct{}
	done     chan struct{}

	// Owned by the goroutine of run.
	host      *cluster.Host
	estimator *cluster.Estimator
	slots     *slotDemands
	tickets   *ticketDemands
	interval  cluster.Time
	demands   []shaper.Demand
	called    bool            // this process has
	unsettled map[string]bool // buckets of which more than their parts may still be in use
	resample  bool            // and since they were sampled, parts have changed
	lease     cluster.Lease   // that the planes know
	steppedAt cluster.Time
	sampledAt cluster.Time
	windowAt  cluster.Time // when the window ends
	callAt    cluster.Time // when the next call is due
	again     bool         // it is due at once
	busy      bool         // the store is in use
	queries   []query      // of operators, that wait for the store
	queried   bool         // the store was last used for a query
	oldStores []Store      // to be closed when the store is not in use
	outcomes  chan func()
	leaving   *leaving // nil while it stays
	left      bool
	joined    bool
	counters  Counters
	lastError error
	server    string // that answered last
	lastEpoch int64
}

// reply is the outcome of a call.
type reply struct {
	*cluster.Reply
	leave bool // to the call that tells that the host leaves
	err   error
	took  time.Duration
	from  string // server
}

// Start starts a member, which runs until ctx ends. The planes are told before it returns that the
// host has nothing yet.
func Start(ctx context.Context, o Options) *Member {
	m := &Member{
		Options: o, commands: make(chan func()), short: make(chan struct{}, 1), done: make(chan struct{}),
		outcomes: make(chan func(), 1), unsettled: map[string]bool{}, interval: cluster.FromDuration(o.Interval),
	}
	now := m.Clock()
	hostOptions := o.Host
	hostOptions.InUse = func(key string) bool {
		if cluster.IsSlots(key) {
			_, _, here := m.Names.Key(key)
			return here
		}
		return m.estimator.InUse(key)
	}
	m.host = cluster.NewHost(hostOptions, now)
	m.estimator, m.slots, m.tickets = cluster.NewEstimator(m.host, m.interval, now), newSlotDemands(m.host), newTicketDemands(m.host)
	m.steppedAt, m.sampledAt, m.windowAt = now, now, now+m.interval
	m.callAt = now + cluster.Time(rand.Int64N(int64(m.interval)))
	m.apply()
	go m.run(ctx)
	return m
}

// Short tells m that a bucket has begun to delay units. It does not block.
func (m *Member) Short() {
	select {
	case m.short <- struct{}{}:
	default:
	}
}

// SetStore replaces the store, and the interval between calls. The old store is closed.
func (m *Member) SetStore(s Store, interval time.Duration) {
	if !m.do(context.Background(), func() {
		if m.busy {
			m.oldStores = append(m.oldStores, m.Store)
		} else {
			m.Store.Close()
		}
		m.Store, m.interval = s, cluster.FromDuration(interval)
		m.estimator.SetInterval(m.interval)
	}) {
		s.Close()
	}
}

// SetInfo replaces what the ledger and other hosts are told about this one.
func (m *Member) SetInfo(digest uint64, info string) {
	m.do(context.Background(), func() { m.host.SetInfo(digest, info) })
}

// Tell replaces what other hosts may want to know about this one, see [cluster.Request.Info].
func (m *Member) Tell(ctx context.Context, info string) {
	m.do(ctx, func() { m.host.Tell(info) })
}

// do runs f in the goroutine of run. It reports false if m has ended, or ctx.
func (m *Member) do(ctx context.Context, f func()) bool {
	ran := make(chan struct{})
	select {
	case m.commands <- func() { f(); close(ran) }:
		<-ran
		return true
	case <-m.done:
	case <-ctx.Done():
	}
	return false
}

// Wait waits until m has ended.
func (m *Member) Wait() { <-m.done }

// leaving is the order to leave.
type leaving struct {
	ready func() error // why the ledger may not be told; nil when it may
	done  chan error
}

// Leave makes the planes let nothing of shared limits pass any more, and tells the ledger when nothing is left that
// they had admitted before, unless ready, which is called in between, returns an error. It returns when the ledger
// knows, or ctx ends.
func (m *Member) Leave(ctx context.Context, ready func() error) error {
	order := &leaving{ready, make(chan error, 1)}
	if !m.do(ctx, func() { m.leaving, m.callAt = order, 0 }) {
		return context.Cause(ctx)
	}
	select {
	case err := <-order.done:
		return err
	case <-m.done:
		return context.Canceled
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (m *Member) run(ctx context.Context) {
	defer m.close()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		sample := false
		select {
		case <-ctx.Done():
			return
		case f := <-m.commands:
			f()
		case <-m.short:
			sample = true
		case end := <-m.outcomes:
			m.release()
			end()
		case <-timer.C:
		}
		now := m.Clock()
		m.step(ctx, now, sample)
		timer.Reset(m.nextWake(now).Duration())
	}
}

// close waits for the call or query that is on its way.
func (m *Member) close() {
	if m.busy {
		end := <-m.outcomes
		m.release()
		end()
	}
	m.Store.Close()
	close(m.done)
}

// samplesPerInterval is how often the planes are asked what they need. A bucket that is idle for two
// samples may be given back.
const samplesPerInterval = 4

// step does what is due at now.
func (m *Member) step(ctx context.Context, now cluster.Time, sample bool) {
	if !m.host.Joined() || now >= m.lease.End {
		m.counters.Alone += (now - m.steppedAt).Duration()
	}
	m.steppedAt = now
	if sample || now >= m.sampledAt+m.interval/samplesPerInterval {
		m.sample(now)
	}
	if now >= m.windowAt {
		m.estimator.EndWindow(now)
		m.slots.endWindow(now)
		m.windowAt = now + m.interval
	}
	urgent := m.estimator.Urgent(now)
	urgent = m.slots.urgent(now, m.interval) || urgent
	urgent = m.tickets.tell(now, m.interval) || urgent
	m.apply()
	if m.busy || m.left {
		return
	}
	due := m.again || urgent || now >= m.callAt
	switch {
	case len(m.queries) > 0 && !(due && m.queried): // at most one between two calls
		m.startQuery(ctx)
	case due:
		m.call(ctx, now)
	}
}

// nextWake is how long there is nothing to do after now.
func (m *Member) nextWake(now cluster.Time) cluster.Time {
	next := min(m.sampledAt+m.interval/samplesPerInterval, m.windowAt)
	if !m.busy {
		next = min(next, m.callAt, m.estimator.NextUrgent(), m.slots.retry.Next(), m.tickets.retry.Next())
	}
	return max(next-now, cluster.Millisecond)
}

// sample asks the planes what they need.
func (m *Member) sample(now cluster.Time) {
	m.sampledAt = now
	m.demands = m.demands[:0]
	for _, p := range m.Planes {
		m.demands = p.Demands(m.demands)
	}
	clear(m.unsettled)
	m.slots.begin()
	m.tickets.begin()
	m.resample = false
	seen := map[string]bool{}
	for i := range m.demands {
		d := &m.demands[i]
		name := m.Names.Name(d.Key, d.Slots)
		switch {
		case d.Slots:
			if d.Name != "" {
				name = cluster.SlotsPrefix + d.Name
			} else if name == "" { // the policy has changed since the plane was asked
				name = m.slots.nameOf(d.Key)
			}
			m.slots.add(now, name, *d)
			continue
		case cluster.IsTickets(name):
			m.tickets.add(name, *d)
			continue
		}
		m.estimator.Sample(now, name, cluster.FromDuration(d.Used.Duration()), int64(d.Waiting))
		seen[name] = true
		if d.Unsettled {
			m.unsettled[name] = true
		}
	}
	for _, name := range m.Names.Always() {
		if !seen[name] {
			m.estimator.Sample(now, name, 0, 0)
		}
	}
}

// call sends the next call, whose reply comes back through m.outcomes.
func (m *Member) call(ctx context.Context, now cluster.Time) {
	var q *cluster.Request
	if m.leaving != nil {
		q = m.host.Leave(now)
		m.apply()
		if m.sample(now); len(m.unsettled) > 0 { // what was admitted before is yet to leave
			m.callAt = m.sampledAt + m.interval/samplesPerInterval
			return
		}
		if ready := m.leaving.ready; ready != nil {
			if err := ready(); err != nil {
				m.leaving.done <- err
				m.left = true
				return
			}
			m.leaving.ready = nil
		}
	} else {
		if !m.called { // with the first call, what the process before had is void
			if m.sample(now); len(m.unsettled) > 0 {
				m.callAt = m.sampledAt + m.interval/samplesPerInterval
				return
			}
			m.called = true
		}
		if m.resample {
			m.sample(now)
			if m.slots.settle(now) {
				m.apply()
				m.sample(now)
			}
		}
		q = m.host.Request(now, m.inUse)
	}
	m.busy, m.queried, m.again = true, false, false
	// Hosts must not call in step.
	m.callAt = now + m.interval/2 + cluster.Time(rand.Int64N(int64(m.interval)))
	store := m.Store
	go func() {
		ctx, cancel := context.WithTimeout(ctx, m.Options.Host.Params.Timeout().Duration())
		defer cancel()
		sent := time.Now()
		r, err := store.Call(ctx, q)
		took := time.Since(sent)
		if err == nil {
			if err = r.Validate(q); err != nil {
				err = fmt.Errorf("the ledger's answer is not valid: %w", err)
			}
		}
		server := store.Server()
		m.outcomes <- func() { m.take(reply{r, q.Leave, err, took, server}) }
	}()
}

// inUse returns the most parts of a bucket or pool that may still be in use.
func (m *Member) inUse(key string) int64 {
	switch {
	case cluster.IsSlots(key):
		return m.slots.held(key)
	case m.unsettled[key]:
		return cluster.Whole
	}
	return 0
}

// release makes the store free for the next call or query.
func (m *Member) release() {
	m.busy = false
	for _, s := range m.oldStores {
		s.Close()
	}
	m.oldStores = nil
}

// errLate is the error of a call whose reply came when it could not be taken any more.
var errLate = fmt.Errorf("the reply was late: %w", context.DeadlineExceeded)

// take takes the outcome of a call.
func (m *Member) take(r reply) {
	if r.err == nil && !m.host.Awaits(m.Clock()) {
		r.err = errLate
	}
	m.counters.add(r)
	if (r.err == nil) != (m.lastError == nil) {
		m.logStore(r.err)
	}
	m.lastError = r.err
	if r.err != nil {
		return
	}
	m.server = r.from
	m.again = m.host.Reply(m.Clock(), r.Reply)
	m.logEpoch(r.Epoch)
	if joined := m.host.Joined(); joined != m.joined {
		if m.joined = joined; joined && m.Options.Joined != nil {
			m.Options.Joined()
		}
	}
	m.apply()
	if r.leave && !m.again {
		m.leaving.done <- nil
		m.left = true
	}
}

// apply tells the planes what has changed.
func (m *Member) apply() {
	hot, cold, all := m.host.TakeChanges()
	lease := m.host.Lease()
	tickets := m.host.TakeTickets()
	changed := all || len(hot)+len(cold) > 0
	if !changed && len(tickets) == 0 && lease == m.lease {
		return
	}
	m.lease, m.resample = lease, m.resample || changed
	shares, policy := make([]shaper.Shares, len(m.Planes)), m.Names.Policy()
	for _, name := range hot {
		if key, plane, ok := m.Names.Key(name); ok {
			parts, _ := m.host.Parts(name)
			given := &shares[plane].Given
			if cluster.IsSlots(name) {
				given = &shares[plane].Slots
				m.slots.know(m.sampledAt, name)
			}
			*given = append(*given, shaper.KeyParts{Key: key, Parts: uint32(parts)})
		}
	}
	for _, name := range cold {
		if key, plane, ok := m.Names.Key(name); ok {
			cold := &shares[plane].Cold
			if cluster.IsSlots(name) {
				cold = &shares[plane].ColdSlots
			}
			*cold = append(*cold, key)
		}
	}
	hostNow, now := m.Clock(), m.Now() // in this order a ticket is good late rather than early
	for _, t := range tickets {
		m.tickets.bought(t.Key)
		if key, plane, ok := m.Names.Key(t.Key); ok {
			shares[plane].Tickets = append(shares[plane].Tickets, shaper.Ticket{Key: key, At: planeTime(t.At, hostNow, now), Until: planeTime(t.Until, hostNow, now)})
		}
	}
	planeLease := m.planeLease(lease)
	for i, p := range m.Planes {
		shares[i].Lease, shares[i].Reset, shares[i].Policy = planeLease, all, policy
		p.SetShares(shares[i])
	}
}

// planeTime is t by the daemon's clock, which shows now when that of the host shows hostNow.
func planeTime(t, hostNow cluster.Time, now leaky.Time) leaky.Time {
	if t < hostNow {
		return now.Sub(leaky.FromDuration((hostNow - t).Duration()))
	}
	return now.Add(leaky.FromDuration((t - hostNow).Duration()))
}

// planeLease is l by the daemon's clock.
func (m *Member) planeLease(l cluster.Lease) shaper.Lease {
	now, hostNow, later := m.Now(), m.Clock(), m.Now() // so a lease ends early rather than late, and what follows begins late
	return shaper.Lease{
		End: planeTime(l.End, hostNow, now), AloneAt: planeTime(l.AloneAt, hostNow, later) + leaky.Second/1000,
		Cold: uint32(l.Cold), Between: uint32(l.Between), Alone: uint32(l.Alone), Withheld: uint32(l.Withheld),
		Hosts: l.Hosts, SlotsCold: uint32(l.SlotsCold),
	}
}
