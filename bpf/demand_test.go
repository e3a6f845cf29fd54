package bpf

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// TestDemands reports what datagrams of two sources have used and what they needed, while the share of one of
// them changes.
func TestDemands(t *testing.T) {
	w, p := newWire(t, "demand"), openPlane(t)
	l := shaper.Limit{
		Name: "per-source", Match: shaper.Match{Attach: []string{"here"}}, Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
		Packets: perSecond(1000), BurstPackets: 50, Shared: true,
	}
	p.apply([]shaper.Limit{l}, shaper.Attachment{Name: "here", Interfaces: []string{"demand0"}, Mode: shaper.AttachPolice})
	id := p.policy.State(0).ID
	key := func(source byte) shaper.Key {
		return shaper.Key{Limit: id, Address: [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: source}}
	}
	set := func(cold uint32, given ...shaper.KeyParts) {
		end := p.clock.Boot() + leaky.FromDuration(time.Hour)
		p.SetShares(shaper.Shares{Lease: shaper.Lease{End: end, AloneAt: end, Cold: cold}, Given: given, Reset: true})
		time.Sleep(30 * time.Millisecond) // a credit of 30 packets at the whole rate
		p.Demands(nil)
	}
	want := func(what string, want ...shaper.Demand) {
		t.Helper()
		got := p.Demands(nil)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", what, diff)
		}
	}
	const ms = leaky.Second / 1000 // the cost of a packet
	set(shaper.Whole)
	w.want(p, 1, 10, 10)
	want("cold, within its parts")
	set(shaper.Whole, shaper.KeyParts{Key: key(1), Parts: shaper.Whole})
	w.want(p, 1, 10, 10)
	w.want(p, 2, 10, 10)
	want("hot, within its parts", shaper.Demand{Key: key(1), Used: 10 * ms})
	want("hot and idle")
	// refuse refuses packets of both, twice, and reports whether that took so little time that they count as one run, and
	// the first packets as refused at once.
	refuse := func() bool {
		set(0, shaper.KeyParts{Key: key(1), Parts: shaper.Whole / 2})
		began := time.Now()
		w.want(p, 2, 1, 0)
		first := p.Demands(nil)
		w.send(1, 200)
		second := p.Demands(nil)
		if time.Since(began) >= shortGap.Duration() {
			return false
		}
		if diff := cmp.Diff([]shaper.Demand(nil), first); diff != "" {
			t.Errorf("a packet refused: %s", diff)
		}
		if diff := cmp.Diff([]shaper.Demand{{Key: key(1), Used: 200 * ms}}, second); diff != "" {
			t.Errorf("many packets refused at once: %s", diff)
		}
		time.Sleep(shortAfter.Duration())
		w.send(1, 100)
		w.want(p, 2, 1, 0)
		return time.Since(began) < shortGap.Duration()
	}
	for end := time.Now().Add(30 * time.Second); !refuse(); {
		if time.Now().After(end) {
			t.Fatal("the machine is too busy")
		}
		time.Sleep(shortGap.Duration()) // until the run has ended
	}
	want("both short", shaper.Demand{Key: key(1), Used: 100 * ms, Waiting: 1}, shaper.Demand{Key: key(2), Waiting: 1})
	want("nobody sends")
}

// TestDemands_Unsettled takes parts of a bucket whose packets wait in a queue: it is settled when the last one
// of them has left.
func TestDemands_Unsettled(t *testing.T) {
	t.Parallel()
	b := newBench(t, kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1})
	l := shaper.Limit{Name: "all", Match: shaper.Match{Attach: []string{"here"}}, Packets: perSecond(1000), MaxDelay: time.Second, Shared: true}
	b.loadLimits(t, []shaper.Limit{l}, nil)
	tag := meterNumber(0, int(meterPackets))<<tagMeterShift | neverEvicted | sharedTag
	m := kernelMeter{Tag: tag}
	for i := range m.Hash {
		m.Hash[i] = b.Hashes[keyWords-1][i] * meterOf(tag)
	}
	hash := join(&m, [2]uint64{})
	tag |= hash & tagHash
	change := func(at time.Duration, parts uint64) (settled leaky.Time) {
		boot := uint64(leaky.FromDuration(at))
		c := shareChange{
			lease: kernelLease{End: boot + 1<<50, AloneAt: boot + 1<<50}, hot: map[uint64]hotParts{tag: {parts, hash}},
			meters: map[uint64]sharedMeter{meterOf(tag): {maxDelay: uint64(leaky.Second)}},
		}
		b.kernel.setShares(&c, leaky.Time(boot), boot)
		return leaky.Time(c.settled[tag])
	}
	change(time.Hour, shaper.Whole/2)
	var last uint64
	for range 50 {
		if _, d, _ := b.run(t, &sample{data: datagram(1)}, uint64(time.Hour+time.Second), (*bench).tc); d.Verdict != uint32(shaper.Refuse) {
			last = d.Depart
		}
	}
	if want := leaky.FromDuration(time.Hour + time.Second + 98*time.Millisecond); leaky.Time(last) < want-1000 || leaky.Time(last) > want+1000 {
		t.Fatalf("the last packet leaves at %d, want %d", last, want)
	}
	settled := change(time.Hour+time.Second+10*time.Millisecond, shaper.Whole/4)
	if late := settled.Sub(leaky.Time(last)); uint64(settled) < last || late > leaky.FromDuration(3*time.Millisecond) {
		t.Errorf("settled %v after the last packet", late.Duration())
	}
	if settled := change(time.Hour+time.Second+20*time.Millisecond, shaper.Whole); settled != 0 {
		t.Errorf("settled at %d with more parts", settled)
	}
	if _, d, _ := b.run(t, &sample{data: datagram(1)}, uint64(time.Hour+time.Second+20*time.Millisecond), (*bench).tc); d.Depart <= last {
		t.Error("with more parts a packet overtakes those that wait")
	}
}

// TestDemands_QueueOfConnections lets SYNs wait until their queue is full: the bucket that they wait for is short, and
// no other.
func TestDemands_QueueOfConnections(t *testing.T) {
	t.Parallel()
	for name, l := range map[string]shaper.Limit{
		"new connections":                        {},
		"new connections, and a rate":            {Rate: 1e9, MaxDelay: time.Second},
		"new connections, and a rate of packets": {Packets: perSecond(1e6), MaxDelay: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t, kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1, IdleTimeout: testIdleTimeout, QueueLimit: 10})
			l.Name, l.Shared, l.NewConnections, l.QueueTimeout = "opens", true, perSecond(1), time.Hour
			b.loadLimits(t, attachHere(l), nil)
			boot := leaky.FromDuration(time.Hour)
			b.kernel.setShares(&shareChange{lease: kernelLease{End: uint64(leaky.Never), AloneAt: uint64(leaky.Never), Cold: kernelShare{Parts: shaper.Whole}}}, boot, uint64(boot))
			full := 0
			for i := range 40 { // each SYN is sent twice
				if _, d, _ := b.run(t, &sample{data: dial(fmt.Sprint("10.0.0.1:", 1000+i/2)).nextSegment(client, syn, 0)}, uint64(time.Hour), (*bench).tc); d.Reason == uint32(shaper.QueueFull) {
					full++
				}
			}
			if full == 0 {
				t.Error("the queue was never full")
			}
			var (
				tag   uint64
				short kernelShortKey
				n     int
			)
			for all := b.ShortKeys.Iterate(); all.Next(&tag, &short); n++ {
				if short.NewConns != 1 || meterOf(tag) != meterNumber(0, int(meterNew)) {
					t.Errorf("short is meter %d: %+v", meterOf(tag), short)
				}
			}
			if n != 1 {
				t.Errorf("%d buckets are short", n)
			}
		})
	}
}

// TestDemands_TooMany reports buckets that are unsettled, and what others have used, although there are more of them
// than one report has room for.
func TestDemands_TooMany(t *testing.T) {
	_, p := newWire(t, "manydem"), openPlane(t)
	l := shaper.Limit{
		Name: "per-source", Match: shaper.Match{Attach: []string{"here"}}, Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
		Packets: perSecond(1000), MaxDelay: time.Second, Shared: true,
	}
	p.apply([]shaper.Limit{l}, shaper.Attachment{Name: "here", Interfaces: []string{"manydem0"}, Mode: shaper.AttachPolice})
	const n = shaper.MaxDemands + 2000
	end := p.clock.Boot() + leaky.FromDuration(time.Hour)
	s := shaper.Shares{Lease: shaper.Lease{End: end, AloneAt: end, Cold: shaper.Whole / 2}, Reset: true}
	for i := range n {
		k := shaper.Key{Limit: p.policy.State(0).ID, Address: [16]byte{10: 0xff, 11: 0xff, 12: 10, 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)}}
		s.Given = append(s.Given, shaper.KeyParts{Key: k, Parts: shaper.Whole / 2})
	}
	p.SetShares(s)
	idle := s.Given[n-1].Key
	for tag := range p.tagsOf(idle) {
		if p.kernel.findHot(tag) < 0 { // there may be no room for a few
			idle = s.Given[0].Key
		}
	}
	for i := range p.kernel.hotBuckets {
		p.kernel.hotBuckets[i].Used += 1000
	}
	for tag := range p.tagsOf(idle) {
		b := &p.kernel.hotBuckets[p.kernel.findHot(tag)]
		b.Used = b.Reported
	}
	p.sharing.settled[idle] = uint64(boottime()) + uint64(leaky.Second)*10
	reported := map[shaper.Key]leaky.Time{}
	for range 2 {
		unsettled := false
		for _, d := range p.Demands(nil) {
			reported[d.Key] += d.Used
			unsettled = unsettled || d.Key == idle && d.Unsettled
		}
		if !unsettled {
			t.Error("a bucket that is unsettled was left out")
		}
	}
	for _, g := range s.Given {
		for tag := range p.tagsOf(g.Key) {
			if used := reported[g.Key]; g.Key != idle && p.kernel.findHot(tag) >= 0 && used != 1000 {
				t.Fatalf("%d reported of %v, want 1000", used, g.Key)
			}
		}
	}
}
