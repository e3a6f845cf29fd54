package bpf

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/shaper"
)

// ECN-capable packets that wait for more than half of max_delay are marked and counted.
func TestECNMarks(t *testing.T) {
	t.Parallel()
	for _, hook := range []struct {
		name    string
		mode    shaper.AttachMode
		program func(*bench) *ebpf.Program
	}{
		{"tc", shaper.AttachShape, func(b *bench) *ebpf.Program { return b.ShaperdTc }},
		{"XDP", shaper.AttachPolice, func(b *bench) *ebpf.Program { return b.ShaperdXdp }},
	} {
		t.Run(hook.name, func(t *testing.T) {
			b := newBench(t, kernelConfig{Mode: programModes[hook.mode], Ethernet: 1, Keep: 1})
			b.loadLimits(t, []shaper.Limit{{
				Name: "slow", Match: shaper.Match{Attach: []string{"here"}}, Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64,
				Rate: 800, MaxDelay: 10 * time.Second, ECNMark: 50, // a datagram a second
			}}, nil)
			if err := b.TestNow.Set(uint64(time.Hour)); err != nil {
				t.Fatal(err)
			}
			for _, ipv6 := range []bool{false, true} {
				for ecn := range byte(4) {
					for _, tag := range [][]byte{nil, {0x81, 0x00, 0x20, 0x07}} {
						packet := slices.Insert(ecnDatagram(ipv6, ecn), 12, tag...)
						b.testMarks(t, hook.program(b), packet, 14+len(tag), ecn == 1 || ecn == 2)
					}
				}
			}
		})
	}
}

// testMarks sends a packet, whose IP header is at l3, ten times at once.
func (b *bench) testMarks(t *testing.T, program *ebpf.Program, packet []byte, l3 int, markable bool) {
	t.Helper()
	b.clearState(t)
	before, err := b.readState(0)
	if err != nil {
		t.Fatal(err)
	}
	var marks uint64
	for i := range 10 {
		options := &ebpf.RunOptions{Data: packet, DataOut: make([]byte, 2048)}
		if _, err := program.Run(options); err != nil {
			t.Fatal(err)
		}
		want := packet
		if markable && i > 5 {
			marks++
			want = slices.Clone(packet)
			if want[l3]>>4 == 4 {
				want[l3+1] |= 3
				setHeaderSum(want[l3 : l3+20])
			} else {
				want[l3+1] |= 3 << 4
			}
		}
		if !bytes.Equal(options.DataOut, want) {
			t.Errorf("datagram %d, which waits for %d s: got\n%x, want\n%x", i, i, options.DataOut[:l3+40], want[:l3+40])
		}
	}
	after, err := b.readState(0)
	if err != nil {
		t.Fatal(err)
	}
	if got := after.Marked - before.Marked; got != marks {
		t.Errorf("%d counted as marked, want %d: %x", got, marks, packet[:l3+2])
	}
}

// ecnDatagram returns a datagram of 100 bytes with an ECN codepoint.
func ecnDatagram(ipv6 bool, ecn byte) []byte {
	b := datagram(1)
	if !ipv6 {
		b[15] = ecn
		setHeaderSum(b[14:34])
		return b
	}
	head := make([]byte, 40)
	head[0], head[1] = 0x60, ecn<<4
	binary.BigEndian.PutUint16(head[4:], 108)
	head[6], head[7], head[8], head[24] = ipUDP, 64, 0xfd, 0xfd
	b[12], b[13] = 0x86, 0xdd
	return slices.Concat(b[:14], head, b[34:])
}

func setHeaderSum(header []byte) {
	header[10], header[11] = 0, 0
	binary.BigEndian.PutUint16(header[10:], ^checksum(header, 0))
}
