package netns

import (
	"bytes"
	"fmt"
	"net/netip"
	"testing"
	"time"
)

// TestUDPReplies has datagrams of all sizes go there and back whole, and come
// back from the address that they were sent to: the shaper has several.
func TestUDPReplies(t *testing.T) {
	for _, f := range families {
		t.Run(f.name, func(t *testing.T) {
			n := newNetwork(t)
			n.downstream.echoUDP(t, f.udp())
			n.shaper.shaperd(t, config(f, limit("both-ways", onUDP, keySource,
				`direction = "both"`, `packets = "1000pps"`, `max_delay = "1s"`)))
			for _, at := range []netip.Addr{f.proxy, f.alias, f.inner} {
				asked := netip.AddrPortFrom(at, udpPort)
				c := n.client.listenUDP(t, netip.AddrPortFrom(f.sources[0], 0))
				buf := make([]byte, 1<<16)
				for _, size := range []int{1, 0, 512, 1452, 1473, 2000, 9000, 32768, 65507} {
					want := noise(size)
					if _, err := c.WriteToUDPAddrPort(want, asked); err != nil {
						t.Fatalf("send %d bytes: %v", size, err)
					}
					if err := c.SetReadDeadline(time.Now().Add(3 * time.Second)); err != nil {
						t.Fatal(err)
					}
					got, from, err := c.ReadFromUDPAddrPort(buf)
					if err != nil {
						t.Errorf("%d bytes to %v do not come back: %v", size, asked, err)
						continue
					}
					if from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port()); from != asked {
						t.Errorf("%d bytes to %v come back from %v", size, asked, from)
					}
					if !bytes.Equal(buf[:got], want) {
						t.Errorf("%d bytes to %v come back as %d others", size, asked, got)
					}
				}
			}
		})
	}
}

// TestUDPFlows has several sources and ports at once: each gets its own replies.
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
					if _, err := c.WriteToUDPAddrPort(want, f.udpDoor()); err != nil {
						return err
					}
					if err := c.SetReadDeadline(time.Now().Add(3 * time.Second)); err != nil {
						return err
					}
					got, _, err := c.ReadFromUDPAddrPort(buf)
					if err != nil {
						return fmt.Errorf("%q: %w", want, err)
					}
					if !bytes.Equal(buf[:got], want) {
						return fmt.Errorf("%q comes back as %q", want, buf[:got])
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
