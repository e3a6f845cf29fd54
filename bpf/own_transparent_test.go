package bpf

import (
	"context"
	"errors"
	"math"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/shaper"
)

// TestOwnTransparent has the proxy listen at an address of another host, to which the route of
// its packets leads: limits at attachments do not count its connections.
func TestOwnTransparent(t *testing.T) {
	b := &ownBench{ownNet: ownNets["IPv4"], from: newHost(t), to: newHost(t)}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	b.from.connect("inside", b.inside, b.client)
	b.to.connect("outside", b.outside, b.server)
	run := func(command string) {
		t.Helper()
		if out, err := exec.Command("sh", "-c", command).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", command, err, out)
		}
	}
	run(strings.Join([]string{
		"ip link set lo up",
		"ip rule add fwmark 77 lookup 77",
		"ip route add local 0.0.0.0/0 dev lo table 77",
		"nft 'table inet test { chain in { type filter hook prerouting priority mangle; " +
			"iifname inside ip daddr 10.2.0.2 tcp dport 80 meta mark set 77 tproxy ip to 10.2.0.2:80 accept; }; }'",
	}, " && "))
	t.Cleanup(func() {
		run("nft delete table inet test && ip rule del fwmark 77 lookup 77 && ip route flush table 77")
	})
	b.testPlane = openPlane(t)
	own := b.control(true)
	config := net.ListenConfig{Control: func(network, address string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1)
		}), err, own(network, address, c))
	}}
	server := at(b.server, 80)
	b.serve(&config, "tcp4", server)
	b.to.do(func() error { b.listen(false, netip.AddrPortFrom(b.any, 81)); return nil })
	b.listeners = []netip.AddrPort{netip.MustParseAddrPort(server)}
	connect := func() (c net.Conn) {
		t.Helper()
		b.from.do(func() (err error) {
			if c, err = b.connect(&net.Dialer{Timeout: time.Second}, server); err == nil && c == nil {
				err = context.DeadlineExceeded
			}
			return err
		})
		return c
	}
	for _, hook := range hooks(t) {
		t.Run(hook.String(), func(t *testing.T) {
			b.t = t
			before := connect()
			l := shaper.Limit{Name: "cap", Match: shaper.Match{Attach: []string{"here"}}, Connections: 1, Excess: shaper.ExcessDrop}
			b.apply([]shaper.Limit{l}, Attachment{
				Name: "here", Interfaces: []string{"inside"}, Ingress: true, Mode: Police, Hook: hook, IdleTimeout: time.Hour,
			})
			first, second := connect(), connect()
			b.chat(before, first, second)
			b.wantInFlight(0)
			b.wantAt(at(b.server, 81), 2, 1) // what is forwarded is counted
			b.wantInFlight(1)
			b.forgottenAll(math.MaxUint32)
			b.chat(before, first, second)
			b.forgottenAll(0)
			b.apply(nil)
		})
	}
}
