package control

import (
	"cmp"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// Proxy is what is shown and steered of the proxy plane.
type Proxy interface {
	Plane
	Connections(func(*shaper.ConnectionStatus))
	Kill(id uint64) bool
	Buckets(i int, keys ...shaper.Key) []shaper.BucketState
}

// view answers what can be asked. Its methods may be called by several goroutines.
type view struct {
	*Options
	slow    slowly
	streams streams
}

// slowly is what costs too much to be looked at for everyone who asks.
type slowly struct {
	mu      sync.Mutex
	at      time.Time
	packets PacketStatus
	found   bool
	err     error
	process Process
	times   []cpuTime // of the last 10 s, and two at least: nobody may have looked for longer
}

type cpuTime struct {
	at  time.Time
	cpu time.Duration
}

// began is when the process did, or nearly.
var began = time.Now()

// slowEvery is how old what is kept may be.
const slowEvery = 2 * time.Second

// look returns the packet plane's status and that of the process, as they were a moment ago.
func (v *view) look() (_ PacketStatus, found bool, process Process, err error) {
	s := &v.slow
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.at) >= slowEvery {
		s.packets, s.found, s.err = v.Packets.PacketStatus()
		s.at = time.Now() // not before: who waited for this takes it, however long it took
		s.process = s.measure(s.at)
		s.process.LateP99 = v.lateP99()
	}
	return s.packets, s.found, s.process, s.err
}

// measure looks at what the process takes.
func (s *slowly) measure(now time.Time) Process {
	var p Process
	var usage unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &usage) == nil {
		cpu := time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
		if len(s.times) == 0 {
			s.times = append(s.times, cpuTime{began, 0})
		}
		s.times = append(s.times, cpuTime{now, cpu})
		for len(s.times) > 2 && now.Sub(s.times[0].at) > 10*time.Second {
			s.times = s.times[1:]
		}
		p.CPU = cpu.Seconds()
		if first := s.times[0]; now.After(first.at) {
			p.CPURate = (cpu - first.cpu).Seconds() / now.Sub(first.at).Seconds()
		}
	}
	if text, err := os.ReadFile("/proc/self/statm"); err == nil {
		if fields := strings.Fields(string(text)); len(fields) > 1 {
			pages, _ := strconv.ParseUint(fields[1], 10, 64)
			p.Memory = pages * uint64(os.Getpagesize())
		}
	}
	if folder, err := os.Stat("/proc/self/fd"); err == nil && folder.Size() > 0 { // since Linux 6.2
		p.Descriptors = int(folder.Size())
	} else if entries, err := os.ReadDir("/proc/self/fd"); err == nil {
		p.Descriptors = len(entries)
	}
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
		p.MaxDescriptors = int(min(limit.Cur, 1<<31-1))
	}
	return p
}

func (v *view) lateP99() float64 {
	counts, _ := v.Proxy.Late()
	var all, seen uint64
	for _, n := range counts {
		all += n
	}
	for i, n := range counts {
		if seen += n; all > 0 && seen*100 >= all*99 {
			return leaky.LateBounds[min(i, len(leaky.LateBounds)-1)].Seconds()
		}
	}
	return 0
}

func (v *view) status() Status {
	packets, found, process, err := v.look()
	s := Status{
		Now: time.Now(), PID: os.Getpid(), Promise: "kept",
		Overrides: []Override{}, Blocks: []Block{}, Listeners: []ListenerStatus{}, Attachments: []AttachmentStatus{},
		Reload: v.Reloads.Status(), Process: process,
	}
	for _, why := range v.unshown.Range {
		s.Unshown = append(s.Unshown, why.(string))
	}
	slices.Sort(s.Unshown)
	policy := v.Shaper.Policy()
	for i := range policy.Len() {
		if p, watched := v.Monitor.promiseOf(policy.State(i)); watched && !p.Kept {
			s.Promise = "broken"
		}
	}
	downstreams := v.downstreams()
	for _, n := range policy.Listeners() {
		l := ListenerStatus{
			Name: n.Name, Addresses: []string{}, Open: n.Open.Load(), Flows: n.Flows.Load(), MaxFlows: n.MaxFlows.Load(),
			ToDownstream: n.ToDownstream.Load(), FromDownstream: n.FromDownstream.Load(),
			Accepted: n.Accepted.Load(), FlowsRefused: n.FlowsRefused.Load(), AnswersWithheld: n.Withheld.Load(), DialErrors: n.DialErrors.Load(),
			Ended: map[string]uint64{}, Downstreams: []DownstreamStatus{},
		}
		v.Monitor.listener(&l, n)
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
		l.Unserved = Unserved(l.Downstreams)
		s.Listeners = append(s.Listeners, l)
	}
	b := v.Shaper.Buckets()
	s.Buckets = []TableStatus{{Plane: "proxy", Entries: b.Entries, Capacity: b.Capacity, EvictedDrained: b.EvictedDrained, EvictedIndebted: b.EvictedIndebted}}
	if found && err == nil {
		s.Buckets = append(s.Buckets, TableStatus{
			Plane: "packet", Entries: packets.Buckets.Live, Capacity: packets.Buckets.Capacity,
			EvictedDrained: packets.Buckets.EvictedDrained, EvictedIndebted: packets.Buckets.EvictedIndebted,
		})
		for _, a := range packets.Attachments {
			s.Attachments = append(s.Attachments, AttachmentStatus{
				Name: a.Name, Interface: a.Interface, Direction: a.Direction, Mode: a.Mode, Up: a.Up, Error: a.Err, Waits: a.Waits, Before: a.Before, Queue: (*QueueStatus)(a.Queue),
			})
		}
	}
	v.Daemon.Describe(&s)
	s.BlocksTotal = len(s.Blocks)
	s.Blocks = s.Blocks[:min(len(s.Blocks), maxBlocks)]
	return s
}

// maxBlocks is how many blocks a status has. A page that is open gets one each second.
const maxBlocks = 100

// blocks returns the prefixes that operators block.
func (v *view) blocks() []Block {
	s := Status{Blocks: []Block{}}
	v.Daemon.Describe(&s)
	return s.Blocks
}

func (v *view) downstreams() []DownstreamStatus {
	all := []DownstreamStatus{}
	for _, d := range v.Proxy.Downstreams() {
		all = append(all, NewDownstream(d))
	}
	slices.SortFunc(all, func(a, b DownstreamStatus) int {
		return cmp.Or(cmp.Compare(a.Listener, b.Listener), cmp.Compare(a.Downstream, b.Downstream))
	})
	return all
}

// NewDownstream is d as the API has it.
func NewDownstream(d shaper.DownstreamStatus) DownstreamStatus {
	out := DownstreamStatus{Listener: d.Listen, Downstream: d.Downstream, State: "up", Error: d.Error, InFlight: d.InFlight, Most: d.Most}
	switch {
	case d.Drained:
		out.State = "drained"
	case d.Down:
		out.State = "down"
	case !d.Up:
		out.State = "failing"
	}
	return out
}

// maxNamed is how many downstreams a text names.
const maxNamed = 3

// Unserved returns why the downstreams of a listener serve nobody, "" when one is up.
func Unserved(downstreams []DownstreamStatus) string {
	var why []string
	for _, d := range downstreams {
		if d.State == "up" {
			return ""
		}
		text := d.Downstream + " is " + d.State
		if d.Error != "" && d.State != "drained" {
			text += " (" + d.Error + ")"
		}
		why = append(why, text)
	}
	if more := len(why) - maxNamed; more > 0 {
		why = append(why[:maxNamed], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(why, ", ")
}

func (v *view) limits() []Limit {
	policy := v.Shaper.Policy()
	all := make([]Limit, policy.Len())
	for i := range all {
		all[i] = v.limit(policy, i)
	}
	slices.SortStableFunc(all, func(a, b Limit) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

func (v *view) limit(p *shaper.Policy, i int) Limit {
	l := p.Limit(i)
	set, inFiles := v.Daemon.Override(l.Name)
	out := Limit{
		Name: l.Name, Plane: "proxy", Mode: "enforce", Key: l.Key.String(), Single: l.Key == 0, HeldTo: v.Daemon.HeldTo(l),
		Block: l.Block, Override: set, FileOverride: inFiles, Direction: l.Direction.String(),
		Rate: float64(l.Rate) / 8, Packets: l.Packets.PerSecond(), NewConnections: l.NewConnections.PerSecond(),
		Connections: l.Connections, MaxDelay: l.MaxDelay.Seconds(), MaxWait: l.MaxWait.Seconds(),
	}
	if l.OfAttachments() {
		out.Plane, out.Direction, out.Attachments = "packet", "of the attachment", l.Match.Attach
	}
	if l.Observe {
		out.Mode = "observe"
	}
	v.Monitor.measure(&out, p, i)
	out.Promise.Unwatched = l.Observe || l.Rate == 0 && l.Packets.N == 0
	out.Promise.Sampled = l.OfAttachments() && !out.Single
	return out
}

// traits are by what keys and sources can be sorted.
var traits = map[string]shaper.Trait{"rate": shaper.TraitRate, "delayed": shaper.TraitDelay, "dropped": shaper.TraitDrops}

// keys returns the heaviest keys of limit i of p.
func (v *view) keys(p *shaper.Policy, i int, by shaper.Trait, n int) []Key {
	all := p.State(i).Keys.Heaviest(by, n, v.Clock())
	keys, out := make([]shaper.Key, len(all)), make([]Key, len(all))
	for j, h := range all {
		keys[j] = h.Key
		k := &out[j]
		*k = Key{
			Key: p.DescribeKey(i, h.Key), ASN: h.Key.ASN,
			Rate: Heavy(h.Weight[shaper.TraitRate]), Delayed: Heavy(h.Weight[shaper.TraitDelay]), Dropped: Heavy(h.Weight[shaper.TraitDrops]),
		}
		if prefix, ok := p.SourcePrefix(i, h.Key); ok {
			k.Source = prefix.String()
			if k.ASN == 0 {
				k.ASN = p.ASN(prefix.Addr())
			}
		}
		k.ASName = p.ASName(k.ASN)
	}
	if !p.Limit(i).OfAttachments() {
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

// NewBucket is b as the API has it.
func NewBucket(b shaper.BucketState) *Bucket {
	return &Bucket{
		BacklogBytes: b.BacklogBytes, BacklogPackets: b.BacklogPackets, QueuedBytes: b.QueuedBytes, Queued: b.Queued,
		NextIn: b.NextIn.Seconds(), NewIn: b.NewIn.Seconds(), InFlight: b.InFlight, Waiting: b.Waiting, Reserved: b.Reserved,
	}
}

// who returns the heaviest sources, prefixes or autonomous systems.
func (v *view) who(by string, sort shaper.Trait, n int) []Who {
	policy, now := v.Shaper.Policy(), v.Clock()
	switch by {
	case "prefix":
		return named(v.Shaper.HeavyPrefixes(sort, n, now), func(p netip.Prefix) (string, string) {
			return p.String(), policy.ASName(policy.ASN(p.Addr()))
		})
	case "asn":
		return named(v.Shaper.HeavyASNs(sort, n, now), func(asn uint32) (string, string) {
			return fmt.Sprintf("AS%d", asn), policy.ASName(asn)
		})
	}
	return named(v.Shaper.HeavySources(sort, n, now), func(a netip.Addr) (string, string) {
		return a.String(), policy.ASName(policy.ASN(a))
	})
}

func named[K comparable](all []shaper.Heavy[K], name func(K) (name, asName string)) []Who {
	out := []Who{}
	for _, h := range all {
		w := Who{Rate: Heavy(h.Weight[shaper.TraitRate]), Delayed: Heavy(h.Weight[shaper.TraitDelay]), Dropped: Heavy(h.Weight[shaper.TraitDrops])}
		w.Name, w.ASName = name(h.Key)
		out = append(out, w)
	}
	return out
}

// asked is which connections are asked for.
type asked struct {
	listener, limit string
	source          netip.Prefix // invalid is any
	sort            string
	top             int
}

// orders are how connections can be sorted, what is most first.
var orders = map[string]func(a, b *Connection) int{
	"bytes": func(a, b *Connection) int {
		return cmp.Compare(b.ToDownstream+b.FromDownstream, a.ToDownstream+a.FromDownstream)
	},
	"age":    func(a, b *Connection) int { return cmp.Compare(b.Age, a.Age) },
	"idle":   func(a, b *Connection) int { return cmp.Compare(b.Idle, a.Idle) },
	"waited": func(a, b *Connection) int { return cmp.Compare(b.Waited, a.Waited) },
}

func (v *view) connections(q asked) Connections {
	policy := v.Shaper.Policy()
	out := Connections{Connections: []Connection{}}
	order, limit := orders[q.sort], policy.Find(q.limit)
	v.Proxy.Connections(func(c *shaper.ConnectionStatus) {
		if q.listener != "" && c.Listen != q.listener || q.source.IsValid() && !q.source.Contains(c.Addr()) ||
			limit >= 0 && !under(policy, c, limit) {
			return
		}
		out.Total++
		out.Connections = append(out.Connections, NewConnection(c, policy))
		if len(out.Connections) >= 2*q.top+1024 { // of ever so many keep those that count
			slices.SortStableFunc(out.Connections, func(a, b Connection) int { return order(&a, &b) })
			out.Connections = out.Connections[:q.top]
		}
	})
	slices.SortStableFunc(out.Connections, func(a, b Connection) int { return order(&a, &b) })
	out.Connections = out.Connections[:min(len(out.Connections), q.top)]
	return out
}

// NewConnection is c as the API has it.
func NewConnection(c *shaper.ConnectionStatus, p *shaper.Policy) Connection {
	asn := p.ASN(c.Addr())
	return Connection{
		ID: c.ID, Protocol: c.Protocol.String(), Source: c.Source.String(), ASN: asn, ASName: p.ASName(asn),
		Listener: c.Listen, Port: c.Port, Downstream: c.Downstream, Stage: c.Stage, Age: c.Age.Seconds(), Idle: c.Idle.Seconds(),
		ToDownstream: c.ToDownstream, FromDownstream: c.FromDownstream, Waited: c.Waited.Seconds(),
		HeldBy: c.HeldBy, HeldMost: c.HeldMost,
	}
}

// under reports whether limit i matches a connection.
func under(p *shaper.Policy, c *shaper.ConnectionStatus, i int) bool {
	f := shaper.Flow{Source: c.Addr(), Port: c.Port, Listen: p.ListenIndex(c.Listen), Protocol: c.Protocol}
	return p.Route(&f).Limits()&(1<<i) != 0
}
