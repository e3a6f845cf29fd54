package bpf

import (
	"testing"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/shaper"
)

// BenchmarkConnections reports the cost of a segment in the kernel, with and without limits
// that count connections. A SYN is the first one of a random source.
func BenchmarkConnections(b *testing.B) {
	rate := shaper.Limit{Name: "rate", Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 1e12}
	for _, c := range []struct {
		name    string
		limits  []shaper.Limit
		segment func(d *dialogue) []byte
		program func(k *tcpBench) *ebpf.Program
		sources uint32
	}{
		{"established, not counted", []shaper.Limit{rate}, dataSegment, limitProgram, 0},
		{"established, one cap", []shaper.Limit{rate, capped(10)}, dataSegment, limitProgram, 0},
		{"established, a cap alone", []shaper.Limit{capped(10)}, dataSegment, limitProgram, 0},
		{"established, four caps", []shaper.Limit{rate, capped(10), capNamed("a", 0), capNamed("b", shaper.KeyPort), capNamed("c", shaper.KeyAttach)}, dataSegment, limitProgram, 0},
		{"reply, not counted", []shaper.Limit{rate}, replySegment, replyProgram, 0},
		{"reply, one cap", []shaper.Limit{rate, capped(10)}, replySegment, replyProgram, 0},
		{"SYN, not counted", []shaper.Limit{rate}, synSegment, limitProgram, 1<<32 - 1},
		{"SYN, one cap", []shaper.Limit{rate, capped(10)}, synSegment, limitProgram, 1<<32 - 1},
		{"SYN, one cap for all", []shaper.Limit{rate, capNamed("a", 0)}, synSegment, limitProgram, 1<<32 - 1},
		{"SYN, four caps", []shaper.Limit{rate, capped(10), capNamed("a", 0), capNamed("b", shaper.KeyPort), capNamed("c", shaper.KeyAttach)}, synSegment, limitProgram, 1<<32 - 1},
		{"SYN, new connections", []shaper.Limit{rate, {Name: "new", Key: shaper.KeySource, NewConnections: shaper.Frequency{N: 1e9, Per: 1e9}}}, synSegment, limitProgram, 1<<32 - 1},
		{"SYN, refused", []shaper.Limit{rate, dropSilently(shaper.Limit{Name: "all", MaxConnections: 1})}, synSegment, limitProgram, 1<<32 - 1},
		{"SYN, retransmitted", []shaper.Limit{rate, capped(10)}, synSegment, limitProgram, 0},
	} {
		b.Run(c.name, func(b *testing.B) {
			k := newTCPVariant(b, shaper.AttachPolice, map[string]any{kernelVarTestSources: c.sources}, testIdleTimeout, c.limits...)
			d := dial(testClient)
			if c.sources == 0 {
				d.nextSegment(client, syn, 0)
				k.open(dial(testClient))
				k.exchange(d, server, syn|ack, 0)
				k.exchange(d, client, ack, 0)
			}
			packet := c.segment(d)
			n := min(b.N, int(k.Connections.MaxEntries())/2)
			_, took, err := c.program(k).Benchmark(packet, n, nil)
			if err != nil {
				b.Fatal(err)
			}
			b.ReportMetric(float64(took.Nanoseconds()), "ns/op")
		})
	}
}

func capNamed(name string, key shaper.Fields) shaper.Limit {
	return shaper.Limit{Name: name, Key: key, MaxConnections: 1 << 20}
}

func synSegment(*dialogue) []byte     { return dial(testClient).nextSegment(client, syn, 0) }
func dataSegment(d *dialogue) []byte  { return d.nextSegment(client, ack, 100) }
func replySegment(d *dialogue) []byte { return d.nextSegment(server, ack, 100) }

func limitProgram(k *tcpBench) *ebpf.Program { return k.ShaperdTc }
func replyProgram(k *tcpBench) *ebpf.Program { return k.ShaperdReplies }

// BenchmarkReconcile reports the cost of a walk over a full table of connections.
func BenchmarkReconcile(b *testing.B) {
	k := newTCPVariant(b, shaper.AttachPolice, map[string]any{kernelVarTestSources: uint32(1<<32 - 1)}, testIdleTimeout, capNamed("a", 0))
	k.flood(synSegment(nil), 200_000)
	for b.Loop() {
		if n, err := k.reconcile(uint64(monotonic() / 64)); n != 0 || err != nil {
			b.Fatal(n, err)
		}
	}
}
