package bpf

import (
	"fmt"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// TestSetShares follows what a plane's packets may use, when it is told and when nobody tells.
func TestSetShares(t *testing.T) {
	w, p := newWire(t, "share"), openPlane(t)
	l := shaper.Limit{
		Name: "per-source", Match: shaper.Match{Attach: []string{"here"}}, Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
		Packets: perSecond(1e6), BurstPackets: 100, Shared: true,
	}
	a := shaper.Attachment{Name: "here", Interfaces: []string{"share0"}, Mode: shaper.AttachPolice, OnStop: shaper.StopKeep}
	p.apply([]shaper.Limit{l}, a)
	lease := func(d time.Duration, alone uint32) shaper.Lease {
		end := p.clock.Boot() + leaky.FromDuration(d)
		return shaper.Lease{End: end, AloneAt: end, Cold: shaper.Whole, Alone: alone}
	}
	set := func(s shaper.Shares) {
		p.SetShares(s)
		time.Sleep(time.Millisecond) // parts that grow bring no credit
	}
	key := shaper.Key{Limit: p.policy.State(0).ID, Address: [16]byte{10: 0xff, 11: 0xff, 12: 10, 15: 1}}

	w.want(p, 1, 10, 0) // before the first call
	set(shaper.Shares{Lease: lease(time.Hour, 0)})
	w.want(p, 1, 10, 10)
	set(shaper.Shares{Lease: lease(time.Hour, 0), Given: []shaper.KeyParts{{Key: key, Parts: 0}}})
	w.want(p, 1, 10, 0)
	w.want(p, 2, 10, 10)
	l.Name = "other"
	p.apply([]shaper.Limit{l}, a)
	key.Limit = p.policy.State(0).ID
	time.Sleep(time.Millisecond)
	w.want(p, 1, 10, 10)
	set(shaper.Shares{Lease: lease(time.Hour, 0), Given: []shaper.KeyParts{{Key: key, Parts: 0}}})
	l.BurstPackets = 200
	p.apply([]shaper.Limit{l}, a)
	w.want(p, 1, 10, 0)
	set(shaper.Shares{Lease: lease(time.Hour, 0), Cold: []shaper.Key{key}})
	w.want(p, 1, 10, 10)
	set(shaper.Shares{Lease: lease(time.Hour, 0), Given: []shaper.KeyParts{{Key: key, Parts: 0}}})
	set(shaper.Shares{Lease: lease(2*time.Second, 0), Reset: true}) // longer than a stall before the next packets
	w.want(p, 1, 10, 10)
	p.crash()
	time.Sleep(2 * time.Second)
	w.want(p, 1, 10, 0)
	p.open()
	w.want(p, 1, 10, 0)
	set(shaper.Shares{Lease: lease(0, shaper.Whole)})
	w.want(p, 1, 10, 10)
}

// TestSetShares_Connections admits connections in flight and new ones under limits that two hosts share.
func TestSetShares_Connections(t *testing.T) {
	t.Parallel()
	b := newBench(t, kernelConfig{Mode: programModes[shaper.AttachPolice], Ethernet: 1, Keep: 1})
	limit := shaper.Limit{Name: "connections", Match: shaper.Match{Attach: []string{"here"}}, Shared: true}
	dials := func(from, n int) (admitted int) {
		for i := range n {
			now := uint64(time.Hour) + uint64(from+i)*uint64(time.Millisecond)
			if action, _, _ := b.run(t, &sample{data: dial(fmt.Sprint("10.0.0.1:", 1000+from+i)).nextSegment(client, syn, 0)}, now, (*bench).tc); action == tcNext {
				admitted++
			}
		}
		return admitted
	}
	lease := func(hosts uint64, at time.Duration) {
		boot := uint64(leaky.FromDuration(time.Hour + at))
		b.kernel.setShares(&shareChange{lease: kernelLease{End: boot + 1<<50, AloneAt: boot + 1<<50, Hosts: hosts, Cold: kernelShare{Parts: shaper.Whole / 2}}}, leaky.Time(boot), boot)
	}
	limit.MaxConnections = 5
	b.loadLimits(t, []shaper.Limit{limit}, nil)
	for _, c := range []struct {
		hosts uint64
		want  int
	}{{0, 0}, {2, 2}, {1, 3}} {
		lease(c.hosts, 0)
		if got := dials(100*int(c.hosts), 10); got != c.want {
			t.Errorf("%d more connections with %d hosts, want %d", got, c.hosts, c.want)
		}
	}
	limit.MaxConnections, limit.NewConnections = 0, perSecond(10)
	b.loadLimits(t, []shaper.Limit{limit}, nil)
	lease(2, 500*time.Millisecond)
	if got := dials(1000, 2000); got < 10 || got > 11 { // of 20, in 2 s
		t.Errorf("%d new connections", got)
	}
}

// A lease ends for the programs when it does for the daemon, whose clock may be ahead of theirs or behind.
func TestKernelLease(t *testing.T) {
	uptime := monotonic().Duration()
	for _, age := range []time.Duration{0, uptime, uptime - time.Microsecond, uptime + time.Microsecond, uptime + time.Hour} {
		p := &Plane{clock: pacer.NewClockAt(age)}
		for _, in := range []time.Duration{-time.Second, 0, time.Second} {
			before := boottime().Duration()
			at := p.clock.Boot() + 2*leaky.Second
			l := p.kernelLease(&shaper.Lease{End: at.Add(leaky.FromDuration(time.Second + in)).Sub(leaky.Second), AloneAt: at})
			boot := boottime().Duration()
			slack := time.Second/2 + boot - before // a stall between two readings of clocks ends a lease sooner, and makes a host alone later
			if end := leaky.Time(l.End).Duration() - boot - 2*time.Second - in; end < -slack || end > time.Millisecond/10 {
				t.Errorf("with a clock %v old, a lease ends %v late", age, end)
			}
			if alone := leaky.Time(l.AloneAt).Duration() - boot - 2*time.Second; alone < -slack || alone > slack {
				t.Errorf("with a clock %v old, a host is alone %v late", age, alone)
			}
		}
	}
}
