package bpf

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

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
	b.useCompiled(t, p)
}

func (b *bench) useCompiled(t testing.TB, p *shaper.Policy) {
	t.Helper()
	n, err := b.number(p, []Attachment{{Name: "here"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.swap(newImage(p, n, b.Hashes, b.kernel.Buckets.MaxEntries()), nil, nil, nil); err != nil {
		t.Fatal(err)
	}
}

// BenchmarkPacket reports what a packet costs in the kernel, by how many limits it is
// under: the same one over and over.
func BenchmarkPacket(b *testing.B) {
	for _, n := range []int{0, 1, 2, 4, 8, 16, 64} {
		at := kernelAttachment{Mode: uint32(Shape), Ethernet: 1, Keep: 1, Limits: shaper.MaxLimits}
		if n <= fewLimits {
			at.Limits = fewLimits
		}
		b.Run(fmt.Sprintf("%d limits", n), func(b *testing.B) {
			k := newTimed(b, at)
			k.use(b, limitsOf(n), nil)
			timeProgram(b, k.ShaperdTc, datagram(1))
		})
		b.Run(fmt.Sprintf("%d limits, other buckets watched", n), func(b *testing.B) {
			k := newTimed(b, at)
			k.use(b, limitsOf(n), nil)
			for i := range k.owners {
				k.owners[i] = [2]uint64{1, 1} // of no generation
			}
			timeProgram(b, k.ShaperdTc, datagram(1))
		})
	}
}

// BenchmarkWaiting reports what one costs that has to wait in the queue.
func BenchmarkWaiting(b *testing.B) {
	for _, n := range []int{1, 2} {
		b.Run(fmt.Sprintf("%d limits", n), func(b *testing.B) {
			k := newTimed(b, kernelAttachment{Mode: uint32(Shape), Ethernet: 1, Keep: 1, Queue: 10_000_000})
			limits := limitsOf(n)
			for i := range limits {
				limits[i].Rate = 8e6
			}
			k.use(b, limits, nil)
			timeProgram(b, k.ShaperdTc, datagram(1))
		})
	}
}

// BenchmarkRefused reports what one costs that is refused: by a limit that blocks, and by
// a bucket that is full.
func BenchmarkRefused(b *testing.B) {
	for _, l := range []shaper.Limit{
		{Name: "block", Block: true},
		{Name: "full", Packets: shaper.Frequency{N: 1, Per: time.Hour}},
	} {
		b.Run(l.Name, func(b *testing.B) {
			k := newTimed(b, kernelAttachment{Mode: uint32(Police), Ethernet: 1, Keep: 1})
			k.use(b, attached(l), nil)
			timeProgram(b, k.ShaperdTc, datagram(1))
		})
	}
}

// newTimed is the programs as they are used, by the kernel's clock.
func newTimed(t testing.TB, at kernelAttachment) *bench { return newVariant(t, at, nil) }

// timeProgram runs a program over a packet b.N times in the kernel, again and again, and
// reports the least: what else the machine does takes its time too.
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

// BenchmarkHarness reports what is no part of the programs in other figures: what a
// test run takes for itself, and what the kernel takes to read its clock.
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

// BenchmarkFullTable reports the same with the published table of autonomous systems,
// and with a million sources drawn at random, each with a bucket that has a backlog.
func BenchmarkFullTable(b *testing.B) {
	const (
		million = 1 << 20
		all     = 1<<32 - 1
		routed6 = 0x2000_0000 + 115_000<<8 // of the first word of an address: half of what is in the table
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
	at := kernelAttachment{Mode: uint32(Shape), Ethernet: 1, Keep: 1}
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
			k.use(b, c.limits, c.table)
			if _, err := k.ShaperdTc.Run(&ebpf.RunOptions{Data: c.packet, Repeat: 1 + min(8*c.sources, 8*million)}); err != nil {
				b.Fatal(err)
			}
			timeProgram(b, k.ShaperdTc, c.packet)
			// By chance a few keys find all of their places taken.
			if pressure, err := k.tableCounts(); err != nil || pressure.EvictedIndebted > million/1000 {
				b.Errorf("%+v, %v: the table was too small", pressure, err)
			}
		})
	}
}
