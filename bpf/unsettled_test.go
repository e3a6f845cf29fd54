package bpf

import (
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// anyUnsettled reports whether p says that something is yet to leave.
func anyUnsettled(p *testPlane) bool {
	for _, d := range p.Demands(nil) {
		if d.Unsettled {
			return true
		}
	}
	return false
}

// TestUnsettled lets packets wait while the host leaves, and while another daemon takes over.
func TestUnsettled(t *testing.T) {
	t.Parallel()
	_, p := newWire(t, "unsettle"), openPlane(t)
	l := shaper.Limit{
		Name: "per-source", Match: shaper.Match{Attach: []string{"here"}}, Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
		Packets: perSecond(100), MaxDelay: 30 * time.Second, Shared: true,
	}
	a := shaper.Attachment{Name: "here", Interfaces: []string{"unsettle0"}, Mode: shaper.AttachPolice, OnStop: shaper.StopKeep}
	p.apply([]shaper.Limit{l}, a)
	key := shaper.Key{Limit: p.policy.State(0).ID, Address: [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 2}}
	join := func() {
		end := p.clock.Boot() + leaky.FromDuration(time.Hour)
		p.SetShares(shaper.Shares{
			Lease: shaper.Lease{End: end, AloneAt: end, Cold: shaper.Whole / 2}, Reset: true,
			Given: []shaper.KeyParts{{Key: key, Parts: shaper.Whole}},
		})
	}
	wait := func(long time.Duration) { // as packets do that are shaped
		until := uint64(boottime() + leaky.FromDuration(long))
		for tag := range p.tagsOf(key) {
			b := &p.kernel.hotBuckets[p.kernel.findHot(tag)]
			b.Last, b.EmptyAt = until, until
		}
	}
	want := func(what string, want bool) {
		t.Helper()
		if got := anyUnsettled(p); got != want {
			t.Errorf("%s: unsettled %v", what, got)
		}
	}
	// Packets wait for longer than a stall, and than a busy machine takes to open a plane.
	const settles, settlesLate = 2 * time.Second, 10 * time.Second
	join()
	want("nothing was sent", false)
	until := time.Now().Add(settles)
	wait(settles)
	p.SetShares(shaper.Shares{Reset: true})
	want("the host leaves", true)
	time.Sleep(time.Until(until.Add(time.Second))) // wait reads the clock later
	want("all has left", false)
	join()
	until = time.Now().Add(settlesLate)
	wait(settlesLate)
	p.crash()
	p.open()
	p.apply([]shaper.Limit{l}, a)
	begun := time.Now()
	p.SetShares(shaper.Shares{})
	if took := time.Since(begun); took > 3*time.Second {
		t.Errorf("the first call of SetShares took %v", took)
	}
	want("another daemon", true)
	time.Sleep(time.Until(until.Add(time.Second)))
	want("all has left that was enqueued before", false)
}

// TestTakeover_SharesOfLease takes over within the lease of the daemon before, of which this host had no parts.
func TestTakeover_SharesOfLease(t *testing.T) {
	w, p := newWire(t, "takeover"), openPlane(t)
	l := shaper.Limit{Name: "total", Match: shaper.Match{Attach: []string{"here"}}, Packets: perSecond(1e6), Shared: true, BurstPackets: 1000}
	a := shaper.Attachment{Name: "here", Interfaces: []string{"takeover0"}, Mode: shaper.AttachPolice, OnStop: shaper.StopKeep}
	p.apply([]shaper.Limit{l}, a)
	end := p.clock.Boot() + leaky.FromDuration(time.Hour)
	key := shaper.Key{Limit: p.policy.State(0).ID}
	p.SetShares(shaper.Shares{Lease: shaper.Lease{End: end, AloneAt: end, Cold: shaper.Whole / 2}, Reset: true, Given: []shaper.KeyParts{{Key: key, Parts: 0}}})
	time.Sleep(10 * time.Millisecond)
	w.want(p, 1, 100, 0)
	p.crash()
	p.open()
	w.want(p, 1, 100, 0)
	p.apply([]shaper.Limit{l}, a)
	time.Sleep(10 * time.Millisecond)
	w.want(p, 1, 100, 0)
}
