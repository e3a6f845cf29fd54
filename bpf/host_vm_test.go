//go:build vmguest

package bpf

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// farHost is a network namespace, kept by a thread in it.
type farHost struct {
	fd   int
	work chan func()
}

func newFarHost(t *testing.T) *farHost {
	t.Helper()
	h := &farHost{work: make(chan func())}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			h.fd, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		}
		ready <- err
		for f := range h.work {
			f()
		}
	}()
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { close(h.work); unix.Close(h.fd) })
	return h
}

func (h *farHost) do(f func()) {
	done := make(chan struct{})
	h.work <- func() { defer close(done); f() }
	<-done
}

// Addresses of the two ends of a cable.
var (
	nearAddrs = []netip.Prefix{netip.MustParsePrefix("10.9.0.1/24"), netip.MustParsePrefix("fd09::1/64")}
	farAddrs  = []netip.Prefix{netip.MustParsePrefix("10.9.0.2/24"), netip.MustParsePrefix("fd09::2/64")}
)

// cable connects this host and another by a veth pair with the given number of queues, whose
// near end is called name. Both ends are up and have addresses.
func cable(t *testing.T, name string, queues int) (near netlink.Link, far *farHost) {
	t.Helper()
	veth := &netlink.Veth{LinkAttrs: netlink.NewLinkAttrs(), PeerName: "far0"}
	veth.Name = name
	if queues > 1 {
		veth.NumTxQueues, veth.NumRxQueues = queues, queues
	}
	must(t, netlink.LinkAdd(veth))
	t.Cleanup(func() { _ = netlink.LinkDel(veth) })
	far = newFarHost(t)
	must(t, netlink.LinkSetNsFd(linkNamed(t, "far0"), far.fd))
	must(t, up(name, nearAddrs))
	var err error
	far.do(func() { err = errors.Join(up("far0", farAddrs), lab.AwaitUp(&netlink.Handle{}, "far0")) })
	must(t, err)
	must(t, lab.AwaitUp(&netlink.Handle{}, name))
	return linkNamed(t, name), far
}

func up(name string, addrs []netip.Prefix) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	var errs []error
	for _, a := range addrs {
		addr, err := netlink.ParseAddr(a.String())
		if err != nil {
			return err
		}
		addr.Flags = unix.IFA_F_NODAD
		errs = append(errs, netlink.AddrAdd(l, addr))
	}
	return errors.Join(append(errs, netlink.LinkSetUp(l))...)
}

func linkNamed(t *testing.T, name string) netlink.Link {
	t.Helper()
	l, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return l
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func nativeInt64(b []byte) int64 { return int64(binary.NativeEndian.Uint64(b)) }
