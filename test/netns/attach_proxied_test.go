package netns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// TestAttach_ProxiedConnectionsCountOnce has proxied connections cross an attachment whose limit
// must count only the others: connections that existed before the attachment, and new ones.
// Listeners change meanwhile.
func TestAttach_ProxiedConnectionsCountOnce(t *testing.T) {
	for _, f := range families {
		for _, ingress := range []bool{true, false} {
			for _, routes := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s, ingress %v, routes %v", f.name, ingress, routes), func(t *testing.T) {
					testAttachProxied(t, f, ingress, routes)
				})
			}
		}
	}
}

func testAttachProxied(t *testing.T, f family, ingress, routes bool) {
	n := newNetwork(t)
	if routes {
		n.forward(t)
	}
	s := n.downstream.newSink(t, f.tcp())
	second := netip.AddrPortFrom(f.alias, tcpPort+1)
	n.downstream.serveTCP(t, netip.AddrPortFrom(f.downstream, second.Port()), s.drain)
	pins := newPinPath(t)
	const proxied, maxOthers = 12, 3
	door := limit("door", onTCP, keyAll, fmt.Sprintf("max_connections = %d", proxied), `queue_timeout = "50ms"`)
	others := limit("others", `match = { attach = ["wall"], protocol = "tcp" }`, fmt.Sprintf("max_connections = %d", maxOthers))
	at := attach(lab.MiddleRight, "police")
	from, source, to := n.shaper, f.inner, f.tcp()
	if ingress {
		at = strings.Replace(attach(lab.MiddleLeft, "police"), "egress", "ingress", 1)
		from, source = n.client, f.sources[1]
		if !routes {
			to = netip.AddrPortFrom(f.proxy, tcpPort+2)
			n.shaper.newSink(t, to)
		}
	}
	text := func(attached bool, listeners ...netip.AddrPort) string {
		text := config(f, door)
		var more strings.Builder
		for _, l := range listeners {
			fmt.Fprintf(&more, ", %q", "tcp://"+l.String())
		}
		first := fmt.Sprintf("%q", fmt.Sprintf("tcp://%v", netip.AddrPortFrom(f.any, tcpPort)))
		text = strings.Replace(text, first, first+more.String(), 1)
		text = strings.Replace(text, unusedPinPath, pins, 1)
		if attached {
			text += fmt.Sprintf("\n[[attach]]\n%s\n\n[[limit]]\n%s\n", at, others)
		}
		return text
	}

	d := n.shaper.shaperd(t, text(false))
	all := []*bulk{
		n.client.newBulk(t, f.sources[0], f.listenAddr(), 4, 'p'),
		from.newBulk(t, source, to, 2, 'o'),
	}
	s.wait(t, 'p', 4, patience)
	d.reload(text(true))
	sendOnAll := func(inFlight float64) {
		t.Helper()
		for range 3 {
			for _, b := range all {
				if err := b.send(1); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(20 * time.Millisecond)
		}
		waitFor(t, patience, func() error {
			m := d.metrics()
			if got := m.Sum("in_flight", `limit="others"`); got != inFlight {
				return fmt.Errorf("%v connections are in flight, want %v\n%s", got, inFlight, m)
			}
			return nil
		})
	}
	sendOnAll(2)

	d.reload(text(true, second))
	all = append(all,
		n.client.newBulk(t, f.sources[0], f.listenAddr(), 4, 'q'),
		n.client.newBulk(t, f.sources[0], second, 4, 'r'),
		from.newBulk(t, source, to, 1, 's'),
	)
	s.wait(t, 'q', 4, patience)
	s.wait(t, 'r', 4, patience)
	sendOnAll(3)
	if err := from.dialUntilClosed(source, to); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a connection beyond limit others ended with %v", err)
	}
	if err := n.client.dialUntilClosed(f.sources[0], f.listenAddr()); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a connection beyond the proxy's limit ended with %v", err)
	}

	// Connections of a removed listener are still proxied connections.
	d.reload(text(true))
	sendOnAll(3)
	// For connections that existed before the attachment, the sequence window of a valid reset is
	// unknown, so a reset from the initiator counts only after some silence.
	must(t, all[1].each((*net.TCPConn).CloseWrite))
	for _, b := range all {
		if b != all[1] {
			b.abort()
		}
	}
	waitFor(t, patience, func() error {
		m := d.metrics()
		if got := m.Sum("in_flight"); got != 0 {
			return fmt.Errorf("%v connections are in flight at the end", got)
		}
		return nil
	})
	d.terminate()
	d.waitExit(patience)
	n.shaper.mustBeClean(t, pins)
}
