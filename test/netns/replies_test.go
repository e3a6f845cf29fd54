package netns

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"
	"time"
)

// TestUDPReplies checks that datagrams of all sizes are echoed unchanged, and that
// replies come from the address that the request was sent to: the shaper has several.
func TestUDPReplies(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			n := newNetwork(t)
			n.downstream.echoUDP(t, f.udp())
			n.shaper.shaperd(t, config(f, limit("both-ways", onUDP, keySource,
				`direction = "both"`, `packets = "1000pps"`, `max_delay = "1s"`)))
			for _, at := range []netip.Addr{f.proxy, f.alias, f.inner} {
				to := netip.AddrPortFrom(at, udpPort)
				c := n.client.listenUDP(t, netip.AddrPortFrom(f.sources[0], 0))
				buf := make([]byte, 1<<16)
				for _, size := range []int{1, 0, 512, 1452, 1473, 2000, 9000, 32768, 65507} {
					want := randomBytes(size)
					if _, err := c.WriteToUDPAddrPort(want, to); err != nil {
						t.Fatalf("send %d bytes: %v", size, err)
					}
					if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
						t.Fatal(err)
					}
					got, from, err := c.ReadFromUDPAddrPort(buf)
					if err != nil {
						t.Errorf("no reply to %d bytes to %v: %v", size, to, err)
						continue
					}
					if from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port()); from != to {
						t.Errorf("the reply to %d bytes to %v came from %v", size, to, from)
					}
					if !bytes.Equal(buf[:got], want) {
						t.Errorf("the reply to %d bytes to %v has %d other bytes", size, to, got)
					}
				}
			}
		})
	}
}

// TestUDPFlows checks that concurrent flows of several sources and ports get their own replies.
func TestUDPFlows(t *testing.T) {
	const flows, rounds = 50, 20
	f := ipv4
	n := newNetwork(t)
	n.downstream.echoUDP(t, f.udp())
	n.shaper.shaperd(t, config(f, limit("each", onUDP, `key = ["connection"]`, `packets = "500pps"`, `max_delay = "1s"`)))
	errs := make(chan error, flows)
	for flow := range flows {
		c := n.client.listenUDP(t, netip.AddrPortFrom(f.sources[flow%3], 0))
		go func() {
			errs <- func() error {
				buf := make([]byte, 100)
				for round := range rounds {
					want := fmt.Appendf(nil, "flow %d round %d", flow, round)
					if _, err := c.WriteToUDPAddrPort(want, f.udpListenAddr()); err != nil {
						return err
					}
					if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
						return err
					}
					got, _, err := c.ReadFromUDPAddrPort(buf)
					if err != nil {
						return fmt.Errorf("%q: %w", want, err)
					}
					if !bytes.Equal(buf[:got], want) {
						return fmt.Errorf("%q came back as %q", want, buf[:got])
					}
				}
				return nil
			}()
		}()
	}
	for range flows {
		if err := receive(errs); err != nil {
			t.Error(err)
		}
	}
}
