package netns

import (
	"context"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// packetText returns the configuration of a gateway that limits its packets to the downstream.
func (g *group) packetText(gw *gateway) string {
	return fmt.Sprintf(`[daemon]
observe = false
metrics = %q
pin_path = %q
max_buckets = 4096

[[attach]]
name = "wall"
interface = %q
direction = "egress"
mode = "police"
on_stop = "keep"

[[limit]]
name = "total"
match = { attach = ["wall"], protocol = "udp", port = ["%d"] }
rate = "%dB/s"
burst = "8kB"
max_delay = "0s"
shared = true

[shared]
hosts = %d
%s`, lab.MetricsAddr, gw.pins, lab.StarLink, groupPort, g.rate, groupSize, gw.shared)
}

// flooded makes a gateway send datagrams to the downstream while hot is set: twice what all may together.
func (g *group) flooded(gw *gateway, hot *atomic.Bool) {
	c, err := gw.DialUDP(gw.addr, netip.AddrPortFrom(groupDownstream, groupPort))
	must(g.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		payload := make([]byte, groupDatagram)
		for due, last := 0.0, time.Now(); ctx.Err() == nil; time.Sleep(time.Millisecond) {
			now := time.Now()
			rate := float64(coldDatagrams)
			if hot.Load() {
				rate = 2 * float64(g.rate) / groupDatagram
			}
			due = min(due+rate*now.Sub(last).Seconds(), 20)
			last = now
			for ; due >= 1; due-- {
				_, _ = c.Write(payload) // a policed datagram is an error
			}
		}
	}()
	g.t.Cleanup(func() {
		cancel()
		<-done
		_ = c.Close()
	})
}

// TestGroup_Packets has gateways that limit packets. Each has all the demand, or one of them, while things happen to
// the store; and while a daemon is dead, and its program goes on without.
func TestGroup_Packets(t *testing.T) {
	t.Parallel()
	g := newGroup(t)
	r := g.useRedis()
	var hot [groupSize]atomic.Bool
	setHot := func(gateways ...int) func() {
		return func() {
			for i := range hot {
				hot[i].Store(false)
			}
			for _, i := range gateways {
				hot[i].Store(true)
			}
		}
	}
	for i, gw := range g.gateways {
		gw.pins = newPinPath(t)
		g.start(gw)
		g.flooded(gw, &hot[i])
	}
	const least = 0.2 // of the rate: a busy machine may send no more for a second
	g.run(fault{name: "all hot", inject: setHot(0, 1, 2), after: 2 * time.Second, least: least})
	for i := range g.gateways {
		o := g.run(fault{name: "one hot", inject: setHot(i), after: 2 * time.Second, least: least})
		if o.by[i] < 0.45-o.stalled {
			t.Errorf("%s passed %.0f %% of the rate with all the demand", g.gateways[i].name, 100*o.by[i])
		}
	}
	// The others wake up while a gateway that had all the demand gets nothing new from the ledger.
	outage := func(name string, begin, end func()) {
		t.Helper()
		g.run(fault{name: "one hot", inject: setHot(1), after: 1500 * time.Millisecond, least: least})
		g.run(fault{name: name, inject: func() { begin(); time.AfterFunc(2*time.Second, setHot(0, 1, 2)) }, mend: end, lasts: 4 * time.Second, after: 2 * time.Second, least: least})
	}
	signal := func(s unix.Signal) func() {
		return func() {
			for _, gw := range g.gateways {
				must(t, gw.daemon.Signal(s))
			}
		}
	}
	outage("redis stopped", func() { must(t, r.Signal(unix.SIGSTOP)) }, func() { must(t, r.Signal(unix.SIGCONT)) })
	outage("all daemons stopped", signal(unix.SIGSTOP), signal(unix.SIGCONT))
	dead := g.gateways[1]
	outage("a daemon killed", func() { g.kill(dead) }, func() {})
	o := g.run(fault{name: "its program goes on", after: 3 * time.Second, least: least})
	if share := o.by[1]; share < 0.2-o.stalled || share > 0.36 {
		t.Errorf("a program without a daemon passed %.1f %% of the rate, want a third", 100*share)
	}
	g.run(fault{name: "a daemon again", inject: func() { g.start(dead) }, after: 2 * time.Second, least: least})
}
