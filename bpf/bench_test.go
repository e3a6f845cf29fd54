package bpf

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/asn"
)

// limitsOf returns n limits that all match a UDP packet to port 53, each with another
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

func (b *bench) loadLimits(t testing.TB, limits []shaper.Limit, table *asn.Table) {
	t.Helper()
	p, err := shaper.New(1024).Compile(limits, nil, []shaper.Attachment{{Name: "here"}}, table, false)
	if err != nil {
		t.Fatal(err)
	}
	b.loadPolicy(t, p)
}

func (b *bench) loadPolicy(t testing.TB, p *shaper.Policy) {
	t.Helper()
	n, err := b.assignNumbers(p, []shaper.Attachment{{Name: "here"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.swap(newImage(p, n, b.Hashes, b.kernel.Buckets.MaxEntries()), nil, nil, nil); err != nil {
		t.Fatal(err)
	}
}

// BenchmarkPacket reports the cost of a packet in the kernel, by the number of limits that it
// is under. The packet is always the same.
func BenchmarkPacket(b *testing.B) {
	for _, n := range []int{0, 1, 2, 4, 8, 16, 64} {
		at := kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1, MaxLimits: shaper.MaxLimits}
		if n <= fewLimits {
			at.MaxLimits = fewLimits
		}
		b.Run(fmt.Sprintf("%d limits", n), func(b *testing.B) {
			k := newTimed(b, at)
			k.loadLimits(b, limitsOf(n), nil)
			timeProgram(b, k.ShaperdTc, datagram(1))
		})
		b.Run(fmt.Sprintf("%d limits, other buckets monitored", n), func(b *testing.B) {
			k := newTimed(b, at)
			k.loadLimits(b, limitsOf(n), nil)
			for i := range k.owners {
				k.owners[i] = [2]uint64{1, 1} // of another generation
			}
			timeProgram(b, k.ShaperdTc, datagram(1))
		})
	}
}

// BenchmarkQueuedPacket reports the cost of a packet that waits in the queue.
func BenchmarkQueuedPacket(b *testing.B) {
	for _, n := range []int{1, 2} {
		b.Run(fmt.Sprintf("%d limits", n), func(b *testing.B) {
			k := newTimed(b, kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1, QueueLimit: 10_000_000})
			limits := limitsOf(n)
			for i := range limits {
				limits[i].Rate = 8e6
			}
			k.loadLimits(b, limits, nil)
			timeProgram(b, k.ShaperdTc, datagram(1))
		})
	}
}

// BenchmarkRefusedPacket reports the cost of a refused packet: by a limit that blocks, and by a full
// bucket.
func BenchmarkRefusedPacket(b *testing.B) {
	for _, l := range []shaper.Limit{
		{Name: "block", Block: true},
		{Name: "full", Packets: shaper.Frequency{N: 1, Per: time.Hour}},
	} {
		b.Run(l.Name, func(b *testing.B) {
			k := newTimed(b, kernelConfig{Mode: programModes[shaper.AttachPolice], Ethernet: 1, Keep: 1})
			k.loadLimits(b, attachHere(l), nil)
			timeProgram(b, k.ShaperdTc, datagram(1))
		})
	}
}

// newTimed returns a bench on the kernel's clock, as in production.
func newTimed(t testing.TB, at kernelConfig) *bench { return newVariant(t, at, nil) }

// timeProgram runs a program on a packet b.N times in the kernel, several times, and
// reports the minimum, as other load only adds to it.
func timeProgram(b *testing.B, program *ebpf.Program, data []byte) {
	b.Helper()
	least := time.Hour
	for range 8 {
		_, took, err := program.Benchmark(data, b.N, nil)
		if err != nil {
			b.Fatal(err)
		}
		least = min(least, took)
	}
	b.ReportMetric(float64(least.Nanoseconds()), "ns/op")
}

// BenchmarkHarness reports the overhead in the other figures: of a test run itself, and of
// reading the kernel's clock.
func BenchmarkHarness(b *testing.B) {
	for _, c := range []struct {
		name string
		body asm.Instructions
	}{
		{"empty program", nil},
		{"clock", asm.Instructions{asm.FnKtimeGetNs.Call()}},
	} {
		b.Run(c.name, func(b *testing.B) {
			p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
				Type: ebpf.SchedCLS, License: "GPL",
				Instructions: append(c.body, asm.Mov.Imm(asm.R0, -1), asm.Return()),
			})
			if err != nil {
				b.Fatal(err)
			}
			defer p.Close()
			timeProgram(b, p, datagram(1))
		})
	}
}

// BenchmarkFullTable reports the cost of a packet with a full table of autonomous systems, and
// with a million random sources, each with a backlog in its bucket.
func BenchmarkFullTable(b *testing.B) {
	const (
		million = 1 << 20
		all     = 1<<32 - 1
		routed6 = 0x2000_0000 + 115_000<<8 // first words of addresses, half of them in the table
	)
	ranges, table := fullTable(b)
	sixteen := slices.Clone(ranges[:16])
	for i := range sixteen {
		sixteen[i].First, sixteen[i].Last = ipv4(uint32(i)<<28), ipv4(uint32(i)<<28+1<<27)
	}
	few, err := asn.New(sixteen)
	if err != nil {
		b.Fatal(err)
	}
	limits := limitsOf(4)
	limits[0].Rate = 8 // a packet takes longer than the benchmark
	limits[1].Key, limits[2].Key = shaper.KeyASN, shaper.KeyASN
	limits[3].Key = 0
	free := limits[1:2]
	at := kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1}
	for _, c := range []struct {
		name    string
		limits  []shaper.Limit
		table   *asn.Table
		sources uint32
		packet  []byte
	}{
		{"IPv4, one source, one limit by ASN of 16", free, few, 0, datagram(1)},
		{"IPv4, one source, one limit by ASN", free, table, 0, datagram(1)},
		{"IPv4, all addresses, one limit by ASN of 16", free, few, all, datagram(1)},
		{"IPv4, all addresses, one limit by ASN", free, table, all, datagram(1)},
		{"IPv6, one source, one limit by ASN", free, table, 0, ecnDatagram(true, 0)},
		{"IPv6, all prefixes, one limit by ASN", free, table, routed6, ecnDatagram(true, 0)},
		{"a million sources, no limit", nil, nil, million, datagram(1)},
		{"a million buckets, one limit by source", limits[:1], nil, million, datagram(1)},
		{"a million buckets, four limits", limits, table, million, datagram(1)},
	} {
		b.Run(c.name, func(b *testing.B) {
			k := newSized(b, million+1<<17, at, map[string]any{kernelVarTestSources: c.sources})
			k.loadLimits(b, c.limits, c.table)
			if _, err := k.ShaperdTc.Run(&ebpf.RunOptions{Data: c.packet, Repeat: 1 + min(8*c.sources, 8*million)}); err != nil {
				b.Fatal(err)
			}
			timeProgram(b, k.ShaperdTc, c.packet)
			// By chance a few keys find all their slots taken.
			if counts, err := k.tableCounts(); err != nil || counts.EvictedBacklogged > million/1000 {
				b.Errorf("%+v, %v: the table was too small", counts, err)
			}
		})
	}
}
