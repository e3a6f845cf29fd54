package bpf

import (
	"errors"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/shaper"
)

// A cap stays enforced after a daemon is killed, and the next daemon continues with the
// count, which also falls when connections end while no daemon runs.
func TestCap_SurvivesDaemon(t *testing.T) {
	for _, hook := range hooks(t) {
		t.Run(hook.String(), func(t *testing.T) {
			const most = 5
			from, to := newHost(t), newHost(t)
			from.connect("inside", "10.1.0.1/24", "10.1.0.2/24")
			to.connect("outside", "10.2.0.1/24", "10.2.0.2/24")
			if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
				t.Fatal(err)
			}
			server := &countingServer{}
			to.do(func() (err error) {
				server.Listener, err = net.Listen("tcp", "10.2.0.2:80")
				return err
			})
			var served sync.WaitGroup
			served.Go(server.serve)
			t.Cleanup(func() { _ = server.Close(); served.Wait() })
			// At a veth, XDP breaks offloaded checksums, and cannot reply to a peer
			// without NAPI.
			silent := hook == shaper.HookXDP
			if silent {
				from.do(func() error {
					eth0, err := netlink.LinkByName("eth0")
					if err == nil {
						withoutOffload(t, eth0)
					}
					return err
				})
			}
			dial := func(n int) (open []net.Conn) {
				for range n {
					from.do(func() error {
						c, err := net.DialTimeout("tcp", "10.2.0.2:80", 300*time.Millisecond)
						var timeout net.Error
						switch {
						case err == nil:
							open = append(open, c)
						case silent && errors.As(err, &timeout) && timeout.Timeout():
						case !silent && errors.Is(err, syscall.ECONNREFUSED):
						default:
							t.Error(err)
						}
						return nil
					})
				}
				return open
			}

			p := openPlane(t)
			l := shaper.Limit{Name: "cap", Match: shaper.Match{Attach: []string{"here"}}, MaxConnections: most}
			if silent {
				l.RefuseWith = shaper.RefuseDrop
			}
			a := shaper.Attachment{Name: "here", Interfaces: []string{"inside"}, Direction: shaper.Ingress, Mode: shaper.AttachPolice, Hook: hook, OnStop: shaper.StopKeep, IdleTimeout: time.Hour}
			p.apply([]shaper.Limit{l}, a)
			open := dial(10)
			if len(open) != most {
				t.Fatalf("%d connections, want %d", len(open), most)
			}
			if _, err := p.Status(); err != nil {
				t.Error(err)
			}
			if n := p.policy.State(0).InFlight.Load(); n != most {
				t.Errorf("%d in flight, want %d", n, most)
			}
			p.crash()
			if more := dial(5); len(more) != 0 {
				t.Errorf("%d more while no daemon ran", len(more))
			}
			_ = open[0].Close()
			within(t, 15*time.Second, func() bool {
				more := dial(1)
				open = append(open, more...)
				return len(more) == 1
			})
			p.open()
			p.apply([]shaper.Limit{l}, a)
			if more := dial(5); len(more) != 0 {
				t.Errorf("%d more after a restart", len(more))
			}
			for _, c := range open {
				_ = c.Close()
			}
			within(t, 15*time.Second, func() bool {
				again := dial(most)
				for _, c := range again {
					_ = c.Close()
				}
				return len(again) == most
			})
			p.crash()
			if err := Detach(p.pins); err != nil {
				t.Fatal(err)
			}
			p.Plane = nil
		})
	}
}
