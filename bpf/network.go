package bpf

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/bpf/internal/attach"
)

// network is a network namespace. The cookie is unique since boot; the number, which tools
// show, may be reused.
type network struct{ Cookie, Number uint64 }

// openRegistryInNetwork is openRegistry with a check that the interfaces belong to this network namespace:
// in another one their indexes mean other interfaces.
func openRegistryInNetwork(dir string) (*registry, error) {
	r, err := openRegistry(dir)
	here := currentNetwork()
	if err != nil || r.Network.Cookie == here.Cookie {
		return r, err
	}
	if !r.interfacesGone(dir) {
		r.store.Close()
		pins, number := filepath.Dir(dir), r.Network.Number
		return nil, fmt.Errorf("%s belongs to interfaces in another network namespace, number %d, which may still exist: \"lsns %d\" lists its processes, "+
			"and \"nsenter --net --target PID shaperd detach --pin-path %s\" detaches them; if it shows no process, run \"rm -r %s\"; "+
			"or set [daemon] pin_path to another directory", dir, number, number, pins, pins)
	}
	_ = os.RemoveAll(filepath.Join(dir, "links"))
	_ = os.Mkdir(filepath.Join(dir, "links"), 0o700)
	r.Points, r.Queues, r.Clsacts, r.Network = nil, nil, nil, here
	return r, r.save()
}

// interfacesGone reports whether all interfaces of r, which is pinned in dir, no longer exist: the
// kernel ends the links of an interface when it is removed, as with its network namespace.
// Without links that is unknown, and the result is false.
func (r *registry) interfacesGone(dir string) bool {
	removed := map[int]bool{}
	for _, s := range r.Points {
		pins := []string{s.pin(dir) + repliesPin}
		if !s.usesIFB() { // else the link is at the IFB
			pins = append(pins, s.pin(dir))
		}
		for _, pin := range pins {
			removed[s.Ifindex] = removed[s.Ifindex] || attach.InterfaceGone(pin)
		}
	}
	left := func(ifindex int) bool { return !removed[ifindex] }
	return !slices.ContainsFunc(r.Points, func(s savedPoint) bool { return left(s.Ifindex) }) &&
		!slices.ContainsFunc(r.Queues, func(q savedQueue) bool { return left(q.Ifindex) }) &&
		!slices.ContainsFunc(r.Clsacts, left)
}

// currentNetwork returns the network namespace of this thread.
func currentNetwork() (n network) {
	var s unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &s); err == nil {
		n.Number = s.Ino
	}
	if fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err == nil {
		n.Cookie, _ = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		unix.Close(fd)
	}
	return n
}
