package bpf

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/asn"
)

// singleRatePolicy returns a policy with one limit on all packets.
func singleRatePolicy(t *testing.T, rate uint64, table *asn.Table) *shaper.Policy {
	t.Helper()
	l := shaper.Limit{
		Name: "a", Match: shaper.Match{Attach: []string{"here"}}, IPv4Prefix: 32, IPv6Prefix: 64,
		Rate: rate, MaxDelay: 100 * time.Millisecond,
	}
	if table != nil {
		l.Match.ASN = []uint32{1, 2, 3}
	}
	p, err := shaper.New(1024).Compile([]shaper.Limit{l}, nil, []shaper.Attachment{{Name: "here"}}, table, false)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// installPolicyNow activates a policy as a reload does, at the current time.
func (b *bench) installPolicyNow(t *testing.T, p *shaper.Policy) numbers {
	t.Helper()
	n, err := b.assignNumbers(p, []shaper.Attachment{{Name: "here"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.installPolicy(p, n, monotonic); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestRescale_ConcurrentPackets lowers the rate while a source sends within both rates: it loses
// no packets.
func TestRescale_ConcurrentPackets(t *testing.T) {
	t.Parallel()
	b := newVariant(t, kernelConfig{Mode: programModes[shaper.AttachPolice], Ethernet: 1, Keep: 1}, nil)
	b.installPolicyNow(t, singleRatePolicy(t, 1e9, nil))
	var end atomic.Bool
	var sending sync.WaitGroup
	sending.Go(func() {
		for !end.Load() { // less than 1 Mbit/s
			if _, err := b.ShaperdTc.Run(&ebpf.RunOptions{Data: datagram(1)}); err != nil {
				t.Error(err)
			}
			time.Sleep(800 * time.Microsecond)
		}
	})
	time.Sleep(200 * time.Millisecond)
	before := b.totals(t)
	b.installPolicyNow(t, singleRatePolicy(t, 1e7, nil))
	time.Sleep(500 * time.Millisecond)
	testutil.WaitFor(t, "packets that are taken", func() bool { return b.totals(t).taken >= before.taken+50 })
	end.Store(true)
	sending.Wait()
	after := b.totals(t)
	if after.refused > before.refused {
		t.Errorf("%d packets taken, %d refused", after.taken-before.taken, after.refused-before.refused)
	}
}

// TestRescale_DrainedBucket lets a bucket drain during a slow swap: it stays drained.
func TestRescale_DrainedBucket(t *testing.T) {
	t.Parallel()
	_, table := fullTable(t)
	b := newVariant(t, kernelConfig{Mode: programModes[shaper.AttachPolice], Ethernet: 1, Keep: 1}, nil)
	n := b.installPolicyNow(t, singleRatePolicy(t, 1e9, table))
	slow := singleRatePolicy(t, 1e6, table)
	bucket := &b.buckets[7]
	bucket.Tag[0] = meterNumber(n.limits["a"], 0)<<tagMeterShift | 5
	bucket.DrainedAt[0] = uint64(monotonic() + leaky.FromDuration(5*time.Millisecond))
	b.installPolicyNow(t, slow)
	if backlog := leaky.Time(bucket.DrainedAt[0]).Sub(monotonic()); backlog > 0 {
		t.Errorf("a backlog of %v", backlog.Duration())
	}
}
