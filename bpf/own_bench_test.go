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
)

// BenchmarkOwn reports what a segment of a connection of the proxy costs in the kernel,
// beside one like it that is nobody's: at ingress, where its socket is looked for.
func BenchmarkOwn(b *testing.B) {
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
		mine    bool
		egress  uint32 // the attachment's: replies come in at ingress
		segment func(d *dialogue) []byte
		program func(k *tcpBench) *ebpf.Program
	}{
		{"SYN", true, 0, first, throughLimits},
		{"SYN, nobody's", false, 0, first, throughLimits},
		{"reply", true, 1, answer, throughNotes},
		{"reply, nobody's", false, 1, answer, throughNotes},
	} {
		b.Run(c.name, func(b *testing.B) {
			at := kernelAttachment{Mode: uint32(Police), Ethernet: 1, Keep: 1, IdleTimeout: testIdle, Egress: c.egress}
			k := &tcpBench{bench: newVariant(b, at, nil), t: b, now: uint64(time.Hour)}
			k.forget()
			k.limit(capped(1))
			own := net.ListenConfig{Control: func(_, _ string, rc syscall.RawConn) (err error) {
				return errors.Join(rc.Control(func(fd uintptr) {
					if c.mine {
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
			if n := k.counters().InFlight; (n == 0) != c.mine {
				b.Errorf("%d in flight", n)
			}
		})
	}
}
