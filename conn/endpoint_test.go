package conn

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

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

// TestEndpoint_Options checks that a client's socket inherits its options, also from a socket that the process has
// inherited, and that a downstream's gets them when it needs them.
func TestEndpoint_Options(t *testing.T) {
	t.Parallel()
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	for name, addr := range map[string]string{"opened": r.addr(), "inherited": inheritPort(t, r)} {
		t.Run(name, func(t *testing.T) { checkOptions(t, r, addr) })
	}
}

// inheritPort makes r listen on a socket that it has not opened, and returns its address.
func inheritPort(t *testing.T, r *proxyRig) string {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	fd := -1
	raw.Control(func(own uintptr) {
		if fd, err = unix.Dup(int(own)); err == nil { // without the options that Go has set
			err = errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 0), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 0))
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	r.proxy.Inherit([]int{fd})
	addr := l.Addr().String()
	l.Close()
	r.listen.Addresses = append(r.listen.Addresses, addressOf(shaper.TCP, netip.MustParseAddrPort(addr)))
	r.apply()
	return addr
}

func checkOptions(t *testing.T, r *proxyRig, addr string) {
	later := func(after leaky.Time) { // keep-alive, which is set at the next sample
		r.proxy.home.loop.call(func(now leaky.Time) {
			v := &r.proxy.home.statsSampler
			v.pos, v.timer.Fire = fromEnd, r.proxy.home.sampleStats
			r.proxy.home.loop.pacer.Schedule(&v.timer, now+after)
		})
	}
	later(leaky.FromDuration(time.Hour))
	c := dial(t, addr)
	sockets := func() (all [2]socketOptions) {
		r.proxy.home.loop.call(func(leaky.Time) {
			s := r.proxy.home.sessions.all[0]
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
	later(0)
	testutil.WaitFor(t, "keep-alive", func() bool { return sockets()[1] == inherited })
	c.Close()
	r.settle()
}

// TestEndpoint_DelayedAck has a client send before its session begins, whose bytes then have to wait: the downstream gets
// the connection at once, although the first bytes were to complete its handshake.
func TestEndpoint_DelayedAck(t *testing.T) {
	t.Parallel()
	accepted := make(chan time.Time, 1)
	addr := testutil.ServeTCP(t, func(c *net.TCPConn) {
		accepted <- time.Now()
		io.Copy(io.Discard, c)
	})
	r := start(t, shaper.TCP, addr, shaper.Limit{Name: "slow", Rate: 2000, MaxDelay: time.Minute})
	first := dial(t, r.addr())
	first.Write(make([]byte, 20_000)) // uses the limit for some seconds
	<-accepted
	testutil.WaitFor(t, "the first bytes", func() bool { return r.shaper.Listener("l").ToDownstream.Load() > 0 })
	least := time.Hour
	const delay = 200 * time.Millisecond                    // of the kernel
	for i := 0; i < 50 && (i < 5 || least > delay/2); i++ { // a busy machine may delay some
		began := time.Now()
		r.proxy.home.loop.call(func(leaky.Time) { // while the loop does nothing else
			c := dial(t, r.addr())
			c.Write([]byte("hello"))
		})
		least = min(least, (<-accepted).Sub(began))
	}
	if least > delay/2 {
		t.Errorf("the downstream was connected after %v at least", least)
	}
}
