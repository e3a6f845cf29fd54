package conn

import (
	"errors"
	"net/netip"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// socketState returns the state of a TCP socket.
func socketState(fd int) string {
	if listens, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); listens != 0 {
		return "listens"
	}
	if _, err := unix.Getpeername(fd); err == nil {
		return "connected"
	}
	if name, err := unix.Getsockname(fd); err != nil || name.(*unix.SockaddrInet4).Port != 0 {
		return "bound"
	}
	return "new"
}

func TestOnSocket(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	use := func() {
		t.Helper()
		c := dial(t, r.addr())
		if _, err := c.Write([]byte{1}); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	}
	var mu sync.Mutex
	got := map[string]int{}
	hook := func(fd int) error {
		mu.Lock()
		defer mu.Unlock()
		got[socketState(fd)]++
		return errors.New("ignored")
	}
	want := func(when string, want map[string]int) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", when, diff)
		}
		clear(got)
	}
	use()
	r.proxy.OnSocket(hook)
	want("existing sockets", map[string]int{"listens": 1, "connected": 2})
	use()
	want("a new connection", map[string]int{"new": 1, "connected": 1})
	r.listen.Addresses = append(r.listen.Addresses, addressOf(shaper.TCP, netip.MustParseAddrPort(testutil.FreeAddr(t, "tcp"))))
	r.apply()
	want("a new listener", map[string]int{"new": 1})
	r.proxy.OnSocket(nil)
	use()
	want("after removal", map[string]int{})
}
