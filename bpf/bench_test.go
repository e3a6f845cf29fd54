package bpf

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"shaperd/shaper"
	"shaperd/shaper/asn"
)

// limitsOf makes n limits that all take in a UDP packet to port 53, each with another
// kind of key.
func limitsOf(n int) []shaper.Limit {
	var limits []shaper.Limit
	for i := range n {
		l := shaper.Limit{
			Name: fmt.Sprint("l", i), Match: shaper.Match{Attach: []string{"here"}},
			IPv4Prefix: 32, IPv6Prefix: 64, Rate: 1e12, MaxDelay: time.Hour, ECNMark: 50,
			Key: []shaper.Fields{shaper.KeySource, 0, shaper.KeyPort, shaper.KeySource | shaper.KeyPort}[i%4],
		}
		if i%4 == 2 {
			l.Match.Port = []shaper.PortRange{{First: 53, Last: 53}}
		}
		if i%4 == 1 {
			l.Match.Protocol = shaper.UDP
		}
		limits = append(limits, l)
	}
	return limits
}

func (b *bench) use(t testing.TB, limits []shaper.Limit, table *asn.Table) {
	t.Helper()
	p, err := shaper.New(1024).Compile(limits, nil, []shaper.Attachment{{Name: "here"}}, table, false)
	if err != nil {
		t.Fatal(err)
	}
	n, err := b.number(p, []Attachment{{Name: "here"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.swap(newImage(p, n, b.Hashes, b.kernel.Buckets.MaxEntries())); err != nil {
		t.Fatal(err)
	}
}

// BenchmarkPacket reports what a packet costs in the kernel, by how many limits it is
// under: the same one over and over.
func BenchmarkPacket(b *testing.B) {
	at := kernelAttachment{Mode: uint32(Shape), Ethernet: 1, Keep: 1}
	for _, n := range []int{0, 1, 2, 4, 8, 16, 64} {
		b.Run(fmt.Sprintf("%d limits", n), func(b *testing.B) {
			k := newTimed(b, at)
			k.use(b, limitsOf(n), nil)
			k.time(b, k.ShaperdTc, datagram(1))
		})
	}
}

// newTimed is the programs as they are used, by the kernel's clock.
func newTimed(t testing.TB, at kernelAttachment) *bench { return newVariant(t, at, nil) }

// time runs a program over a packet b.N times in the kernel.
func (k *bench) time(b *testing.B, program *ebpf.Program, data []byte) {
	b.Helper()
	_, took, err := program.Benchmark(data, b.N, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(took.Nanoseconds()), "ns/op")
}

// BenchmarkFullTable reports the same with the published table of autonomous systems,
// and with a million sources drawn at random, each with a live bucket.
func BenchmarkFullTable(b *testing.B) {
	table := fullTable(b)
	limits := limitsOf(4)
	limits[1].Key, limits[2].Key = shaper.KeyASN, shaper.KeyASN
	limits[3].Key = 0
	at := kernelAttachment{Mode: uint32(Shape), Ethernet: 1, Keep: 1}
	for _, c := range []struct {
		name    string
		limits  []shaper.Limit
		table   *asn.Table
		sources uint32
	}{
		{"one source", limits, table, 0},
		{"a million sources, no limit", nil, nil, 1 << 20},
		{"a million sources, one limit by source", limits[:1], nil, 1 << 20},
		{"all addresses, one limit by ASN", limits[1:2], table, 1<<32 - 1},
		{"a million sources, four limits", limits, table, 1 << 20},
	} {
		b.Run(c.name, func(b *testing.B) {
			k := newVariant(b, at, map[string]any{kernelVarTestSources: c.sources})
			k.use(b, c.limits, c.table)
			k.time(b, k.ShaperdTc, datagram(1))
		})
	}
}

// fullTable is as large as a published table: 400,000 ranges of IPv4 and 115,000 of
// IPv6, of 91,000 autonomous systems.
func fullTable(t testing.TB) *asn.Table {
	t.Helper()
	const asns = 91_000
	rnd := rand.New(rand.NewPCG(1, 0))
	var ranges []asn.Range
	const step = 1 << 32 / 400_000
	for first := uint64(0); first+step < 1<<32; first += step {
		last := first + step - 1 - rnd.Uint64N(step/2)
		ranges = append(ranges, asn.Range{First: ipv4(uint32(first)), Last: ipv4(uint32(last)), ASN: 1 + rnd.Uint32N(asns)})
	}
	for i := range uint64(115_000) {
		var first [16]byte
		binary.BigEndian.PutUint64(first[:], 0x2000_0000_0000_0000+i<<40)
		last := first
		for j := 5 + rnd.IntN(3); j < 16; j++ {
			last[j] = 0xff
		}
		ranges = append(ranges, asn.Range{First: netip.AddrFrom16(first), Last: netip.AddrFrom16(last), ASN: 1 + rnd.Uint32N(asns)})
	}
	table, err := asn.New(ranges)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func ipv4(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}
