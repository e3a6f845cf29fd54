package conn

import (
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// socketOptions are those that a connection has by and by.
type socketOptions struct{ NoDelay, KeepAlive, Idle, Interval int }

func readOptions(fd int) socketOptions {
	get := func(level, option int) int {
		v, _ := unix.GetsockoptInt(fd, level, option)
		return v
	}
	o := socketOptions{
		NoDelay: get(unix.IPPROTO_TCP, unix.TCP_NODELAY), KeepAlive: get(unix.SOL_SOCKET, unix.SO_KEEPALIVE),
		Idle: get(unix.IPPROTO_TCP, unix.TCP_KEEPIDLE), Interval: get(unix.IPPROTO_TCP, unix.TCP_KEEPINTVL),
	}
	if o.KeepAlive == 0 { // then the system's defaults tell nothing
		o.Idle, o.Interval = 0, 0
	}
	return o
}

// TestEndpoint_Options checks that a client's socket inherits its options, and that a downstream's gets them when it needs
// them.
func TestEndpoint_Options(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	c := dial(t, r.addr())
	sockets := func() (all [2]socketOptions) {
		r.proxy.loop.call(func(leaky.Time) {
			s := r.proxy.sessions.all[0]
			all = [2]socketOptions{readOptions(s.client.fd), readOptions(s.server.fd)}
		})
		return all
	}
	exchange := func() {
		t.Helper()
		c.Write([]byte("hello"))
		if _, err := io.ReadFull(c, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
	}
	inherited := socketOptions{1, 1, 15, 15}
	exchange()
	if diff := cmp.Diff([2]socketOptions{inherited, {}}, sockets()); diff != "" {
		t.Errorf("after the first write: %s", diff)
	}
	exchange()
	if diff := cmp.Diff([2]socketOptions{inherited, {NoDelay: 1}}, sockets()); diff != "" {
		t.Errorf("after the second write: %s", diff)
	}
	testutil.WaitFor(t, "keep-alive", func() bool { return sockets()[1] == inherited })
}
