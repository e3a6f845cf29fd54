package conn

import (
	"net"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// An unreachable downstream is reported, even a lone one, and one without checks. It is still
// tried, and is up again once it answers.
func TestDownstream_UnavailableIsReported(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name       string
		protocol   shaper.Protocol
		downstream string // "" is a closed port
		ejectAfter int
		tries      int // failures until it is reported
		want       string
	}{
		{"TCP", shaper.TCP, "", 3, 3, "connection refused"},
		{"TCP at once", shaper.TCP, "", 1, 1, "connection refused"},
		{"TCP, nothing is ejected", shaper.TCP, "", 0, 3, "connection refused"},
		{"TCP, no address", shaper.TCP, "no..name:1", 3, 0, "name not resolved"},
		{"UDP", shaper.UDP, "", 3, 3, "connection refused"},
		{"UDP, not permitted", shaper.UDP, "255.255.255.255:9", 3, 3, "permission denied"},
		{"UDP, no address", shaper.UDP, "no..name:1", 3, 0, "name not resolved"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			to := tt.downstream
			if to == "" {
				to = testutil.FreeAddr(t, tt.protocol.String())
			}
			r := start(t, tt.protocol, "127.0.0.1:9")
			host, port, err := net.SplitHostPort(to)
			if err != nil {
				t.Fatal(err)
			}
			n, err := net.LookupPort("tcp", port)
			if err != nil {
				t.Fatal(err)
			}
			r.listen.Downstream = []shaper.Downstream{{Host: host, Port: uint16(n)}}
			r.listen.EjectAfter, r.listen.EjectFor = tt.ejectAfter, time.Minute
			r.apply()
			status := func() shaper.DownstreamStatus { return r.proxy.Downstreams()[0] }
			counts := r.shaper.Listener("l")
			for i := range tt.tries + 1 {
				d := status()
				if (i < tt.tries) != d.Up || !strings.Contains(d.Error, tt.want) && i >= tt.tries {
					t.Fatalf("after %d failures: %+v", i, d)
				}
				request(t, r, tt.protocol, testTimeout)
			}
			if tt.protocol == shaper.TCP && counts.DialErrors.Load() == 0 {
				t.Error("no dial error was counted")
			}
			if tt.downstream != "" {
				return
			}
			if tt.protocol == shaper.TCP {
				l, err := net.Listen("tcp4", to)
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
			} else {
				l, err := net.ListenPacket("udp4", to)
				if err != nil {
					t.Fatal(err)
				}
				go answerUDP(l)
				defer l.Close()
			}
			request(t, r, tt.protocol, 300*time.Millisecond) // no error: the connection is served
			testutil.WaitFor(t, "the downstream to be up again", func() bool { d := status(); return d.Up && d.Error == "" })
		})
	}
}

// request makes a request to r, and waits until it has succeeded or failed. Over TCP it waits for a failure for at most within.
func request(t *testing.T, r *proxyRig, protocol shaper.Protocol, within time.Duration) {
	t.Helper()
	if protocol == shaper.TCP {
		c, err := net.Dial("tcp4", r.addr())
		if err != nil { // the reset came first
			return
		}
		c.SetReadDeadline(time.Now().Add(within))
		c.Read(make([]byte, 1))
		c.Close()
		return
	}
	counts := r.shaper.Listener("l")
	before := counts.SendErrors.Load() + counts.DialErrors.Load()
	c := dialUDP(t, r)
	c.Write([]byte("x"))
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		c.SetReadDeadline(time.Now().Add(testTimeout))
		c.Read(make([]byte, 1))
	}()
	testutil.WaitFor(t, "a reply or an error", func() bool {
		select {
		case <-answered:
			return true
		default:
			return counts.SendErrors.Load()+counts.DialErrors.Load() > before
		}
	})
	c.Close()
	<-answered
}

func answerUDP(l net.PacketConn) {
	b := make([]byte, 1)
	for {
		_, from, err := l.ReadFrom(b)
		if err != nil {
			return
		}
		l.WriteTo(b, from)
	}
}
