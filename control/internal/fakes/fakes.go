// Package fakes has the planes of a daemon for tests.
package fakes

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control/metrics"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/quota"
)

// Shaper returns a shaper with every counter of every limit in use.
func Shaper(t testing.TB, limits int) *shaper.Shaper {
	t.Helper()
	s := shaper.New(1000)
	var all []shaper.Limit
	for i := range limits {
		all = append(all, shaper.Limit{Name: string(rune('a'+i/26)) + string(rune('a'+i%26)), Rate: 8e6, Observe: i%2 == 1})
	}
	all[0].Penalty = &shaper.Penalty{After: shaper.Frequency{N: 100, Per: time.Minute}, Block: time.Minute, Factor: 2, Most: time.Hour}
	all[0].Key, all[0].IPv4Prefix, all[0].IPv6Prefix, all[0].MaxConnections = shaper.KeySource, 32, 64, 10
	p, err := s.Compile(all, []shaper.Listener{{Name: "l", Addresses: []shaper.Address{{Protocol: shaper.TCP}}}}, nil, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	s.Swap(p, leaky.Second)
	for i := range p.Len() {
		st := p.State(i)
		for v := range shaper.NumVerdicts {
			for r := range shaper.NumReasons {
				st.Bytes.Add(shaper.Verdict(v), shaper.Reason(r), 1000)
				st.Packets.Add(shaper.Verdict(v), shaper.Reason(r), 2)
				st.Connections.Add(shaper.Verdict(v), shaper.Reason(r), 1)
			}
		}
		st.SlotWait.Observe(3 * time.Millisecond)
		st.QueueDelay.Observe(time.Hour)
	}
	return s
}

// Proxy is a proxy plane with two downstreams and two connections.
type Proxy struct{}

func (Proxy) Lateness() (counts [len(pacer.LatenessBounds) + 1]uint64, sum time.Duration) {
	counts[0], counts[len(counts)-1] = 3, 1
	return counts, 70 * time.Millisecond
}

// Quotas implements [metrics.Proxy].
func (Proxy) Quotas(f func(*shaper.QuotaStatus)) {
	month := quota.Quota{Amount: 1000, Period: quota.Period{Calendar: quota.Month, Zone: "UTC"}}
	for i, used := range []uint64{250, 1000} {
		f(&shaper.QuotaStatus{Limit: "aq", Key: fmt.Sprintf("source=192.0.2.%d/32", i+1), Quota: month, Used: used, Ends: time.Hour})
	}
}

// QuotaError implements [metrics.Proxy].
func (Proxy) QuotaError() error { return nil }

// DecisionTimes implements [metrics.Proxy].
func (Proxy) DecisionTimes() (bounds []time.Duration, counts []uint64, sum time.Duration) {
	return []time.Duration{time.Microsecond}, []uint64{2, 1}, 5 * time.Microsecond
}

// downstreams are the states of the downstreams of a Proxy.
var downstreams = func() *[2]shaper.DownstreamState {
	all := new([2]shaper.DownstreamState)
	s := &all[0]
	for range 10 {
		s.Answer.Observe(20 * time.Millisecond)
	}
	s.Connect.Observe(300 * time.Microsecond)
	s.FirstByte.Observe(20 * time.Millisecond)
	s.RTT.Observe(200 * time.Microsecond)
	s.ToDownstream.Store(1000)
	s.FromDownstream.Store(3000)
	s.Busy.Store(4e6)
	s.ReceiverLimited.Store(1e6)
	all[1].DialsRefused.Store(7)
	return all
}()

func (Proxy) Downstreams() []shaper.DownstreamStatus {
	return []shaper.DownstreamStatus{
		{Listen: "l", Downstream: "10.0.0.5:5432", Up: true, InFlight: 3, State: &downstreams[0]},
		{Listen: "l", Downstream: "db.local:5432", State: &downstreams[1]},
	}
}

func (Proxy) Listeners() []shaper.ListenerStatus {
	return []shaper.ListenerStatus{{Listen: "l", Held: true, HeldFor: 10 * time.Second, HeldUntil: time.Minute, Waiting: 7, LastServed: 61 * time.Second}}
}

func (Proxy) Connections(f func(*shaper.ConnectionStatus)) {
	for i, source := range []string{"192.0.2.1:1000", "[2001:db8::1]:2000"} {
		f(&shaper.ConnectionStatus{
			ID: uint64(i + 1), Protocol: shaper.TCP, Source: netip.MustParseAddrPort(source), Listen: "l", Port: 5432, Stage: "open",
			ToDownstream: uint64(1000 * i), Waited: time.Second, ThrottledBy: "aa", MostlyThrottledBy: "aa",
		})
	}
}

func (Proxy) Kill(id uint64) bool { return id == 1 }

func (Proxy) Penalties() []shaper.PenaltyStatus {
	source := netip.MustParsePrefix("192.0.2.7/32")
	return []shaper.PenaltyStatus{
		{Limit: "aa", Source: source, Age: time.Hour, Left: -time.Minute, Times: 3},
		{Limit: "ab", Source: source, Age: time.Minute, Left: time.Minute, Times: 1, Observed: true},
	}
}

func (Proxy) Buckets(_ int, keys ...shaper.Key) []shaper.BucketState {
	return slices.Repeat([]shaper.BucketState{{BacklogBytes: 1000, Queued: 2, NextDeparture: time.Millisecond}}, len(keys))
}

// Packets is a packet plane with an attachment that shapes, one whose interface is missing,
// and one without a matching interface.
type Packets struct{}

func (Packets) PacketStatus() (s metrics.PacketStatus, ok bool, err error) {
	s.Attachments = []api.AttachmentStatus{
		{Name: "lost", Direction: "ingress", Mode: "police"},
		{Name: "uplink", Interface: "eth0", Direction: "egress", Mode: "shape", Up: true, Queue: &api.QueueStatus{Packets: 7, Bytes: 7000, Drops: 3}},
		{Name: "tunnels", Direction: "ingress", Mode: "police", Up: true, UnmatchedPatterns: "wg*"}, // is in no metric
	}
	s.Buckets.Live, s.Buckets.Capacity, s.Buckets.EvictedBacklogged = 5, 2048, 1
	return s, true, nil
}

func (Packets) Bucket(int, shaper.Key) (shaper.BucketState, bool) {
	return shaper.BucketState{}, false
}
