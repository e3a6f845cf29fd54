package lab

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

var (
	a4, b4 = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	a6, b6 = netip.MustParseAddr("fd00::1"), netip.MustParseAddr("fd00::2")
)

// ipv4 returns a packet from a4 to b4 with a header of the given number of words.
func ipv4(words int, proto byte, body []byte) []byte {
	p := make([]byte, 4*words)
	p[0], p[9] = 0x40|byte(words), proto
	binary.BigEndian.PutUint16(p[2:], uint16(len(p)+len(body)))
	copy(p[12:], a4.AsSlice())
	copy(p[16:], b4.AsSlice())
	return append(p, body...)
}

// ipv6 returns a packet from a6 to b6.
func ipv6(proto byte, body []byte) []byte {
	p := make([]byte, 40)
	p[0], p[6] = 0x60, proto
	binary.BigEndian.PutUint16(p[4:], uint16(len(body)))
	copy(p[8:], a6.AsSlice())
	copy(p[24:], b6.AsSlice())
	return append(p, body...)
}

// tcp returns a segment with sequence number 7 and a header of the given number of words.
func tcp(from, to uint16, words int, flags byte, payload string) []byte {
	p := make([]byte, 4*words)
	binary.BigEndian.PutUint16(p, from)
	binary.BigEndian.PutUint16(p[2:], to)
	binary.BigEndian.PutUint32(p[4:], 7)
	p[12], p[13] = byte(words)<<4, flags
	return append(p, payload...)
}

func udp(from, to uint16, payload string) []byte {
	p := make([]byte, 8)
	binary.BigEndian.PutUint16(p, from)
	binary.BigEndian.PutUint16(p[2:], to)
	return append(p, payload...)
}

func with(p []byte, at int, value byte) []byte {
	p = slices.Clone(p)
	p[at] = value
	return p
}

func TestParse(t *testing.T) {
	from4, to4 := netip.AddrPortFrom(a4, 4096), netip.AddrPortFrom(b4, 80)
	from6, to6 := netip.AddrPortFrom(a6, 4096), netip.AddrPortFrom(b6, 80)
	abc := [16]byte{'a', 'b', 'c'}
	long := strings.Repeat("0123456789", 10)
	head := [16]byte([]byte(long))
	for _, test := range []struct {
		name   string
		packet []byte
		want   Arrival
	}{
		{"ipv4 udp", ipv4(5, 17, udp(4096, 80, "abc")), Arrival{From: from4, To: to4, Payload: 3, Head: abc}},
		{"ipv6 udp", ipv6(17, udp(4096, 80, "abc")), Arrival{From: from6, To: to6, Payload: 3, Head: abc}},
		{"ipv4 tcp", ipv4(5, 6, tcp(4096, 80, 5, ACK, "abc")), Arrival{From: from4, To: to4, Payload: 3, Seq: 7, Flags: ACK, Head: abc}},
		{"ipv6 tcp", ipv6(6, tcp(4096, 80, 8, SYN|ACK, "")), Arrival{From: from6, To: to6, Seq: 7, Flags: SYN | ACK}},
		{"options", ipv4(15, 6, tcp(4096, 80, 15, FIN, "abc")), Arrival{From: from4, To: to4, Payload: 3, Seq: 7, Flags: FIN, Head: abc}},
		{"cut in the payload", ipv4(5, 17, udp(4096, 80, long))[:snapSize], Arrival{From: from4, To: to4, Payload: 100, Head: head}},
		{"cut in the options", ipv6(6, tcp(4096, 80, 15, ACK, long))[:snapSize], Arrival{From: from6, To: to6, Payload: 100, Seq: 7, Flags: ACK}},
		{"no payload", ipv4(5, 17, udp(4096, 80, "")), Arrival{From: from4, To: to4}},
		{"ipv4 marked", with(ipv4(5, 17, udp(4096, 80, "abc")), 1, 3), Arrival{From: from4, To: to4, Payload: 3, Head: abc, Marked: true}},
		{"ipv4 capable", with(ipv4(5, 17, udp(4096, 80, "abc")), 1, 2), Arrival{From: from4, To: to4, Payload: 3, Head: abc}},
		{"ipv6 marked", with(ipv6(17, udp(4096, 80, "abc")), 1, 0x30), Arrival{From: from6, To: to6, Payload: 3, Head: abc, Marked: true}},
		{"ipv6 capable", with(ipv6(17, udp(4096, 80, "abc")), 1, 0x20), Arrival{From: from6, To: to6, Payload: 3, Head: abc}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got, ok := parse(test.packet); !ok || got != test.want {
				t.Errorf("got %+v, %v, want %+v", got, ok, test.want)
			}
		})
	}
	for name, packet := range map[string][]byte{
		"nothing":                  nil,
		"ipv4 icmp":                ipv4(5, 1, udp(4096, 80, "")),
		"ipv6 icmp":                ipv6(58, udp(4096, 80, "")),
		"version 5":                with(ipv4(5, 17, udp(4096, 80, "")), 0, 0x55),
		"short ipv4":               ipv4(5, 17, nil)[:19],
		"short ipv4 options":       ipv4(15, 17, nil)[:59],
		"ipv4 header too short":    with(ipv4(5, 17, udp(4096, 80, "")), 0, 0x44),
		"short ipv6":               ipv6(17, nil)[:39],
		"short tcp":                ipv4(5, 6, tcp(4096, 80, 5, ACK, ""))[:39],
		"short udp":                ipv6(17, udp(4096, 80, ""))[:47],
		"length less than headers": with(ipv4(5, 17, udp(4096, 80, "")), 3, 27),
	} {
		if got, ok := parse(packet); ok {
			t.Errorf("%s was parsed as %+v", name, got)
		}
	}
}

// TestFilter runs the filter program in a VM, as the kernel would.
func TestFilter(t *testing.T) {
	const port = 5432
	vm, err := bpf.NewVM(Filter{Port: port}.program())
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name   string
		packet []byte
		keep   bool
	}{
		{"ipv4 tcp to it", ipv4(5, 6, tcp(9, port, 5, ACK, "")), true},
		{"ipv4 tcp from it", ipv4(5, 6, tcp(port, 9, 5, ACK, "")), true},
		{"ipv4 tcp of others", ipv4(5, 6, tcp(9, 10, 5, ACK, "")), false},
		{"ipv4 udp to it", ipv4(5, 17, udp(9, port, "")), true},
		{"ipv4 udp from it", ipv4(5, 17, udp(port, 9, "")), true},
		{"ipv4 udp of others", ipv4(5, 17, udp(9, 10, "")), false},
		{"ipv4 options, to it", ipv4(15, 17, udp(9, port, "")), true},
		{"ipv4 options, of others", ipv4(15, 17, udp(9, 10, "")), false},
		{"ipv4 icmp", ipv4(5, 1, udp(port, port, "")), false},
		{"first fragment", with(ipv4(5, 17, udp(9, port, "")), 6, 0x20), true},
		{"later fragment", with(ipv4(5, 17, udp(9, port, "")), 7, 0x01), false},
		{"last fragment", with(ipv4(5, 17, udp(9, port, "")), 6, 0x10), false},
		{"not to be fragmented", with(ipv4(5, 17, udp(9, port, "")), 6, 0x40), true},
		{"ipv6 tcp to it", ipv6(6, tcp(9, port, 5, ACK, "")), true},
		{"ipv6 tcp from it", ipv6(6, tcp(port, 9, 5, ACK, "")), true},
		{"ipv6 tcp of others", ipv6(6, tcp(9, 10, 5, ACK, "")), false},
		{"ipv6 udp to it", ipv6(17, udp(9, port, "")), true},
		{"ipv6 udp from it", ipv6(17, udp(port, 9, "")), true},
		{"ipv6 udp of others", ipv6(17, udp(9, 10, "")), false},
		{"ipv6 icmp", ipv6(58, udp(port, port, "")), false},
		{"ipv6 fragment", ipv6(44, udp(port, port, "")), false},
		{"arp", []byte{0, 1, 8, 0, 6, 4, 0, 1, 0, 0, 0, 0, 0, 0, 10, 0, 0, 1, 0x15, 0x38, 0x15, 0x38}, false},
		{"nothing", nil, false},
	} {
		want := 0
		if test.keep {
			want = snapSize
		}
		if got, err := vm.Run(test.packet); err != nil || got != want {
			t.Errorf("%s: %d bytes of the frame captured, %v, want %d", test.name, got, err, want)
		}
	}
}

// pair returns two connected hosts: a has the interface "to" with the addresses a4 and a6, b has "in" with b4 and b6.
func pair(t *testing.T) (a, b *Host) {
	t.Helper()
	a, b = newHost(t, "a"), newHost(t, "b")
	must(t, errors.Join(
		Join(a, "to", b, "in"),
		a.SetMaxSegments("to", 1), b.SetMaxSegments("in", 1),
		a.AddAddress("to", 24, a4), a.AddAddress("to", 64, a6),
		b.AddAddress("in", 24, b4), b.AddAddress("in", 64, b6)))
	return a, b
}

// TestCaptureUDP sends datagrams to the captured port and to another one, and receives some replies.
func TestCaptureUDP(t *testing.T) {
	a, b := pair(t)
	for _, test := range []struct {
		name     string
		from, to netip.Addr
		filter   Filter
	}{
		{"ipv4, both directions", a4, b4, Filter{Port: 7}},
		{"ipv4, incoming", a4, b4, Filter{Port: 7, Incoming: true}},
		{"ipv6, both directions", a6, b6, Filter{Port: 7}},
		{"ipv6, incoming", a6, b6, Filter{Port: 7, Incoming: true}},
	} {
		t.Run(test.name, func(t *testing.T) {
			server, err := b.ListenUDP(netip.AddrPortFrom(test.to, 7))
			must(t, err)
			defer server.Close()
			c, err := b.Capture("in", test.filter, 100)
			must(t, err)
			defer c.Close()
			client, err := a.DialUDP(test.from, netip.AddrPortFrom(test.to, 7))
			must(t, err)
			defer client.Close()
			other, err := a.DialUDP(test.from, netip.AddrPortFrom(test.to, 8))
			must(t, err)
			defer other.Close()
			port := client.LocalAddr().(*net.UDPAddr).AddrPort()
			var sent []time.Duration
			buf := make([]byte, 100)
			for i := range 10 {
				sent = append(sent, c.At(time.Now()))
				buf[0] = byte(i)
				_, err := client.Write(buf)
				_, _ = other.Write(buf) // no receiver
				must(t, err)
				must(t, server.SetReadDeadline(time.Now().Add(30*time.Second)))
				_, _, err = server.ReadFrom(buf)
				must(t, err)
				_, err = server.WriteToUDPAddrPort(buf[:1], port)
				must(t, err)
			}
			end := c.Elapsed()
			list, err := c.Finish()
			must(t, err)
			var in, out []Arrival
			for _, a := range list {
				if a.Outgoing {
					out = append(out, a)
				} else {
					in = append(in, a)
				}
			}
			replies := 10
			if test.filter.Incoming {
				replies = 0
			}
			if len(in) != 10 || len(out) != replies {
				t.Fatalf("captured %d datagrams received and %d sent, want 10 and %d", len(in), len(out), replies)
			}
			for i, a := range in {
				if a.From != port || a.To != netip.AddrPortFrom(test.to, 7) || a.Payload != 100 || a.Head[0] != byte(i) || a.Flags != 0 {
					t.Errorf("datagram %d is %+v", i, a)
				}
				if a.At < sent[i] || a.At > end || i < 9 && a.At > sent[i+1] {
					t.Errorf("datagram %d arrived at %v, was sent at %v, and the next one later", i, a.At, sent[i])
				}
			}
			for i, a := range out {
				if a.To != port || a.Payload != 1 || a.Head[0] != byte(i) {
					t.Errorf("reply %d is %+v", i, a)
				}
			}
		})
	}
}

// TestCaptureTCP captures a connection at the accepting host.
func TestCaptureTCP(t *testing.T) {
	const size = 1 << 20
	a, b := pair(t)
	for name, addrs := range map[string][2]netip.Addr{"ipv4": {a4, b4}, "ipv6": {a6, b6}} {
		t.Run(name, func(t *testing.T) {
			to := netip.AddrPortFrom(addrs[1], 7)
			l, err := b.Listen(to)
			must(t, err)
			defer l.Close()
			got := make(chan error, 1)
			go func() {
				c, err := l.Accept()
				if err == nil {
					defer c.Close()
					_, err = io.Copy(io.Discard, c)
				}
				got <- err
			}()
			before, err := b.Received("in")
			must(t, err)
			capture, err := b.Capture("in", Filter{Port: 7}, 10_000)
			must(t, err)
			defer capture.Close()
			c, err := a.Dial(t.Context(), addrs[0], to, 30*time.Second)
			must(t, err)
			from := c.LocalAddr().(*net.TCPAddr).AddrPort()
			_, err = c.Write(append([]byte("head"), make([]byte, size-4)...))
			must(t, errors.Join(err, c.CloseWrite()))
			_, err = c.Read(make([]byte, 1))
			c.Close()
			if serverErr := <-got; serverErr != nil || !errors.Is(err, io.EOF) {
				t.Errorf("the connection ended with %v at the server, %v at the client", serverErr, err)
			}
			list, err := capture.Finish()
			must(t, err)
			if levels := Levels(list); len(levels) != 2 || levels[0].N != 1 || levels[1].N != 0 {
				t.Errorf("connection levels %v, want 1 and then 0", levels)
			}
			var in []Arrival
			for _, a := range list {
				if !a.Outgoing {
					in = append(in, a)
				}
			}
			if len(in) == 0 || in[0].Flags&SYN == 0 || in[0].From != from || in[0].To != to {
				t.Fatalf("%d frames received, first %+v", len(in), in[:min(1, len(in))])
			}
			events := Bytes(in)
			if n := Total(events); n != size {
				t.Errorf("%d bytes arrived, %d were sent", n, size)
			}
			data := in[slices.IndexFunc(in, func(a Arrival) bool { return a.Payload > 0 })]
			if string(data.Head[:4]) != "head" {
				t.Errorf("the first segment starts with %q", data.Head)
			}
			for _, a := range in {
				if a.Payload > 1460 {
					t.Fatalf("a frame has %d bytes: segments were merged", a.Payload)
				}
			}
			after, err := b.Received("in")
			must(t, err)
			if packets, n := int(after.Packets-before.Packets), int(after.Bytes-before.Bytes); packets < len(in) || n < size+54*len(in) || n > 2*size {
				t.Errorf("the interface counted %d packets with %d bytes, %d were captured", packets, n, len(in))
			}
		})
	}
}

// TestCapture_RingSize captures more frames than fit in one block, with a ring that is large
// enough and one that is too small.
func TestCapture_RingSize(t *testing.T) {
	a, b := pair(t)
	send := func(room int) ([]Arrival, error) {
		server, err := b.ListenUDP(netip.AddrPortFrom(b4, 7))
		must(t, err)
		defer server.Close()
		must(t, server.SetReadBuffer(1<<20))
		c, err := b.Capture("in", Filter{Port: 7}, room)
		must(t, err)
		defer c.Close()
		client, err := a.DialUDP(a4, netip.AddrPortFrom(b4, 7))
		must(t, err)
		defer client.Close()
		buf := make([]byte, 4)
		for i := range uint32(2 * perBlock) {
			_, err := client.Write(binary.BigEndian.AppendUint32(nil, i))
			must(t, err)
			if i%128 != 127 {
				continue
			}
			// The link queues a thousand, and drops others. It need not drop any.
			must(t, server.SetReadDeadline(time.Now().Add(30*time.Second)))
			for got := uint32(0); got != i; got = binary.BigEndian.Uint32(buf) {
				_, err := server.Read(buf)
				must(t, err)
			}
		}
		return c.Finish()
	}
	list, err := send(2 * perBlock)
	if err != nil || len(list) < 2*perBlock-128 {
		t.Fatalf("captured %d of %d, %v", len(list), 2*perBlock, err)
	}
	for i := 1; i < len(list); i++ {
		n, before := binary.BigEndian.Uint32(list[i].Head[:]), binary.BigEndian.Uint32(list[i-1].Head[:])
		if n <= before || list[i].At < list[i-1].At {
			t.Fatalf("frame %d has number %d at %v, after %d at %v", i, n, list[i].At, before, list[i-1].At)
		}
	}
	if list, err := send(1); err == nil || !strings.Contains(err.Error(), "its ring is too small") {
		t.Errorf("got %d frames and error %v from a ring for %d", len(list), err, perBlock)
	}
}

// TestCapture_UnknownInterface checks that a failed capture leaks no socket.
func TestCapture_UnknownInterface(t *testing.T) {
	_, b := pair(t)
	before := descriptors(t)
	if _, err := b.Capture("nowhere", Filter{Port: 7}, 1); !errors.Is(err, unix.ENODEV) {
		t.Errorf("capture at an unknown interface: %v", err)
	}
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors are open, %d before", after, before)
	}
}
