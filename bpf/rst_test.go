package bpf

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/shaper"
)

// rstHeader has the fields of an RST.
type rstHeader struct {
	Ethernet         []byte // with tags and type
	From, To         netip.Addr
	TTL, TOS         byte
	Fragment, Length int
	Sport, Dport     uint16
	Seq, Ack         uint32
	Flags            byte
	Window, Urgent   uint16
	DataOffset       int
}

// parseRST parses a packet and verifies its checksums.
func parseRST(t *testing.T, b []byte, l3 int) rstHeader {
	t.Helper()
	h := rstHeader{Ethernet: b[:l3]}
	l4 := l3
	if b[l3]>>4 == 4 {
		h.From, _ = netip.AddrFromSlice(b[l3+12 : l3+16])
		h.To, _ = netip.AddrFromSlice(b[l3+16 : l3+20])
		h.TTL, h.TOS = b[l3+8], b[l3+1]
		h.Fragment = int(binary.BigEndian.Uint16(b[l3+6:]))
		h.Length = int(binary.BigEndian.Uint16(b[l3+2:]))
		if b[l3] != 0x45 || b[l3+9] != ipTCP || checksum(b[l3:l3+20], 0) != 0xffff {
			t.Errorf("IPv4 header %x", b[l3:l3+20])
		}
		l4 += 20
	} else {
		h.From, _ = netip.AddrFromSlice(b[l3+8 : l3+24])
		h.To, _ = netip.AddrFromSlice(b[l3+24 : l3+40])
		h.TTL = b[l3+7]
		h.Length = 40 + int(binary.BigEndian.Uint16(b[l3+4:]))
		if binary.BigEndian.Uint32(b[l3:]) != 6<<28 || b[l3+6] != ipTCP {
			t.Errorf("IPv6 header %x", b[l3:l3+40])
		}
		l4 += 40
	}
	tcp := b[l4 : l3+h.Length]
	if sum := checksum(tcp, pseudo(h.From, h.To, len(tcp))); sum != 0xffff {
		t.Errorf("TCP's checksum is off: %x", sum)
	}
	h.Sport, h.Dport = binary.BigEndian.Uint16(tcp), binary.BigEndian.Uint16(tcp[2:])
	h.Seq, h.Ack = binary.BigEndian.Uint32(tcp[4:]), binary.BigEndian.Uint32(tcp[8:])
	h.DataOffset, h.Flags = int(tcp[12]>>4)*4, tcp[13]
	h.Window, h.Urgent = binary.BigEndian.Uint16(tcp[14:]), binary.BigEndian.Uint16(tcp[18:])
	return h
}

func TestRST(t *testing.T) {
	t.Parallel()
	b := newTCP(t, shaper.AttachPolice, shaper.Limit{Name: "none", MaxConnections: 1})
	b.open(dial(testClient))
	eight := [2]netip.AddrPort{netip.MustParseAddrPort("[2001:db8::1]:40001"), netip.MustParseAddrPort("[2001:db8::2]:5432")}
	tags := []byte{0x81, 0x00, 0x20, 0x07}
	tags2 := append([]byte{0x88, 0xa8, 0, 9}, tags...)
	for _, c := range []struct {
		name   string
		ipv6   bool
		tags   []byte
		change func([]byte) []byte // of the packet without tags; its checksums are then right
		drop   bool
	}{
		{name: "IPv4"},
		{name: "IPv6", ipv6: true},
		{name: "IPv4 with a tag", tags: tags},
		{name: "IPv6 with two tags", ipv6: true, tags: tags2},
		{name: "without options", change: func(p []byte) []byte {
			p[17] -= 20
			p[46] = 0x50
			return p[:54]
		}},
		{name: "padded", change: func(p []byte) []byte { return append(p, make([]byte, 9)...) }},
		{name: "with ECN", change: func(p []byte) []byte { p[47] |= 0xc0; return p }},
		{name: "with payload", change: func(p []byte) []byte { p[17]++; return append(p, 1) }, drop: true},
		{name: "with options of IP", change: func(p []byte) []byte {
			p[14]++
			p[17] += 4
			return slices.Insert(p, 34, 1, 1, 1, 0)
		}, drop: true},
		{name: "with an extension header", ipv6: true, change: func(p []byte) []byte {
			p[19] += 8
			p[20] = 60
			return slices.Insert(p, 54, ipTCP, 0, 1, 4, 0, 0, 0, 0)
		}, drop: true},
	} {
		d := dial("10.0.0.1:40001")
		if c.ipv6 {
			d.ends = eight
		}
		d.next[client] = 0xffffffff // wraps around
		packet := d.nextSegment(client, syn, 0)
		if c.change != nil {
			packet = c.change(packet)
		}
		fixChecksums(packet)
		packet = slices.Insert(packet, 12, c.tags...)
		l3 := 14 + len(c.tags)
		want := rstHeader{
			Ethernet: slices.Concat(packet[6:12], packet[:6], packet[12:l3]),
			From:     d.ends[server].Addr(), To: d.ends[client].Addr(),
			TTL: 64, Fragment: 0x4000, Length: 40,
			Sport: d.ends[server].Port(), Dport: d.ends[client].Port(),
			Ack: 0, Flags: rst | ack, DataOffset: 20,
		}
		if c.ipv6 {
			want.Length, want.Fragment = 60, 0
		}
		t.Run(c.name+", tc", func(t *testing.T) {
			out := make([]byte, 2048)
			options := &ebpf.RunOptions{Data: packet, DataOut: out}
			action, err := b.ShaperdTc.Run(options)
			if err != nil {
				t.Fatal(err)
			}
			if c.drop {
				if action != dropped {
					t.Errorf("action %d", int32(action))
				}
				return
			}
			if action != answered {
				t.Fatalf("action %d", int32(action))
			}
			if diff := cmp.Diff(want, parseRST(t, options.DataOut, l3), cmp.Comparer(sameAddr)); diff != "" {
				t.Error(diff)
			}
			if n := len(options.DataOut); n != l3+want.Length {
				t.Errorf("%d bytes", n)
			}
		})
		t.Run(c.name+", XDP", func(t *testing.T) {
			out := make([]byte, 2048)
			options := &ebpf.RunOptions{Data: packet, DataOut: out}
			action, err := b.ShaperdXdp.Run(options)
			if err != nil {
				t.Fatal(err)
			}
			if c.drop {
				if action != xdpDrop {
					t.Errorf("action %d", action)
				}
				return
			}
			if action != 3 {
				t.Fatalf("action %d", action)
			}
			if diff := cmp.Diff(want, parseRST(t, options.DataOut, l3), cmp.Comparer(sameAddr)); diff != "" {
				t.Error(diff)
			}
			if n := len(options.DataOut); n != max(l3+want.Length, min(60, len(packet))) {
				t.Errorf("%d bytes", n)
			}
		})
	}
	// An invalid checksum does not become valid.
	d := dial("10.0.0.1:40001")
	packet := d.nextSegment(client, syn, 0)
	packet[50] ^= 0x55
	options := &ebpf.RunOptions{Data: packet, DataOut: make([]byte, 2048)}
	if action, err := b.ShaperdTc.Run(options); action != answered || err != nil {
		t.Fatal(action, err)
	}
	if out := options.DataOut; checksum(out[34:], pseudo(d.ends[0].Addr(), d.ends[1].Addr(), 20)) == 0xffff {
		t.Error("the answer to a spoiled SYN has a good checksum")
	}
	if !bytes.Equal(packet[:6], options.DataOut[6:12]) {
		t.Error("addresses are not swapped")
	}
}

func sameAddr(a, b netip.Addr) bool { return a == b }

// fixChecksums makes the checksums of a packet without tags right.
func fixChecksums(b []byte) {
	l4 := 54
	var from, to netip.Addr
	end := len(b)
	if b[14]>>4 == 4 {
		l4 = 14 + int(b[14]&15)*4
		b[24], b[25] = 0, 0
		binary.BigEndian.PutUint16(b[24:], ^checksum(b[14:l4], 0))
		from, to = netip.AddrFrom4([4]byte(b[26:])), netip.AddrFrom4([4]byte(b[30:]))
		end = 14 + int(binary.BigEndian.Uint16(b[16:]))
	} else {
		from, to = netip.AddrFrom16([16]byte(b[22:])), netip.AddrFrom16([16]byte(b[38:]))
		if b[20] == 60 {
			l4 += 8
		}
	}
	b[l4+16], b[l4+17] = 0, 0
	binary.BigEndian.PutUint16(b[l4+16:], ^checksum(b[l4:end], pseudo(from, to, end-l4)))
}
