package conn

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	proxyproto "github.com/pires/go-proxyproto"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// tenants is a limit of one connection for each value.
var tenants = shaper.Limit{Name: "per-tenant", Key: shaper.KeyTLV, TLV: 0xe0, MaxConnections: 1}

// headerWith returns a header, version 2, with values of some types.
func headerWith(t *testing.T, source string, command proxyproto.ProtocolVersionAndCommand, values ...proxyproto.TLV) []byte {
	t.Helper()
	h := proxyproto.HeaderProxyFromAddrs(2, net.TCPAddrFromAddrPort(netip.MustParseAddrPort(source)), net.TCPAddrFromAddrPort(netip.MustParseAddrPort("198.51.100.1:80")))
	h.Command = command
	if err := h.SetTLVs(values); err != nil {
		t.Fatal(err)
	}
	b, err := h.Format()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func value(tlvType byte, text string) proxyproto.TLV {
	return proxyproto.TLV{Type: proxyproto.PP2Type(tlvType), Value: []byte(text)}
}

func TestKeyTLV(t *testing.T) {
	r := start(t, shaper.TCP, testutil.ServeTCP(t, testutil.Echo))
	r.listen.AcceptProxyFrom = []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}
	r.apply(tenants)
	admitted := func(c net.Conn, header []byte) bool {
		c.Write(append(header, 'x'))
		_, err := io.ReadFull(c, make([]byte, 1))
		return err == nil
	}
	many := func(last proxyproto.TLV) (all []proxyproto.TLV) {
		for i := range shaper.MaxTLVs {
			all = append(all, value(0xe2, fmt.Sprint(i)))
		}
		return append(all, last)
	}
	malformed := headerWith(t, "192.0.2.1:1", proxyproto.PROXY, value(0xe0, "zzz"))
	malformed[len(malformed)-4]++ // the length of the value
	for i, tt := range []struct {
		name   string
		header []byte
		want   bool
	}{
		{"a tenant", headerWith(t, "192.0.2.1:1", proxyproto.PROXY, value(0xe1, "b"), value(0xe0, "a")), true},
		{"from another source", headerWith(t, "192.0.2.2:1", proxyproto.PROXY, value(0xe0, "a")), false},
		{"another tenant", headerWith(t, "192.0.2.1:2", proxyproto.PROXY, value(0xe0, "b")), true},
		{"none", headerWith(t, "192.0.2.1:3", proxyproto.PROXY), true},
		{"none, with another type", headerWith(t, "192.0.2.1:4", proxyproto.PROXY, value(0xe1, "c")), false},
		{"beyond those that are kept", headerWith(t, "192.0.2.1:5", proxyproto.PROXY, many(value(0xe0, "d"))...), false},
		{"local", headerWith(t, "192.0.2.1:6", proxyproto.LOCAL, value(0xe0, "e")), false},
		{"malformed", malformed, false},
		{"version 1", proxyHeaderBytes(t, 1, "192.0.2.1:7", "198.51.100.1:80"), false},
	} {
		if got := admitted(dial(t, r.addr()), tt.header); got != tt.want {
			t.Errorf("connection %d, %s: admitted is %v", i, tt.name, got)
		}
	}
	// Who is not trusted has no header: these bytes are for the downstream, and he is one of those without a value.
	stranger := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
	c, err := stranger.Dial("tcp4", r.addr())
	if err == nil {
		defer c.Close()
		c.SetDeadline(time.Now().Add(testTimeout))
	}
	if err == nil && admitted(c, headerWith(t, "192.0.2.1:8", proxyproto.PROXY, value(0xe0, "f"))) {
		t.Error("a source that is not trusted has a bucket of its own")
	}
	p := r.shaper.Policy()
	f := &shaper.Flow{TLVs: []shaper.TLV{{Type: 0xe0, Hash: shaper.HashTLV(0xe0, []byte("a"))}}}
	if got := p.Describe(0, f, shaper.Route{}); got != `tlv:0xe0 "a"` {
		t.Errorf("the key is shown as %s", got)
	}
}
