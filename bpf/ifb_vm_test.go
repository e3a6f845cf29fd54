//go:build vmguest

package bpf

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/shaper"
)

// TestVMRedirect_KeepsTimestamps checks the receive timestamps of the kernel.
func TestVMRedirect_KeepsTimestamps(t *testing.T) {
	_, far := cable(t, "stamp0", 1)
	p := openPlane(t)
	p.apply([]shaper.Limit{{
		Name: "l", Match: shaper.Match{Attach: []string{"here"}}, Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
		Packets: shaper.Frequency{N: 100, Per: time.Second}, MaxDelay: time.Second,
	}}, shaper.Attachment{Name: "here", Interfaces: []string{"stamp0"}, Direction: shaper.Ingress, Mode: shaper.AttachShape, Queue: 5000})
	in, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(nearAddrs[0].Addr(), 9)))
	must(t, err)
	defer in.Close()
	raw, err := in.SyscallConn()
	must(t, err)
	must(t, raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TIMESTAMPNS, 1) }))
	must(t, err)
	var out *net.UDPConn
	far.do(func() { out, err = net.DialUDP("udp4", nil, in.LocalAddr().(*net.UDPAddr)) })
	must(t, err)
	defer out.Close()
	began := time.Now()
	for range 10 {
		_, err := out.Write([]byte("hello"))
		must(t, err)
	}
	oob := make([]byte, 256)
	for range 10 {
		must(t, in.SetReadDeadline(time.Now().Add(5*time.Second)))
		_, oobn, _, _, err := in.ReadMsgUDP(make([]byte, 16), oob)
		must(t, err)
		messages, err := unix.ParseSocketControlMessage(oob[:oobn])
		must(t, err)
		var stamp time.Time
		for _, m := range messages {
			if m.Header.Type == unix.SO_TIMESTAMPNS {
				stamp = time.Unix(nativeInt64(m.Data), nativeInt64(m.Data[8:]))
			}
		}
		if late := time.Since(stamp); late < 0 || late > time.Since(began) {
			t.Errorf("a datagram with timestamp %v, %v ago", stamp, late)
		}
	}
	if took := time.Since(began); took < 80*time.Millisecond {
		t.Errorf("it took %v", took)
	}
}

// TestVMRedirect_RestoresDevice removes the device of a redirect.
func TestVMRedirect_RestoresDevice(t *testing.T) {
	near, far := cable(t, "rem0", 1)
	p := openPlane(t)
	p.apply([]shaper.Limit{{
		Name: "l", Match: shaper.Match{Attach: []string{"here"}}, Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
		Packets: shaper.Frequency{N: 1000, Per: time.Second}, MaxDelay: time.Second,
	}}, shaper.Attachment{Name: "here", Interfaces: []string{"rem0"}, Direction: shaper.Ingress, Mode: shaper.AttachShape, Queue: 5000})
	in, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(nearAddrs[0].Addr(), 9)))
	must(t, err)
	defer in.Close()
	var out *net.UDPConn
	far.do(func() { out, err = net.DialUDP("udp4", nil, in.LocalAddr().(*net.UDPAddr)) })
	must(t, err)
	defer out.Close()
	passes := func() bool {
		_, err := out.Write([]byte("hello"))
		must(t, err)
		must(t, in.SetReadDeadline(time.Now().Add(200*time.Millisecond)))
		_, err = in.Read(make([]byte, 16))
		return err == nil
	}
	if !passes() {
		t.Fatal("nothing passes")
	}
	must(t, netlink.LinkDel(linkNamed(t, attach.IFBName(near.Attrs().Index))))
	if passes() {
		t.Error("packets pass the device that is gone")
	}
	within(t, 30*time.Second, passes) // once repaired
	linkNamed(t, attach.IFBName(near.Attrs().Index))
}
