package bpf

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// shapedBucket is one bucket of 1000 packets a second that hosts share, whose packets are shaped. Instants are those
// after an hour.
type shapedBucket struct {
	*bench
	t         *testing.T
	tag, hash uint64
	meters    map[uint64]sharedMeter
}

func newShapedBucket(t *testing.T, l shaper.Limit, others ...shaper.Limit) *shapedBucket {
	b := newBench(t, kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1})
	l.Name, l.Packets, l.Shared = "shared", perSecond(1000), true
	p, err := shaper.New(testKeys).Compile(attachHere(append(others, l)...), nil, []shaper.Attachment{{Name: "here"}}, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	b.loadPolicy(t, p)
	m := kernelMeter{Tag: meterNumber(uint32(p.Find(l.Name)), int(meterPackets))<<tagMeterShift | neverEvicted | sharedTag}
	for i := range m.Hash {
		m.Hash[i] = b.Hashes[keyWords-1][i] * meterOf(m.Tag)
	}
	hash := join(&m, [2]uint64{})
	meter := sharedMeter{maxDelay: uint64(leaky.FromDuration(l.MaxDelay)), burst: uint64(l.BurstPackets) * uint64(leaky.Second) / 1000}
	return &shapedBucket{b, t, m.Tag | hash&tagHash, hash, map[uint64]sharedMeter{meterOf(m.Tag): meter}}
}

func (b *shapedBucket) boot(at time.Duration) uint64 {
	return uint64(leaky.FromDuration(time.Hour + at))
}

// change puts c into effect, under a lease for a second of one of n hosts. It returns when the bucket is settled.
func (b *shapedBucket) change(at time.Duration, n uint64, c shareChange) time.Duration {
	floor := shaper.Whole / n
	c.lease = kernelLease{
		End: b.boot(at + 980*time.Millisecond), AloneAt: b.boot(at + 2*time.Second),
		Between: floor, Alone: floor, Cold: kernelShare{Parts: floor},
	}
	c.meters = b.meters
	b.kernel.setShares(&c, leaky.Time(b.boot(at)), b.boot(at))
	if c.settled[b.tag] == 0 {
		return 0
	}
	return leaky.Time(c.settled[b.tag]).Duration() - time.Hour
}

func (b *shapedBucket) give(at time.Duration, parts uint64) (settled time.Duration) {
	return b.change(at, 2, shareChange{hot: map[uint64]hotParts{b.tag: {parts, b.hash}}})
}

// send returns when a packet leaves.
func (b *shapedBucket) send(at time.Duration) (depart time.Duration, ok bool) {
	_, d, _ := b.run(b.t, &sample{data: datagram(1)}, uint64(time.Hour+at), (*bench).tc)
	return leaky.Time(d.Depart).Duration() - time.Hour, d.Verdict != uint32(shaper.Refuse)
}

// fill sends n packets at once, and returns when the last one leaves.
func (b *shapedBucket) fill(at time.Duration, n int) (last time.Duration) {
	for range n {
		if d, ok := b.send(at); ok {
			last = max(last, d)
		}
	}
	if last <= at {
		b.t.Fatal("no packet waits")
	}
	return last
}

// TestDepartures_Renewals renews the lease of a host that has the whole, all the time, while twice as many packets
// come as may pass, with a pause: they keep to the limit and to their order.
func TestDepartures_Renewals(t *testing.T) {
	t.Parallel()
	other := shaper.Limit{Name: "source", Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Packets: perSecond(1e6), MaxDelay: 5 * time.Second}
	for _, c := range []struct {
		maxDelay time.Duration
		burst    uint64
		hosts    uint64
		others   []shaper.Limit
	}{
		{200 * time.Millisecond, 0, 2, nil},
		{time.Second, 0, 2, nil},
		{2 * time.Second, 0, 4, nil},
		{5 * time.Second, 0, 2, nil},
		{5 * time.Second, 50, 10, nil},
		{5 * time.Second, 0, 10, []shaper.Limit{other}}, // charged on arrival
		{5 * time.Second, 50, 2, []shaper.Limit{other}},
	} {
		t.Run(fmt.Sprint(c.maxDelay, c.burst, c.hosts, len(c.others)), func(t *testing.T) {
			b := newShapedBucket(t, shaper.Limit{MaxDelay: c.maxDelay, BurstPackets: c.burst}, c.others...)
			b.change(0, c.hosts, shareChange{hot: map[uint64]hotParts{b.tag: {shaper.Whole, b.hash}}})
			var departs []time.Duration
			pause := 6 * time.Second
			for at := time.Duration(0); at < pause+c.maxDelay+3*time.Second; at += 500 * time.Microsecond {
				if at%(100*time.Millisecond) == 0 && at > 0 {
					b.change(at, c.hosts, shareChange{})
				}
				if at > pause && at < pause+c.maxDelay*8/10 {
					continue
				}
				if d, ok := b.send(at); ok {
					departs = append(departs, d)
				}
			}
			overtakers := 0
			for i, d := range departs {
				if i > 0 && d < departs[i-1] {
					overtakers++
				}
			}
			slices.Sort(departs)
			most, least := 0.0, 0.0
			for i, d := range departs {
				beyond := float64(i) - 1000*(d-departs[0]).Seconds()
				least = min(least, beyond)
				most = max(most, beyond+1-least)
			}
			t.Logf("%d packets, %d overtake; excess %.1f", len(departs), overtakers, most)
			if most > float64(c.burst)+2 || overtakers > 0 {
				t.Errorf("%d packets, of which %d overtake, exceed the limit by %.1f", len(departs), overtakers, most)
			}
			if least := 8500; len(departs) < least { // in 9 s, and what waits
				t.Errorf("%d packets leave, want %d", len(departs), least)
			}
		})
	}
}

// TestDepartures_Settled takes the parts of a bucket whose packets wait.
func TestDepartures_Settled(t *testing.T) {
	t.Parallel()
	t.Run("after they have grown", func(t *testing.T) {
		b := newShapedBucket(t, shaper.Limit{MaxDelay: time.Second})
		b.give(0, shaper.Whole/4)
		last := b.fill(time.Millisecond, 400)
		b.give(10*time.Millisecond, shaper.Whole)
		if settled := b.give(500*time.Millisecond, 0); settled < last {
			t.Errorf("settled at %v, the last packet leaves at %v", settled, last)
		}
	})
	t.Run("those of the next phase", func(t *testing.T) {
		b := newShapedBucket(t, shaper.Limit{MaxDelay: 5 * time.Second})
		b.give(0, 0)
		last := b.fill(time.Millisecond, 4000)
		if settled := b.give(50*time.Millisecond, 0); settled < last {
			t.Errorf("renewed without parts: settled at %v, the last packet leaves at %v", settled, last)
		}
		b.give(100*time.Millisecond, shaper.Whole)
		if d, ok := b.send(1700 * time.Millisecond); ok && d < last {
			t.Errorf("overtaken by a packet that leaves at %v, the last one at %v", d, last)
		}
		if settled := b.give(1800*time.Millisecond, 0); settled < last {
			t.Errorf("settled at %v, the last packet leaves at %v", settled, last)
		}
	})
	t.Run("and it is cold then", func(t *testing.T) {
		b := newShapedBucket(t, shaper.Limit{MaxDelay: time.Second})
		b.give(0, shaper.Whole/4)
		last := b.fill(time.Millisecond, 400)
		b.give(10*time.Millisecond, shaper.Whole)
		if settled := b.change(500*time.Millisecond, 2, shareChange{cold: []uint64{b.tag}}); settled < last {
			t.Errorf("settled at %v, the last packet leaves at %v", settled, last)
		}
		if d, ok := b.send(600 * time.Millisecond); ok && d < last {
			t.Errorf("overtaken by a packet that leaves at %v, the last one at %v", d, last)
		}
	})
	t.Run("another limit delays them for longer", func(t *testing.T) {
		wide := shaper.Limit{Name: "wide", Packets: perSecond(100), MaxDelay: 2 * time.Second}
		b := newShapedBucket(t, shaper.Limit{MaxDelay: 10 * time.Millisecond, BurstPackets: 200}, wide)
		b.change(0, 2, shareChange{hot: map[uint64]hotParts{b.tag: {shaper.Whole, b.hash}}})
		last := b.fill(500*time.Millisecond, 20)
		if last < 650*time.Millisecond {
			t.Fatalf("the last packet leaves at %v", last)
		}
		if settled := b.give(510*time.Millisecond, 0); settled < last {
			t.Errorf("settled at %v, the last packet leaves at %v", settled, last)
		}
	})
}

// TestDepartures_Cold finds when all has left of a bucket that is cold.
func TestDepartures_Cold(t *testing.T) {
	b := newShapedBucket(t, shaper.Limit{MaxDelay: time.Second})
	b.change(0, 2, shareChange{})
	last := b.fill(time.Second, 200)
	lease := b.kernel.lease()
	late := leaky.Time(b.kernel.lastSharedDeparture(&lease, b.meters, b.boot(time.Second))).Duration() - time.Hour - last
	if late < 0 || late > 3*time.Millisecond {
		t.Errorf("all has left %v after the last packet", late)
	}
}

// TestSetShares_HeatIdle makes a bucket hot that has been idle: its value is the one that a charge begins with. If it were
// less, packets charged at that time, one to the cold bucket and one to the hot one, would cost it the idle time.
func TestSetShares_HeatIdle(t *testing.T) {
	for _, burst := range []uint64{0, 100} {
		t.Run(fmt.Sprint(burst), func(t *testing.T) {
			b := newShapedBucket(t, shaper.Limit{MaxDelay: time.Second, BurstPackets: burst})
			b.change(0, 2, shareChange{})
			b.send(500 * time.Millisecond)
			b.give(10*time.Second, shaper.Whole/2)
			lease := b.kernel.lease()
			share, _ := lease.advance(lease.Cold, 0, 0, b.boot(10*time.Second))
			got, want := b.kernel.hotBuckets[b.kernel.findHot(b.tag)].Value, share.drained(burst*uint64(leaky.Second)/1000)
			if got != want {
				t.Errorf("its value is %d, want %d", got, want)
			}
		})
	}
}
