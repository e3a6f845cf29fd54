package conn

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	proxyproto "github.com/pires/go-proxyproto"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

var anySource = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}

func proxyHeaderBytes(t testing.TB, version byte, from, to string) []byte {
	t.Helper()
	h := proxyproto.HeaderProxyFromAddrs(version, net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from)), net.TCPAddrFromAddrPort(netip.MustParseAddrPort(to)))
	b, err := h.Format()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Limits and the downstream see the source in the header, however the header is segmented.
func TestProxyHeader_SourceReachesLimitsAndDownstream(t *testing.T) {
	headers := map[string][]byte{
		"v1":         proxyHeaderBytes(t, 1, "192.0.2.7:1234", "198.51.100.1:80"),
		"v2":         proxyHeaderBytes(t, 2, "192.0.2.7:1234", "198.51.100.1:80"),
		"v1 of IPv6": proxyHeaderBytes(t, 1, "[2001:db8::7]:1234", "[2001:db8::1]:80"),
		"v2 of IPv6": proxyHeaderBytes(t, 2, "[2001:db8::7]:1234", "[2001:db8::1]:80"),
	}
	for name, head := range headers {
		for _, out := range []byte{1, 2} {
			for _, size := range []int{1, 5, 1000} {
				t.Run(fmt.Sprintf("%s, out v%d, %d bytes at a time", name, out, size), func(t *testing.T) {
					t.Parallel()
					seen := make(chan *proxyproto.Header, 1)
					addr := testutil.ServeTCP(t, func(c *net.TCPConn) {
						r := bufio.NewReader(c)
						h, err := proxyproto.Read(r)
						if err != nil {
							t.Error(err)
						}
						seen <- h
						io.Copy(c, r)
					})
					r := start(t, shaper.TCP, addr)
					r.listen.AcceptProxyFrom, r.listen.SendProxy = anySource, shaper.ProxyVersion(out)
					source := "192.0.2.0/24"
					if strings.Contains(name, "IPv6") {
						source = "2001:db8::/32"
					}
					r.apply(shaper.Limit{Name: "theirs", Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix(source)}}, MaxConnections: 5})
					c := dial(t, r.addr())
					for b := append(bytes.Clone(head), "hello"...); len(b) > 0; {
						n := min(size, len(b))
						c.Write(b[:n])
						b = b[n:]
						if size < 1000 {
							time.Sleep(200 * time.Microsecond)
						}
					}
					got := make([]byte, 5)
					if _, err := io.ReadFull(c, got); err != nil || string(got) != "hello" {
						t.Errorf("got %q, err %v", got, err)
					}
					in, err := proxyproto.Read(bufio.NewReader(bytes.NewReader(head)))
					if err != nil {
						t.Fatal(err)
					}
					if h := <-seen; h == nil || h.SourceAddr.String() != in.SourceAddr.String() || h.DestinationAddr.String() != in.DestinationAddr.String() || h.Version != out {
						t.Errorf("the downstream got %+v, want %+v", h, in)
					}
					if n := r.shaper.Policy().State(0).InFlight.Load(); n != 1 {
						t.Errorf("%d connections under the limit of the source in the header, want 1", n)
					}
				})
			}
		}
	}
}

func TestProxyHeader_InvalidIsRejected(t *testing.T) {
	v2 := proxyHeaderBytes(t, 2, "192.0.2.7:1234", "198.51.100.1:80")
	long := bytes.Clone(v2)
	long[14], long[15] = 0xff, 0xff
	other := bytes.Clone(v2)
	other[12] = 0x31
	for name, head := range map[string]string{
		"a request":           "GET / HTTP/1.1\r\n\r\n",
		"a line without end":  "PROXY TCP4 " + strings.Repeat("1", 200),
		"a line of nonsense":  "PROXY TCP9 1.2.3.4 5.6.7.8 1 2\r\n",
		"bad addresses":       "PROXY TCP4 1.2.3 5.6.7.8 1 2\r\n",
		"a bad port":          "PROXY TCP4 1.2.3.4 5.6.7.8 99999 2\r\n",
		"too long":            string(long),
		"another version":     string(other),
		"a signature at odds": string(v2[:11]) + "x" + string(v2[12:]),
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
			r.listen.AcceptProxyFrom = anySource
			r.apply()
			c := dial(t, r.addr())
			c.Write([]byte(head))
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("read: %v, want a reset", err)
			}
			if n := r.shaper.Listener("l").Ended[shaper.BadProxyHeader].Load(); n != 1 {
				t.Errorf("%d connections ended by it, want 1", n)
			}
			r.settle()
		})
	}
	for name, head := range map[string][]byte{"nothing": nil, "half of it": v2[:20]} {
		t.Run(name+", and the end", func(t *testing.T) {
			r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
			r.listen.AcceptProxyFrom = anySource
			r.apply()
			c := dial(t, r.addr())
			c.Write(head)
			c.CloseWrite()
			c.Read(make([]byte, 1))
			testutil.WaitFor(t, "the end", func() bool { return r.shaper.Listener("l").Ended[shaper.BadProxyHeader].Load() == 1 })
			r.settle()
		})
	}
}

// The peer's own address counts if the header has no source (health checks of the proxy in
// front), or if the peer is not in AcceptProxyFrom, in which case the header is payload.
func TestProxyHeader_LocalUnknownAndUntrusted(t *testing.T) {
	local, err := (&proxyproto.Header{Version: 2, Command: proxyproto.LOCAL}).Format()
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		from []netip.Prefix
		head string
		want string
	}{
		"LOCAL":     {anySource, string(local), ""},
		"UNKNOWN":   {anySource, "PROXY UNKNOWN\r\n", ""},
		"untrusted": {[]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, "PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n", "PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
			r.listen.AcceptProxyFrom = tt.from
			r.apply(shaper.Limit{Name: "here", Match: shaper.Match{Source: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}, MaxConnections: 5})
			c := dial(t, r.addr())
			c.Write([]byte(tt.head + "hello"))
			got := make([]byte, len(tt.want)+5)
			if _, err := io.ReadFull(c, got); err != nil || string(got) != tt.want+"hello" {
				t.Errorf("got %q, err %v", got, err)
			}
			if n := r.shaper.Policy().State(0).InFlight.Load(); n != 1 {
				t.Errorf("%d connections under the limit of the peer's address, want 1", n)
			}
		})
	}
}

func TestProxyHeader_OnDatagrams(t *testing.T) {
	server := serveUDP(t)
	r := start(t, shaper.UDP, server.LocalAddr().String())
	r.listen.SendProxy, r.listen.UDPIdleTimeout = shaper.ProxyV2, time.Minute
	r.apply()
	c := dialUDP(t, r).(*net.UDPConn)
	if err := sendTrain(c, []byte("aaabbbcc"), 3, nil); err != nil {
		t.Fatal(err)
	}
	c.Write(nil)
	b := make([]byte, 2000)
	for _, want := range []string{"aaa", "bbb", "cc", ""} {
		server.SetReadDeadline(time.Now().Add(testTimeout))
		n, from, err := server.ReadFrom(b)
		if err != nil {
			t.Fatal(err)
		}
		rd := bufio.NewReader(bytes.NewReader(b[:n]))
		h, err := proxyproto.Read(rd)
		rest, _ := io.ReadAll(rd)
		if err != nil || string(rest) != want || h.SourceAddr.String() != c.LocalAddr().String() || h.DestinationAddr.String() != r.addr() {
			t.Fatalf("%+v, %q, err %v; want %q", h, rest, err, want)
		}
		server.WriteTo([]byte("reply"), from)
		c.SetReadDeadline(time.Now().Add(testTimeout))
		if n, err := c.Read(b); err != nil || string(b[:n]) != "reply" {
			t.Errorf("reply %q, err %v", b[:n], err)
		}
	}
}

// Limits count the header bytes that the downstream gets. Otherwise it would get 29 times the
// rate from short datagrams, and unlimited headers from connections that send nothing.
func TestProxyHeader_CountsAgainstLimits(t *testing.T) {
	const header, burst = 28, 300 // of IPv4, version 2
	limit := shaper.Limit{Name: "bytes", Rate: 8, Burst: burst}
	t.Run("of datagrams", func(t *testing.T) {
		server := serveUDP(t)
		r := start(t, shaper.UDP, server.LocalAddr().String())
		r.listen.SendProxy = shaper.ProxyV2
		r.apply(limit)
		c := dialUDP(t, r)
		const sent = 100
		for range sent {
			c.Write([]byte{1})
		}
		counts := &r.shaper.Policy().State(0).Packets
		testutil.WaitFor(t, "all datagrams", func() bool {
			return counts[shaper.Pass][shaper.None].Load()+counts[shaper.Refuse][shaper.QueueFull].Load() == sent
		})
		if n := counts[shaper.Pass][shaper.None].Load(); n != burst/(header+1)+1 {
			t.Errorf("%d datagrams of %d bytes pass in a burst of %d", n, header+1, burst)
		}
	})
	t.Run("of connections", func(t *testing.T) {
		var got atomic.Int64
		r := start(t, shaper.TCP, testutil.ServeTCP(t, func(c *net.TCPConn) {
			n, _ := io.Copy(io.Discard, c)
			got.Add(n)
		}))
		r.listen.SendProxy = shaper.ProxyV2
		r.apply(limit)
		const clients = 30
		for range clients {
			dial(t, r.addr()).CloseWrite()
		}
		counts := r.shaper.Listener("l")
		testutil.WaitFor(t, "connections", func() bool { return counts.Open.Load()+int64(counts.Ended[shaper.Closed].Load()) == clients })
		testutil.WaitFor(t, "a full burst", func() bool { return got.Load() >= burst })
		time.Sleep(50 * time.Millisecond)
		if n := got.Load(); n > burst+2*header { // plus one unit, and the rate over 50 ms
			t.Errorf("%d bytes of headers passed in a burst of %d", n, burst)
		}
	})
}

func FuzzHeaderLength(f *testing.F) {
	f.Add(proxyHeaderBytes(f, 1, "192.0.2.7:1234", "198.51.100.1:80"))
	f.Add(proxyHeaderBytes(f, 2, "[2001:db8::7]:1234", "[2001:db8::1]:80"))
	f.Fuzz(func(t *testing.T, b []byte) {
		b = b[:min(len(b), maxHeader)]
		n := headerLength(b)
		r := bytes.NewReader(b)
		rd := bufio.NewReader(r)
		_, err := proxyproto.Read(rd)
		read := len(b) - r.Len() - rd.Buffered()
		switch {
		case err == nil && n != read:
			t.Errorf("length %d of a header of %d bytes", n, read)
		case n > maxHeader || n < -1:
			t.Errorf("length %d", n)
		}
		// A prefix yields "more bytes needed" or the final result.
		for i := range b {
			if m := headerLength(b[:i]); m != 0 && m != n {
				t.Errorf("length %d from %d bytes, but %d from %d", m, i, n, len(b))
			}
		}
	})
}
