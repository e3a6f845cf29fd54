package bpf

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/shaper"
)

// BenchmarkProxied reports the cost of a segment of a proxied connection in the kernel, and of one
// without a socket: at ingress, where the socket is looked up.
func BenchmarkProxied(b *testing.B) {
	const lo = 1
	l, err := netlink.LinkByIndex(lo)
	if err == nil {
		err = netlink.LinkSetUp(l)
	}
	for _, address := range []string{"10.0.0.1/32", testServer.Addr().String() + "/32"} {
		a, _ := netlink.ParseAddr(address)
		err = errors.Join(err, netlink.AddrReplace(l, a))
		b.Cleanup(func() { _ = netlink.AddrDel(l, a) })
	}
	if err != nil {
		b.Fatal(err)
	}
	for _, c := range []struct {
		name    string
		proxied bool
		egress  uint32 // the attachment's: replies come in at ingress
		segment func(d *dialogue) []byte
		program func(k *tcpBench) *ebpf.Program
	}{
		{"SYN", true, 0, synSegment, limitProgram},
		{"SYN, not proxied", false, 0, synSegment, limitProgram},
		{"reply", true, 1, replySegment, replyProgram},
		{"reply, not proxied", false, 1, replySegment, replyProgram},
	} {
		b.Run(c.name, func(b *testing.B) {
			at := kernelConfig{Mode: programModes[shaper.AttachPolice], Ethernet: 1, Keep: 1, IdleTimeout: testIdleTimeout, Egress: c.egress}
			k := &tcpBench{bench: newVariant(b, at, nil), t: b, now: uint64(time.Hour)}
			k.clearMaps()
			k.setLimits(capped(1))
			own := net.ListenConfig{Control: func(_, _ string, rc syscall.RawConn) (err error) {
				return errors.Join(rc.Control(func(fd uintptr) {
					if c.proxied {
						err = k.Proxied.Put(int32(fd), uint32(1))
					}
				}), err)
			}}
			own.SetMultipathTCP(false)
			listener, err := own.Listen(b.Context(), "tcp4", testServer.String())
			if err != nil {
				b.Fatal(err)
			}
			defer listener.Close()
			dialer := net.Dialer{Control: own.Control, LocalAddr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort("10.0.0.1:0"))}
			client, err := dialer.Dial("tcp4", testServer.String())
			if err != nil {
				b.Fatal(err)
			}
			defer client.Close()
			packet := c.segment(dial(client.LocalAddr().String()))
			clear(packet[:6]) // to lo itself
			_, took, err := c.program(k).Benchmark(packet, b.N, nil)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(took.Nanoseconds()), "ns/op")
			if n := k.counters().InFlight; (n == 0) != c.proxied {
				b.Errorf("%d in flight", n)
			}
		})
	}
}
