package bpf

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/asn"
)

// TestFullTable looks up sources all over a table as large as a published one, and at the
// ends of its ranges.
func TestFullTable(t *testing.T) {
	t.Parallel()
	rnd := testutil.Rand(t)
	ranges, table := fullTable(t)
	p := asnPolicy(t, table, "half", func(n uint32) bool { return n%2 == 1 })
	b := newBench(t, kernelConfig{Mode: programModes[shaper.AttachPolice], Ethernet: 1, Keep: 1})
	b.loadPolicy(t, p)
	var sources []netip.Addr
	for range 3000 {
		r := ranges[rnd.IntN(len(ranges))]
		sources = append(sources, r.First, r.Last, r.First.Prev(), r.Last.Next(), ipv4(rnd.Uint32()))
	}
	for _, s := range []string{"0.0.0.0", "255.255.255.255", "::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"} {
		sources = append(sources, netip.MustParseAddr(s))
	}
	limited := 0
	for _, source := range sources {
		if !source.IsValid() {
			continue // before the first address of all, or after the last
		}
		f := shaper.Flow{Source: source, Destination: source, Port: 53, Protocol: shaper.UDP, Origin: p.AttachmentIndex("here")}
		want := p.Route(&f).ToDownstream != 0
		_, d, _ := b.run(t, &sample{data: datagramFrom(source)}, uint64(time.Hour), (*bench).tc)
		if got := d != (kernelDecision{}); got != want {
			t.Fatalf("a packet from %v is under a limit: %v, want %v", source, got, want)
		}
		if want {
			limited++
		}
	}
	if limited < len(sources)/10 || limited > len(sources)*9/10 {
		t.Errorf("%d of %d sources are under the limit", limited, len(sources))
	}
}

// TestFullTable_Swap swaps full tables while packets flow: each packet meets the old policy or
// the new one, and none waits for the swap.
func TestFullTable_Swap(t *testing.T) {
	t.Parallel()
	const swaps = 6
	ranges, table := fullTable(t)
	var policies []*shaper.Policy
	began := time.Now()
	for _, name := range []string{"a", "b"} {
		policies = append(policies, asnPolicy(t, table, name, func(uint32) bool { return true }))
	}
	t.Logf("compiled in %v", time.Since(began)/2)
	b := newVariant(t, kernelConfig{Mode: programModes[shaper.AttachPolice], Ethernet: 1, Keep: 1}, nil)
	b.loadPolicy(t, policies[0])
	count := func() (n uint64) {
		for number := range uint32(2) {
			s, err := b.readState(number)
			if err != nil {
				t.Fatal(err)
			}
			n += s.Admitted[0][1] + s.Admitted[1][1] + s.Refused[1]
		}
		return n
	}
	before := count()
	var end atomic.Bool
	var sent uint64
	var longest time.Duration
	var done sync.WaitGroup
	done.Go(func() {
		const batch = 1000
		for !end.Load() {
			began := time.Now()
			if _, err := b.ShaperdTc.Run(&ebpf.RunOptions{Data: datagramFrom(ranges[0].First), Repeat: batch}); err != nil {
				t.Error(err)
			}
			longest = max(longest, time.Since(began))
			sent += batch
		}
	})
	var took []time.Duration
	for i := range swaps {
		began := time.Now()
		b.loadPolicy(t, policies[(i+1)%2])
		took = append(took, time.Since(began))
	}
	end.Store(true)
	done.Wait()
	t.Logf("%d packets meanwhile; a swap took %v; 1,000 packets took %v at most", sent, took, longest)
	// More if a signal interrupted a run, which is then repeated.
	if n := count() - before; n < sent {
		t.Errorf("%d packets were under a limit, of %d", n, sent)
	}
}

// asnPolicy returns a policy with one limit on the ASNs for which one returns true.
func asnPolicy(t *testing.T, table *asn.Table, name string, one func(uint32) bool) *shaper.Policy {
	t.Helper()
	l := shaper.Limit{
		Name: name, Match: shaper.Match{Attach: []string{"here"}}, Key: shaper.KeyASN,
		IPv4Prefix: 32, IPv6Prefix: 64, Rate: 8000, MaxDelay: time.Second,
	}
	for n := range uint32(fullTableASNs + 1) {
		if n > 0 && one(n) {
			l.Match.ASN = append(l.Match.ASN, n)
		}
	}
	p, err := shaper.New(1024).Compile([]shaper.Limit{l}, nil, []shaper.Attachment{{Name: "here"}}, table, false)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// datagramFrom returns a datagram of a source.
func datagramFrom(source netip.Addr) []byte {
	b := ecnDatagram(source.Is6(), 0)
	at := 26
	if source.Is6() {
		at = 22
	}
	copy(b[at:], source.AsSlice())
	return b
}

// fullTableASNs is the number of autonomous systems in a published table, numbered from 1.
const fullTableASNs = 91_000

// fullTable returns a table as large as a published one: 400,000 IPv4 ranges and 115,000
// IPv6 ranges.
func fullTable(t testing.TB) ([]asn.Range, *asn.Table) {
	t.Helper()
	rnd := rand.New(rand.NewPCG(1, 0))
	var ranges []asn.Range
	const step = 1 << 32 / 400_000
	for first := uint64(0); first+step < 1<<32; first += step {
		last := first + step - 1 - rnd.Uint64N(step/2)
		ranges = append(ranges, asn.Range{First: ipv4(uint32(first)), Last: ipv4(uint32(last)), ASN: 1 + rnd.Uint32N(fullTableASNs)})
	}
	for i := range uint64(115_000) {
		var first [16]byte
		binary.BigEndian.PutUint64(first[:], 0x2000_0000_0000_0000+i<<40)
		last := first
		for j := 5 + rnd.IntN(3); j < 16; j++ {
			last[j] = 0xff
		}
		ranges = append(ranges, asn.Range{First: netip.AddrFrom16(first), Last: netip.AddrFrom16(last), ASN: 1 + rnd.Uint32N(fullTableASNs)})
	}
	table, err := asn.New(slices.Clone(ranges))
	if err != nil {
		t.Fatal(err)
	}
	return ranges, table
}

func ipv4(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}
