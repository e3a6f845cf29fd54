package main

import (
	"context"
	"fmt"
)

// packetLoads measure the cost of one packet in the kernel, by its own test runs.
func packetLoads(short bool) []load {
	counts, pattern := []int{0, 1, 2, 4, 8, 16, 64}, "^(BenchmarkHarness|BenchmarkPacket)$"
	if short {
		counts, pattern = []int{0, 1, 4}, "^(BenchmarkHarness|BenchmarkPacket)$/^(empty_program|clock|[014]_limits)$"
	}
	rows := []benchRow{{"an empty program", "Harness/empty_program"}, {"reading the clock", "Harness/clock"}}
	for _, n := range counts {
		rows = append(rows, benchRow{counted(n, "limit"), fmt.Sprintf("Packet/%d_limits", n)})
	}
	list := []load{packetLoad("a packet, by limits", "the same packet repeatedly, by BPF_PROG_TEST_RUN", "1 limit", rows, pattern)}
	if short {
		return list
	}
	rows = nil
	for _, r := range []benchRow{
		{"16 ranges, one source", "IPv4,_one_source,_one_limit_by_ASN_of_16"},
		{"515,000 ranges, one source", "IPv4,_one_source,_one_limit_by_ASN"},
		{"16 ranges, all addresses", "IPv4,_all_addresses,_one_limit_by_ASN_of_16"},
		{"515,000 ranges, all addresses", "IPv4,_all_addresses,_one_limit_by_ASN"},
		{"a million buckets, 1 limit by source", "a_million_buckets,_one_limit_by_source"},
	} {
		rows = append(rows, benchRow{r.name, "FullTable/" + r.bench})
	}
	l := packetLoad("a packet, by tables", "IPv4 packets under a limit by ASN, with a table of 16 or 515,000 ranges, and under a limit by source, with a million backlogged sources; by BPF_PROG_TEST_RUN",
		rows[0].name, rows, "^BenchmarkFullTable$/^(IPv4|a_million_buckets,_one)")
	l.repeat = 1
	return append(list, l)
}

func packetLoad(name, about, baseline string, rows []benchRow, pattern string) load {
	return load{
		name: name, description: about, headline: "ns", figures: []string{"ns"}, programs: names(rows), baseline: baseline,
		custom: func(ctx context.Context, _ *bench) (map[string][]sample, error) {
			t, err := benchmark(ctx, "./bpf", pattern, "-benchtime=20000x")
			if err != nil {
				return nil, err
			}
			return t.samples(rows)
		},
	}
}
