package netns

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// TestEdgeCases runs the edge cases of a proxy, each with IPv4 and IPv6. Others have their own
// tests: TestHalfClose, TestReset, TestUDPReplies (datagram sizes, and replies of a host with
// several addresses) and TestVMClockSteps.
func TestEdgeCases(t *testing.T) {
	t.Parallel()
	for name, run := range map[string]func(*testing.T, *network, family){
		"tcp/end after queued bytes":             endAfterQueuedBytes,
		"tcp/client gone while it waits":         goneWhileWaiting,
		"tcp/client gone while throttled":        goneWhileThrottled,
		"tcp/downstream refuses":                 downstreamRefusesTCP,
		"tcp/downstream unreachable":             downstreamUnreachableTCP,
		"tcp/downstream silent":                  downstreamSilentTCP,
		"tcp/slow readers":                       slowReaders,
		"tcp/slow writers":                       slowWriters,
		"tcp/range of ports":                     rangeOfTCPPorts,
		"tcp/several addresses":                  severalAddressesTCP,
		"tcp/hostile PROXY headers":              hostileHeaders,
		"udp/downstream refuses":                 downstreamRefusesUDP,
		"udp/downstream unreachable":             downstreamUnreachableUDP,
		"udp/range of ports":                     rangeOfUDPPorts,
		"udp/one source port, several listeners": sameSourcePortTwice,
		"udp/counts add up":                      countsAddUp,
	} {
		for _, f := range families {
			t.Run(name+"/"+f.name, func(t *testing.T) { run(t, newNetwork(t), f) })
		}
	}
}

func endAfterQueuedBytes(t *testing.T, n *network, f family) {
	request := randomBytes(1 << 20)
	got := make(chan error, 1)
	n.downstream.serveTCP(t, f.tcp(), func(c *net.TCPConn) {
		all, err := io.ReadAll(c)
		if err == nil && !bytes.Equal(all, request) {
			err = fmt.Errorf("%d bytes of %d arrived", len(all), len(request))
		}
		got <- err
	})
	n.shaper.shaperd(t, config(f, slowTCP...))
	c := dialWithDeadline(t, n, f)
	if _, err := c.Write(request); err != nil {
		t.Fatal(err)
	}
	c.Close() // with most of it in flight
	if err := receive(got); err != nil {
		t.Error(err)
	}
}

// measureSlotRelease measures the time from a client's reset until another client has its slot.
func measureSlotRelease(t *testing.T, f family, occupy func(n *network, s *sink) *bulk, limits ...string) {
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		s := n.downstream.newSink(t, f.tcp())
		n.shaper.shaperd(t, config(f, limits...))
		leaver := occupy(n, s)
		next := n.client.newBulk(t, f.sources[1], f.listenAddr(), 1, 'n')
		time.Sleep(50 * time.Millisecond)
		if s.got('n') != 0 {
			t.Fatal("the cap admitted a second connection")
		}
		stalls := startStallWatch(t)
		left := time.Now()
		leaver.abort()
		s.wait(t, 'n', 1, patience)
		took, report := time.Since(left), stalls.stop()
		next.abort()
		if took > 100*time.Millisecond+report.longest() {
			return report, fmt.Errorf("a slot was freed %v after its client had gone, want at most 100 ms", took)
		}
		return report, nil
	})
}

func goneWhileThrottled(t *testing.T, _ *network, f family) {
	measureSlotRelease(t, f, func(n *network, s *sink) *bulk {
		b := n.client.newBulk(t, f.sources[0], f.listenAddr(), 1, 'h')
		s.wait(t, 'h', 1, patience)
		if err := b.flood(200 * time.Millisecond); err != nil {
			t.Fatal(err)
		}
		return b
	}, limit("slots", onTCP, keyAll, `max_connections = 1`, `queue_timeout = "10s"`), limit("slow", onTCP, keySource, `rate = "10kB/s"`))
}

// goneWhileWaiting has clients at the head of the admission queue leave, by a reset and by a FIN:
// they must not get the slot or delay the next client, and their places in the queue must be freed
// soon.
func goneWhileWaiting(t *testing.T, _ *network, f family) {
	retryOnStall(t, func() (stallReport, error) {
		n := newNetwork(t)
		s := n.downstream.newSink(t, f.tcp())
		d := n.shaper.shaperd(t, config(f, limit("slots", onTCP, keyAll, `max_connections = 1`, `queue_timeout = "10s"`)))
		holder := n.client.newBulk(t, f.sources[0], f.listenAddr(), 1, 'h')
		s.wait(t, 'h', 1, patience)
		waiting := func(want float64) {
			t.Helper()
			waitFor(t, patience, func() error {
				if got := d.metrics().Sum("waiting", `limit="slots"`); got != want {
					return fmt.Errorf("%v connections wait, want %v", got, want)
				}
				return nil
			})
		}
		reset := n.client.newBulk(t, f.sources[1], f.listenAddr(), 1, 'r')
		waiting(1)
		silent := n.client.mustDial(t, f.sources[1], f.listenAddr())
		waiting(2)
		last := n.client.newBulk(t, f.sources[1], f.listenAddr(), 1, 'n')
		waiting(3)
		stalls := startStallWatch(t)
		start := time.Now()
		reset.abort()
		waiting(2)
		afterReset := time.Since(start)
		silent.Close() // it cannot expect a response
		waiting(1)
		afterEnd := time.Since(start) - afterReset
		holder.abort()
		s.wait(t, 'n', 1, patience)
		report := stalls.stop()
		if s.got('r') != 0 {
			t.Error("a client that had gone reached the downstream")
		}
		last.abort()
		if took := max(afterReset, afterEnd); took > 100*time.Millisecond+report.longest() {
			return report, fmt.Errorf("a place in the queue was freed %v after its client had gone, want at most 100 ms", took)
		}
		return report, nil
	})
}

func downstreamRefusesTCP(t *testing.T, n *network, f family) {
	d := n.shaper.shaperd(t, config(f))
	if err := n.client.dialUntilClosed(f.sources[0], f.listenAddr()); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client sees %v, want a reset", err)
	}
	d.awaitMetric(1, "shaperd_listener_dial_errors_total")
}

// addDownstreamFilter applies an nftables statement to packets to a port of the downstream.
func (n *network) addDownstreamFilter(t testing.TB, protocol string, port int, statement string) {
	t.Helper()
	for _, command := range []string{
		"add table inet cell", "add chain inet cell in { type filter hook input priority 0 ; }",
		fmt.Sprintf("add rule inet cell in %s dport %d %s", protocol, port, statement),
	} {
		must(t, n.downstream.Run("nft", strings.Fields(command)...))
	}
}

func downstreamUnreachableTCP(t *testing.T, n *network, f family) {
	n.addDownstreamFilter(t, "tcp", tcpPort, "reject with icmpx type host-unreachable")
	n.shaper.shaperd(t, config(f)+"connect_timeout = \"1h\"\n")
	start := time.Now()
	if err := n.client.dialUntilClosed(f.sources[0], f.listenAddr()); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client sees %v, want a reset", err)
	}
	if took := time.Since(start); took > 20*time.Second {
		t.Errorf("it took %v to detect that the downstream is unreachable", took)
	}
}

func downstreamSilentTCP(t *testing.T, n *network, f family) {
	n.addDownstreamFilter(t, "tcp", tcpPort, "drop")
	d := n.shaper.shaperd(t, config(f)+"connect_timeout = \"300ms\"\n")
	start := time.Now()
	if err := n.client.dialUntilClosed(f.sources[0], f.listenAddr()); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client sees %v, want a reset", err)
	}
	if took := time.Since(start); took < 300*time.Millisecond || took > 4500*time.Millisecond { // by default it would be after 5 s
		t.Errorf("the dial was aborted after %v, want 300 ms", took)
	}
	d.awaitMetric(1, "shaperd_listener_connections_ended_total", `reason="not-connected"`)
}

// slowReaders has both sides read much more slowly than their peers write.
func slowReaders(t *testing.T, n *network, f family) {
	const size = 3 << 20
	text := randomBytes(size)
	readSlowly := func(c *net.TCPConn) error {
		_ = c.SetReadBuffer(32 << 10)
		var all []byte
		buf := make([]byte, 64<<10)
		for {
			got, err := c.Read(buf)
			all = append(all, buf[:got]...)
			if errors.Is(err, io.EOF) && bytes.Equal(all, text) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("%d of %d bytes arrived: %w", len(all), size, err)
			}
			time.Sleep(time.Millisecond)
		}
	}
	both := func(c *net.TCPConn) error {
		wrote := make(chan error, 1)
		go func() {
			_, err := c.Write(text)
			wrote <- errors.Join(err, c.CloseWrite())
		}()
		return errors.Join(readSlowly(c), <-wrote)
	}
	served := make(chan error, 1)
	n.downstream.serveTCP(t, f.tcp(), func(c *net.TCPConn) { served <- both(c) })
	n.shaper.shaperd(t, config(f))
	if err := both(dialWithDeadline(t, n, f)); err != nil {
		t.Errorf("client: %v", err)
	}
	if err := receive(served); err != nil {
		t.Errorf("downstream: %v", err)
	}
}

// slowWriters checks that single bytes are forwarded at once.
func slowWriters(t *testing.T, n *network, f family) {
	n.downstream.echoTCP(t, f.tcp(), new(clientLog))
	n.shaper.shaperd(t, config(f, slowTCP...))
	c := dialWithDeadline(t, n, f)
	var b [1]byte
	for i := range 100 {
		if _, err := c.Write([]byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, b[:]); err != nil || b[0] != byte(i) {
			t.Fatalf("byte %d came back as %d, %v", i, b[0], err)
		}
		time.Sleep(time.Millisecond)
	}
}

func rangeOfTCPPorts(t *testing.T, n *network, f family) {
	const first, last = 6000, 6004
	n.shaper.shaperd(t, strings.Replace(config(f), fmt.Sprint(":", tcpPort), fmt.Sprintf(":%d-%d", first, last), 1))
	for port := uint16(first); port <= last; port++ {
		n.downstream.serveTCP(t, netip.AddrPortFrom(f.downstream, port), func(c *net.TCPConn) { fmt.Fprint(c, port) })
		c := n.client.mustDial(t, f.sources[0], netip.AddrPortFrom(f.proxy, port))
		if got, err := io.ReadAll(c); err != nil || string(got) != fmt.Sprint(port) {
			t.Errorf("port %d leads to %q, %v", port, got, err)
		}
	}
}

func severalAddressesTCP(t *testing.T, n *network, f family) {
	n.downstream.echoTCP(t, f.tcp(), new(clientLog))
	n.shaper.shaperd(t, config(f))
	for _, at := range []netip.Addr{f.proxy, f.alias, f.inner} {
		if err := exchange(n.client.mustDial(t, f.sources[0], netip.AddrPortFrom(at, tcpPort)), "hello"); err != nil {
			t.Errorf("%v: %v", at, err)
		}
	}
}

// hostileHeaders sends missing and invalid PROXY protocol headers.
func hostileHeaders(t *testing.T, n *network, f family) {
	var tcp clientLog
	n.downstream.echoTCP(t, f.tcp(), &tcp)
	text := config(f) + fmt.Sprintf("accept_proxy_from = [%q]\n", netip.PrefixFrom(f.any, 0))
	d := n.shaper.shaperd(t, text)
	const signature = "\r\n\r\n\x00\r\nQUIT\n"
	v2 := func(command, family byte, body string) string {
		return signature + string([]byte{command, family}) + string(binary.BigEndian.AppendUint16(nil, uint16(len(body)))) + body
	}
	bad := []string{
		"GET / HTTP/1.0\r\n\r\n",
		"PROXY\r\n",
		"PROXY TCP4\r\n",
		"PROXY TCP4 10.0.0.1 10.0.0.2 1\r\n",
		"PROXY TCP4 10.0.0.1 10.0.0.2 1 65536\r\n",
		"PROXY TCP4 10.0.0.1 10.0.0.2 -1 1\r\n",
		"PROXY TCP4 10.0.0.256 10.0.0.2 1 1\r\n",
		"PROXY TCP4 fd00::1 fd00::2 1 1\r\n",
		"PROXY TCP6 10.0.0.1 10.0.0.2 1 1\r\n",
		"PROXY TCP4 10.0.0.1 10.0.0.2 1 1\n\n",
		"PROXY UDP4 10.0.0.1 10.0.0.2 1 1\r\n",
		"PROXY TCP4 " + strings.Repeat("1", 200) + "\r\n",
		strings.Repeat("PROXY ", 30),
		signature[:11] + "\x00",
		v2(0x11, 0x11, strings.Repeat("a", 12)),        // version 1
		v2(0x22, 0x11, strings.Repeat("a", 12)),        // command 2
		v2(0x21, 0x11, strings.Repeat("a", 11)),        // too short for the addresses
		v2(0x21, 0x21, strings.Repeat("a", 12)),        // IPv6 with the length of IPv4
		signature + "\x21\x11\xff\xff" + "and no more", // longer than allowed
		"",
	}
	for _, header := range bad {
		c := n.client.mustDial(t, f.sources[0], f.listenAddr())
		_, err := io.WriteString(c, header)
		if err == nil {
			err = c.CloseWrite()
		}
		if err == nil {
			err = awaitClose(c)
		}
		if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ENOTCONN) {
			t.Errorf("after %.40q the connection ended with %v", header, err)
		}
	}
	if got := tcp.take(); len(got) != 0 {
		t.Errorf("%d connections with invalid headers reached the downstream", len(got))
	}
	d.awaitMetric(float64(len(bad)), "shaperd_listener_connections_ended_total", `reason="bad-proxy-header"`)
	for _, header := range []string{
		"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n",
		"PROXY TCP6 2001:db8::1 2001:db8::2 65535 0\r\n",
		"PROXY UNKNOWN\r\n",
		v2(0x21, 0x11, strings.Repeat("a", 12)),
		v2(0x21, 0x21, strings.Repeat("a", 36)),
		v2(0x21, 0x11, strings.Repeat("a", 12)+"\x04\x00\x03pad"),
		v2(0x20, 0x00, ""),
	} {
		c := n.client.mustDial(t, f.sources[0], f.listenAddr())
		if _, err := io.WriteString(c, header); err != nil {
			t.Fatal(err)
		}
		if err := exchange(c, "hello"); err != nil {
			t.Errorf("after %.40q: %v", header, err)
		}
	}
}

// downstreamRefusesUDP opens the downstream's port after datagrams were refused.
func downstreamRefusesUDP(t *testing.T, n *network, f family) {
	testEchoRecovers(t, n, f, func() { n.downstream.echoUDP(t, f.udp()) })
}

// downstreamUnreachableUDP has a router report host-unreachable for a while.
func downstreamUnreachableUDP(t *testing.T, n *network, f family) {
	n.downstream.echoUDP(t, f.udp())
	n.addDownstreamFilter(t, "udp", udpPort, "reject with icmpx type host-unreachable")
	testEchoRecovers(t, n, f, func() { must(t, n.downstream.Run("nft", "delete", "table", "inet", "cell")) })
}

// testEchoRecovers checks that a flow works after fix ends a series of ICMP errors.
func testEchoRecovers(t *testing.T, n *network, f family, fix func()) {
	n.shaper.shaperd(t, config(f))
	c, err := n.client.DialUDP(f.sources[0], f.udpListenAddr())
	must(t, err)
	defer c.Close()
	for range 3 {
		_, err := c.Write([]byte("lost"))
		must(t, err)
		time.Sleep(20 * time.Millisecond)
	}
	fix()
	mustEcho(t, c)
}

// mustEcho sends a datagram on c and expects it back, ignoring "lost" ones that were still in flight.
func mustEcho(t testing.TB, c *net.UDPConn) {
	t.Helper()
	_, err := c.Write([]byte("hello"))
	must(t, err)
	must(t, c.SetReadDeadline(time.Now().Add(patience)))
	buf := make([]byte, 100)
	got, err := c.Read(buf)
	for err == nil && string(buf[:got]) == "lost" {
		got, err = c.Read(buf)
	}
	if err != nil || string(buf[:got]) != "hello" {
		t.Errorf("%q came back, %v", buf[:got], err)
	}
}

func rangeOfUDPPorts(t *testing.T, n *network, f family) {
	n.shaper.shaperd(t, config(f))
	for port := uint16(8000); port <= 8010; port++ {
		n.downstream.echoUDP(t, netip.AddrPortFrom(f.downstream, port))
		n.client.exchangeUDP(t, f.sources[0], netip.AddrPortFrom(f.proxy, port), int(port))
	}
}

// sameSourcePortTwice has one socket send to two ports and two addresses: each request must get its own reply.
func sameSourcePortTwice(t *testing.T, n *network, f family) {
	n.shaper.shaperd(t, config(f))
	c := n.client.listenUDP(t, netip.AddrPortFrom(f.sources[0], 0))
	for _, port := range []uint16{8000, 8001} {
		n.downstream.echoUDP(t, netip.AddrPortFrom(f.downstream, port))
	}
	buf := make([]byte, 100)
	for range 3 {
		for _, to := range []netip.AddrPort{
			netip.AddrPortFrom(f.proxy, 8000), netip.AddrPortFrom(f.proxy, 8001), netip.AddrPortFrom(f.alias, 8000),
		} {
			_, err := c.WriteToUDPAddrPort([]byte(to.String()), to)
			must(t, err)
			must(t, c.SetReadDeadline(time.Now().Add(patience)))
			got, from, err := c.ReadFromUDPAddrPort(buf)
			if err != nil || from.Port() != to.Port() || from.Addr().Unmap() != to.Addr() || string(buf[:got]) != to.String() {
				t.Errorf("sent to %v, %q came back from %v, %v", to, buf[:got], from, err)
			}
		}
	}
}

// countsAddUp checks that each received datagram is counted as forwarded or refused.
func countsAddUp(t *testing.T, n *network, f family) {
	n.downstream.discardUDP(t, f.udp())
	d := n.shaper.shaperd(t, config(f, limit("half", onUDP, keySource, `packets = "2000pps"`, `max_delay = "50ms"`)))
	lostBefore := kernelDrops(t, n.shaper)
	c := n.downstream.capture(t, lab.DownstreamLink, udpPort, 1<<14)
	p := n.client.newPaced(t, f.sources[0], f.udpListenAddr(), paced{size: 100, rate: 4000})
	sent, err := p.send(time.Second)
	must(t, err)
	n.awaitEmptyQueue(t, d, "half", 100, sent, lostBefore)
	arrived := len(c.stop())
	m := d.metrics()
	passed := m.Sum("shaperd_limit_packets_total", `limit="half"`, `verdict="pass"`) + m.Sum("shaperd_limit_packets_total", `limit="half"`, `verdict="delay"`)
	refused := m.Sum("shaperd_limit_packets_total", `limit="half"`, `verdict="refuse"`)
	out := m.Sum("shaperd_listener_bytes_total", `direction="to-downstream"`) / 100
	lost := kernelDrops(t, n.shaper) - lostBefore
	all := int(passed + refused)
	if int(passed) != int(out) || arrived > int(out) || arrived+lost < int(out) || all > sent || all+lost < sent || refused == 0 {
		t.Errorf("%d sent and %d arrived; the daemon counts %v passed, %v refused and %v forwarded (by bytes)\n%s", sent, arrived, passed, refused, out, m)
	}
}
