package control

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control/metrics"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/topk"
)

// Proxy is the part of the proxy plane that the API reads and controls.
type Proxy interface {
	metrics.Proxy
	Connections(func(*shaper.ConnectionStatus))
	Kill(id uint64) bool
	Buckets(i int, keys ...shaper.Key) []shaper.BucketState
	Penalties() []shaper.PenaltyStatus
}

// Packets is the packet plane, or none.
type Packets interface {
	metrics.Packets

	// Bucket returns the state of the bucket of k, a key of limit i of the current policy;
	// false if it is unknown.
	Bucket(i int, k shaper.Key) (shaper.BucketState, bool)
}

// view computes the responses of the API. Its methods may be called concurrently.
type view struct {
	*Options
	cached           cachedStatus
	liveCache        liveCache
	attachmentsProbe attachmentsProbe
}

func (v *view) status() api.Status {
	packets, found, process, err := v.refresh()
	s := api.Status{
		Now: time.Now(), PID: os.Getpid(), Conformance: "conformant",
		Overrides: []api.Override{}, Blocks: []api.Block{}, Listeners: []api.ListenerStatus{}, Attachments: []api.AttachmentStatus{},
		Reload: v.Reloads.Status(), Process: process,
	}
	for _, why := range v.endpointErrors.Range {
		s.EndpointErrors = append(s.EndpointErrors, why.(string))
	}
	slices.Sort(s.EndpointErrors)
	if err := v.Proxy.QuotaError(); err != nil {
		s.QuotaError = err.Error()
	}
	policy := v.Shaper.Policy()
	for i := range policy.Len() {
		if policy.Limit(i).Penalty != nil {
			blocked, would := policy.Penalized(i)
			s.Penalized, s.WouldBePenalized = s.Penalized+blocked, s.WouldBePenalized+would
		}
		if p, sampled := v.Monitor.Conformance(policy.State(i)); sampled && !p.Conformant {
			s.Conformance = "violated"
		}
	}
	downstreams, holds := v.downstreams(), map[string]*shaper.ListenerStatus{}
	for _, st := range v.Proxy.Listeners() {
		holds[st.Listen] = &st
	}
	for _, n := range policy.Listeners() {
		l := api.ListenerStatus{
			Name: n.Name, Addresses: []string{}, Connections: n.Open.Load(), Flows: n.Flows.Load(), MaxFlows: n.MaxFlows.Load(),
			ToDownstream: n.ToDownstream.Load(), FromDownstream: n.FromDownstream.Load(),
			Accepted: n.Accepted.Load(), FlowsRefused: n.FlowsRefused.Load(), RepliesSuppressed: n.RepliesSuppressed.Load(), DialErrors: n.DialErrors.Load(),
			Ended: map[string]uint64{}, Downstreams: []api.DownstreamStatus{},
		}
		v.Monitor.FillListener(&l, n)
		for e := range n.Ended {
			if count := n.Ended[e].Load(); count > 0 {
				l.Ended[shaper.Ending(e).String()] = count
			}
		}
		for _, d := range downstreams {
			if d.Listener == n.Name {
				l.Downstreams = append(l.Downstreams, d)
			}
		}
		l.Unavailable = UnavailableReason(l.Downstreams)
		if st := holds[n.Name]; st != nil {
			l.Loop, l.Waiting, l.Hold = st.Loop, st.Waiting, NewHold(st)
		}
		s.Listeners = append(s.Listeners, l)
	}
	b := v.Shaper.TableUsage()
	s.Buckets = []api.TableStatus{{Plane: "proxy", Entries: b.Entries, Capacity: b.Capacity, EvictedDrained: b.EvictedDrained, EvictedBacklogged: b.EvictedBacklogged}}
	if found && err == nil {
		s.Buckets = append(s.Buckets, api.TableStatus{
			Plane: "packet", Entries: packets.Buckets.Live, Capacity: packets.Buckets.Capacity,
			EvictedDrained: packets.Buckets.EvictedDrained, EvictedBacklogged: packets.Buckets.EvictedBacklogged,
		})
		s.Attachments = append(s.Attachments, packets.Attachments...)
	}
	v.Daemon.Describe(&s)
	if shared := v.shared(); shared.State != "none" {
		s.Shared = &shared
	}
	s.BlocksTotal = len(s.Blocks)
	s.Blocks = s.Blocks[:min(len(s.Blocks), maxBlocks)]
	return s
}

// shared returns the state of the group of hosts that share limits.
func (v *view) shared() api.Shared {
	s := v.Daemon.Shared()
	v.Daemon.AddLedger(&s)
	return s
}

// maxBlocks is the maximum number of blocks in a status, which each live stream sends every second.
const maxBlocks = 100

// blocks returns the blocked prefixes.
func (v *view) blocks() []api.Block {
	s := api.Status{Blocks: []api.Block{}}
	v.Daemon.Describe(&s)
	return s.Blocks
}

// penalties returns the sources that penalties block, would block, or have blocked and remember: first those that are
// blocked, the latest before others.
func (v *view) penalties() []api.Penalty {
	now := time.Now()
	active, ended := []api.Penalty{}, []api.Penalty{}
	for _, s := range v.Proxy.Penalties() {
		if y := NewPenalty(s, now); y.Active {
			active = append(active, y)
		} else {
			ended = append(ended, y)
		}
	}
	for _, list := range [][]api.Penalty{active, ended} {
		slices.SortFunc(list, func(a, b api.Penalty) int { return cmp.Or(b.Since.Compare(a.Since), cmp.Compare(a.Source, b.Source)) })
	}
	return append(active, ended...)
}

// NewPenalty converts s to its form in the API.
func NewPenalty(s shaper.PenaltyStatus, now time.Time) api.Penalty {
	active := s.Left > 0
	return api.Penalty{
		Source: s.Source.String(), Limit: s.Limit, Mode: shaper.Mode(active && !s.Enforced || s.Observed).String(), Active: active,
		Since: now.Add(-s.Age), Until: now.Add(s.Left), Times: s.Times,
	}
}

func (v *view) downstreams() []api.DownstreamStatus {
	all := []api.DownstreamStatus{}
	for _, d := range v.Proxy.Downstreams() {
		out := NewDownstream(d)
		v.Monitor.FillDownstream(&out, d.State)
		all = append(all, out)
	}
	slices.SortFunc(all, func(a, b api.DownstreamStatus) int {
		return cmp.Or(cmp.Compare(a.Listener, b.Listener), cmp.Compare(a.Downstream, b.Downstream))
	})
	return all
}

// NewDownstream converts d to its form in the API.
func NewDownstream(d shaper.DownstreamStatus) api.DownstreamStatus {
	out := api.DownstreamStatus{Listener: d.Listen, Downstream: d.Downstream, State: "up", Error: d.Error, InFlight: d.InFlight, MaxConnections: d.MaxConnections}
	switch {
	case d.Drained:
		out.State = "drained"
	case d.BreakerOpen:
		out.State, out.RetryIn = "open", d.RetryIn.Seconds()
	case d.Down:
		out.State = "down"
	case !d.Up:
		out.State = "failing"
	}
	return out
}

// hold returns how many connections of a listener wait, and why.
func (v *view) hold(listener string) (waiting int, _ *api.Hold) {
	for _, st := range v.Proxy.Listeners() {
		if st.Listen == listener {
			return st.Waiting, NewHold(&st)
		}
	}
	return 0, nil
}

// NewHold converts st to its form in the API; nil if nothing keeps connections waiting.
func NewHold(st *shaper.ListenerStatus) *api.Hold {
	out := &api.Hold{For: st.HeldFor.Seconds(), Rate: st.Rate, LastServed: max(0, st.LastServed.Seconds())}
	switch {
	case st.Held:
		out.State = "held"
		if st.HeldUntil != shaper.Forever {
			out.Left = st.HeldUntil.Seconds()
		}
	case st.Down:
		out.State = "down"
	case st.Rate > 0:
		out.State = "ramp"
	default:
		return nil
	}
	return out
}

// maxNamed is the maximum number of downstreams that UnavailableReason names.
const maxNamed = 3

// UnavailableReason returns why no downstream of a listener is available; "" if one is up.
func UnavailableReason(downstreams []api.DownstreamStatus) string {
	var why []string
	for _, d := range downstreams {
		if d.State == "up" {
			return ""
		}
		text := d.Downstream + " is " + d.State
		switch {
		case d.State == "open":
			text = d.Downstream + ": " + d.Error
		case d.Error != "" && d.State != "drained":
			text += " (" + d.Error + ")"
		}
		why = append(why, text)
	}
	if more := len(why) - maxNamed; more > 0 {
		why = append(why[:maxNamed], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(why, ", ")
}

func (v *view) limits() []api.Limit {
	policy, shares := v.Shaper.Policy(), v.limitShares()
	all := make([]api.Limit, policy.Len())
	for i := range all {
		all[i] = v.limit(policy, i)
		all[i].Shared = shares[all[i].Name]
	}
	slices.SortStableFunc(all, func(a, b api.Limit) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

func (v *view) limit(p *shaper.Policy, i int) api.Limit {
	l := p.Limit(i)
	set, inFiles := v.Daemon.Override(l.Name)
	out := api.Limit{
		Name: l.Name, Plane: "proxy", Mode: shaper.Mode(l.Observe).String(), Key: l.KeyText(), Single: l.Key == 0, Summary: v.Daemon.Summary(l),
		Block: l.Block, Override: set, FileOverride: inFiles, Direction: l.Direction.String(),
		Rate: float64(l.Rate) / 8, Packets: l.Packets.PerSecond(), NewConnections: l.NewConnections.PerSecond(),
		Scheduled: v.Daemon.Scheduled(l.Name), MaxConnections: l.MaxConnections, MaxDelay: l.MaxDelay.Seconds(), QueueTimeout: l.QueueTimeout.Seconds(),
	}
	if l.InPacketPlane() {
		out.Plane, out.Direction, out.Attachments = "packet", "of the attachment", l.Match.Attach
	}
	if found := p.State(i).Adaptive.Load(); found != nil && l.Adapt != shaper.AdaptOff {
		out.Adaptive = adaptiveOf(l, found)
	}
	if l.SlotFor.InTurns() {
		out.SlotFor = l.SlotFor.String()
	}
	if found := p.State(i).Shed.Load(); found != nil {
		out.Shed = &api.Shed{Share: found.Share, Order: l.Shed.Order, Signals: []api.ShedSignal{}}
		for _, s := range found.Signals {
			out.Shed.Signals = append(out.Shed.Signals, api.ShedSignal{Name: s.Name, Limit: s.Limit, Value: s.Value, Above: s.Above, Error: s.Err})
		}
	}
	if y := l.Penalty; y != nil {
		blocked, would := p.Penalized(i)
		out.Penalty = &api.LimitPenalty{
			Mode: shaper.Mode(y.Observe || l.Observe).String(), Blocked: blocked, WouldBlock: would,
			Imposed: p.State(i).Penalties.Imposed.Load(), WouldImpose: p.State(i).ObservedPenalties.Imposed.Load(),
		}
	}
	v.Monitor.FillLimit(&out, p, i)
	out.Conformance.Unmonitored = l.Observe || l.Rate == 0 && l.Packets.N == 0
	out.Conformance.Sampled = l.InPacketPlane() && !out.Single
	return out
}

func adaptiveOf(l *shaper.Limit, found *shaper.AdaptiveStatus) *api.Adaptive {
	out := &api.Adaptive{Observed: found.Observed, MinConnections: l.MinConnections, Connections: found.Limit, Most: found.Most, Leader: found.Leader, Unheard: found.Unheard, Throughput: found.Throughput, Changes: []api.AdaptiveChange{}}
	for _, c := range found.Changes {
		out.Changes = append(out.Changes, api.AdaptiveChange{At: c.At, From: c.From, To: c.To, Reason: c.Reason})
	}
	return out
}

// limitShares returns what this host may use of shared limits, by their names.
func (v *view) limitShares() map[string]*api.LimitShare {
	shares := map[string]*api.LimitShare{}
	for _, l := range v.Daemon.Shared().Limits {
		shares[l.Limit] = shareOf(&l, "all")
	}
	return shares
}

// shareOf returns what this host may use of the bucket of a limit with a key, or if it is not among those of l, of
// one that no host needs more of.
func shareOf(l *api.SharedLimit, key string) *api.LimitShare {
	share := &api.LimitShare{Share: l.ColdShare, Connections: l.HostConnections}
	for _, b := range l.Buckets {
		switch {
		case b.Key != key:
		case b.Slots:
			share.Connections = int(math.Round(b.Share * float64(l.MaxConnections)))
		default:
			share.Share = b.Share
		}
	}
	return share
}

// addShares adds what this host may use of the shared limits of e. It leaves out a bucket that may be hot and is not
// among those that are known.
func (v *view) addShares(e *api.Explanation) {
	shared := v.Daemon.Shared().Limits
	for i := range e.Limits {
		l := &e.Limits[i]
		for j := range shared {
			s := &shared[j]
			known := slices.ContainsFunc(s.Buckets, func(b api.SharedBucket) bool { return b.Key == l.Key })
			if s.Limit == l.Limit && (known || s.HotBuckets <= len(s.Buckets)) {
				l.Shared = shareOf(s, l.Key)
			}
		}
	}
}

// sortKeys are the sort keys of limit keys and talkers, by their name in the API.
var sortKeys = map[string]topk.SortKey{"rate": topk.ByRate, "delayed": topk.ByDelay, "dropped": topk.ByDrops}

// keys returns the top keys of limit i of p.
func (v *view) keys(p *shaper.Policy, i int, sort topk.SortKey, n int) []api.Key {
	all := p.State(i).Keys.Heaviest(sort, n, v.Clock())
	keys, out := make([]shaper.Key, len(all)), make([]api.Key, len(all))
	for j, h := range all {
		keys[j] = h.Key
		k := &out[j]
		*k = api.Key{
			Key: p.DescribeKey(i, h.Key), ASN: h.Key.ASN,
			Rate: api.Estimate(h.Weight[topk.ByRate]), Delayed: api.Estimate(h.Weight[topk.ByDelay]), Dropped: api.Estimate(h.Weight[topk.ByDrops]),
		}
		if prefix, ok := p.SourcePrefix(i, h.Key); ok {
			k.Source = prefix.String()
			if k.ASN == 0 {
				k.ASN = p.ASN(prefix.Addr())
			}
		}
		k.ASName = p.ASName(k.ASN)
	}
	if !p.Limit(i).InPacketPlane() {
		for j, b := range v.Proxy.Buckets(i, keys...) {
			out[j].Bucket = NewBucket(b)
		}
		return out
	}
	for j, k := range keys {
		if b, ok := v.Packets.Bucket(i, k); ok {
			out[j].Bucket = NewBucket(b)
		}
	}
	return out
}

// NewBucket converts b to its form in the API.
func NewBucket(b shaper.BucketState) *api.Bucket {
	return &api.Bucket{
		BacklogBytes: b.BacklogBytes, BacklogPackets: b.BacklogPackets, QueuedBytes: b.QueuedBytes, Queued: b.Queued,
		NextDeparture: b.NextDeparture.Seconds(), NextAdmission: b.NextAdmission.Seconds(), InFlight: b.InFlight, Slots: b.Slots, Waiting: b.Waiting, Reserved: b.Reserved,
		Quota: newQuota(b.Quota),
	}
}

// talkers returns the top sources, prefixes or autonomous systems.
func (v *view) talkers(by string, sort topk.SortKey, n int) []api.Talker {
	policy, now := v.Shaper.Policy(), v.Clock()
	switch by {
	case "prefix":
		return toTalkers(v.Shaper.TopPrefixes(sort, n, now), func(p netip.Prefix) (string, string) {
			return p.String(), policy.ASName(policy.ASN(p.Addr()))
		})
	case "asn":
		return toTalkers(v.Shaper.TopASNs(sort, n, now), func(asn uint32) (string, string) {
			return fmt.Sprintf("AS%d", asn), policy.ASName(asn)
		})
	}
	return toTalkers(v.Shaper.TopSources(sort, n, now), func(a netip.Addr) (string, string) {
		return a.String(), policy.ASName(policy.ASN(a))
	})
}

func toTalkers[K comparable](all []topk.HeavyHitter[K], name func(K) (name, asName string)) []api.Talker {
	out := []api.Talker{}
	for _, h := range all {
		t := api.Talker{Rate: api.Estimate(h.Weight[topk.ByRate]), Delayed: api.Estimate(h.Weight[topk.ByDelay]), Dropped: api.Estimate(h.Weight[topk.ByDrops])}
		t.Name, t.ASName = name(h.Key)
		out = append(out, t)
	}
	return out
}

// connectionFilter selects and sorts connections.
type connectionFilter struct {
	listener, limit string
	source          netip.Prefix // any if invalid
	sort            string
	top             int
}

// connectionOrders are the orders of connections, descending, by their name in the API.
var connectionOrders = map[string]func(a, b *api.Connection) int{
	"bytes": func(a, b *api.Connection) int {
		return cmp.Compare(b.ToDownstream+b.FromDownstream, a.ToDownstream+a.FromDownstream)
	},
	"age":    func(a, b *api.Connection) int { return cmp.Compare(b.Age, a.Age) },
	"idle":   func(a, b *api.Connection) int { return cmp.Compare(b.Idle, a.Idle) },
	"waited": func(a, b *api.Connection) int { return cmp.Compare(b.Waited, a.Waited) },
}

func (v *view) connections(q connectionFilter) api.Connections {
	policy := v.Shaper.Policy()
	out := api.Connections{Connections: []api.Connection{}}
	order, limit := connectionOrders[q.sort], policy.Find(q.limit)
	v.Proxy.Connections(func(c *shaper.ConnectionStatus) {
		if q.listener != "" && c.Listen != q.listener || q.source.IsValid() && !q.source.Contains(c.Addr()) ||
			limit >= 0 && !limitApplies(policy, c, limit) {
			return
		}
		out.Total++
		out.Connections = append(out.Connections, NewConnection(c, policy))
		if len(out.Connections) >= 2*q.top+1024 { // bound the memory
			slices.SortStableFunc(out.Connections, func(a, b api.Connection) int { return order(&a, &b) })
			out.Connections = out.Connections[:q.top]
		}
	})
	slices.SortStableFunc(out.Connections, func(a, b api.Connection) int { return order(&a, &b) })
	out.Connections = out.Connections[:min(len(out.Connections), q.top)]
	return out
}

// NewConnection converts c to its form in the API.
func NewConnection(c *shaper.ConnectionStatus, p *shaper.Policy) api.Connection {
	asn, class := p.ASN(c.Addr()), c.Class
	if p.Classes() == 1 {
		class = ""
	}
	return api.Connection{
		Class: class,
		ID:    c.ID, Protocol: c.Protocol.String(), Source: c.Source.String(), ASN: asn, ASName: p.ASName(asn),
		Listener: c.Listen, Port: c.Port, Downstream: c.Downstream, Stage: c.Stage, Age: c.Age.Seconds(), Idle: c.Idle.Seconds(),
		ToDownstream: c.ToDownstream, FromDownstream: c.FromDownstream, Waited: c.Waited.Seconds(),
		ThrottledBy: c.ThrottledBy, MostlyThrottledBy: c.MostlyThrottledBy,
	}
}

// limitApplies reports whether limit i matches a connection.
func limitApplies(p *shaper.Policy, c *shaper.ConnectionStatus, i int) bool {
	f := shaper.Flow{Source: c.Addr(), Port: c.Port, Origin: p.ListenerIndex(c.Listen), Protocol: c.Protocol}
	return p.Route(&f).Limits()&(1<<i) != 0
}
