package conn

import (
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// dropIncoming makes a socket silently drop everything it receives.
func dropIncoming(t *testing.T, c *net.TCPConn) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	drop := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}}
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &drop[0]})
	}); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
}

// A connection ends if a peer vanishes with unacknowledged bytes in flight. A peer that merely
// does not read, or is idle for long and then sends, keeps its connection.
func TestAckTimeout_DeadPeer(t *testing.T) {
	for name, c := range map[string]struct {
		client func(*testing.T, *net.TCPConn)
		server func(*testing.T, *net.TCPConn)
		ends   bool
	}{
		"client": {
			dropIncoming,
			func(_ *testing.T, c *net.TCPConn) { c.Write(make([]byte, 74_000)); io.Copy(io.Discard, c) }, true,
		},
		"downstream": {
			func(_ *testing.T, c *net.TCPConn) {
				c.Write([]byte("hello"))
				time.Sleep(100 * time.Millisecond)
				c.Write([]byte("are you there?"))
				io.Copy(io.Discard, c)
			},
			func(t *testing.T, c *net.TCPConn) { c.Read(make([]byte, 5)); dropIncoming(t, c) }, true,
		},
		"does not read": {
			func(*testing.T, *net.TCPConn) {},
			func(_ *testing.T, c *net.TCPConn) { c.Write(make([]byte, 32<<20)) }, false,
		},
		"idle": {
			func(_ *testing.T, c *net.TCPConn) {},
			func(_ *testing.T, c *net.TCPConn) {
				time.Sleep(1800 * time.Millisecond)
				c.Write(make([]byte, 10))
				c.Read(make([]byte, 1))
			}, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server, closed := make(chan *net.TCPConn, 1), make(chan struct{})
			defer close(closed)
			r := start(t, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) { server <- c; <-closed }))
			r.proxy.home.loop.call(func(leaky.Time) { r.proxy.home.ackMonitor.timeout = leaky.Second })
			client := dial(t, r.addr())
			client.SetReadBuffer(4096)
			down := <-server
			counts := r.shaper.Listener("l")
			testutil.WaitFor(t, "an open connection", func() bool { return counts.Open.Load() == 1 })
			begun := time.Now()
			go c.client(t, client)
			go c.server(t, down)
			if c.ends {
				testutil.WaitFor(t, "the end", func() bool { return counts.Open.Load() == 0 })
				if took := time.Since(begun); took < 600*time.Millisecond {
					t.Errorf("the connection ended after %v", took)
				}
			} else {
				time.Sleep(2600 * time.Millisecond)
				if counts.Open.Load() != 1 {
					t.Error("the connection ended")
				}
			}
			client.SetLinger(0)
			client.Close()
		})
	}
}
