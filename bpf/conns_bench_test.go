package bpf

import (
	"testing"

	"github.com/cilium/ebpf"

	"shaperd/shaper"
)

// BenchmarkConnections reports what a segment costs in the kernel, with limits that
// count connections and without. A SYN is the first one of a random source.
func BenchmarkConnections(b *testing.B) {
	rate := shaper.Limit{Name: "rate", Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 64, Rate: 1e12}
	for _, c := range []struct {
		name    string
		limits  []shaper.Limit
		segment func(d *dialogue) []byte
		program func(k *tcpBench) *ebpf.Program
		sources uint32
	}{
		{"established, not counted", []shaper.Limit{rate}, data, throughLimits, 0},
		{"established, one cap", []shaper.Limit{rate, capped(10)}, data, throughLimits, 0},
		{"established, a cap alone", []shaper.Limit{capped(10)}, data, throughLimits, 0},
		{"established, four caps", []shaper.Limit{rate, capped(10), caps("a", 0), caps("b", shaper.KeyPort), caps("c", shaper.KeyAttach)}, data, throughLimits, 0},
		{"reply, not counted", []shaper.Limit{rate}, answer, throughNotes, 0},
		{"reply, one cap", []shaper.Limit{rate, capped(10)}, answer, throughNotes, 0},
		{"SYN, not counted", []shaper.Limit{rate}, first, throughLimits, 1<<32 - 1},
		{"SYN, one cap", []shaper.Limit{rate, capped(10)}, first, throughLimits, 1<<32 - 1},
		{"SYN, one cap for all", []shaper.Limit{rate, caps("a", 0)}, first, throughLimits, 1<<32 - 1},
		{"SYN, four caps", []shaper.Limit{rate, capped(10), caps("a", 0), caps("b", shaper.KeyPort), caps("c", shaper.KeyAttach)}, first, throughLimits, 1<<32 - 1},
		{"SYN, new connections", []shaper.Limit{rate, {Name: "new", Key: shaper.KeySource, NewConnections: shaper.Frequency{N: 1e9, Per: 1e9}}}, first, throughLimits, 1<<32 - 1},
		{"SYN, refused", []shaper.Limit{rate, silently(shaper.Limit{Name: "all", Connections: 1})}, first, throughLimits, 1<<32 - 1},
		{"SYN, again", []shaper.Limit{rate, capped(10)}, first, throughLimits, 0},
	} {
		b.Run(c.name, func(b *testing.B) {
			k := newTCPVariant(b, Police, map[string]any{kernelVarTestSources: c.sources}, testIdle, c.limits...)
			d := dial("10.0.0.1:40000")
			if c.sources == 0 {
				d.say(client, syn, 0)
				k.open(dial("10.0.0.1:40000"))
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

func caps(name string, key shaper.Fields) shaper.Limit {
	return shaper.Limit{Name: name, Key: key, Connections: 1 << 20}
}

func first(*dialogue) []byte    { return dial("10.0.0.1:40000").say(client, syn, 0) }
func data(d *dialogue) []byte   { return d.say(client, ack, 100) }
func answer(d *dialogue) []byte { return d.say(server, ack, 100) }

func throughLimits(k *tcpBench) *ebpf.Program { return k.ShaperdTc }
func throughNotes(k *tcpBench) *ebpf.Program  { return k.ShaperdReplies }

// BenchmarkReconcile reports what a walk over all connections there may be costs.
func BenchmarkReconcile(b *testing.B) {
	k := newTCPVariant(b, Police, map[string]any{kernelVarTestSources: uint32(1<<32 - 1)}, testIdle, caps("a", 0))
	k.flood(first(nil), 200_000)
	for b.Loop() {
		if n, _, err := k.reconcile(uint64(monotonic() / 64)); n != 0 || err != nil {
			b.Fatal(n, err)
		}
	}
}
