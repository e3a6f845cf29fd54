package asn

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"shaperd.dev/shaperd/shaper/segments"
)

// line is one entry of a text file, the only input of the oracle.
type line struct {
	first, last netip.Addr
	asn         uint32
	prefix      bool
	bits        int // length, if prefix
}

func (l line) holds(a netip.Addr) bool { return !a.Less(l.first) && !l.last.Less(a) }

func (l line) overlaps(m line) bool { return l.holds(m.first) || m.holds(l.first) }

func (l line) equals(m line) bool { return l.first == m.first && l.last == m.last }

// inside reports whether l is inside m and smaller.
func (l line) inside(m line) bool { return m.holds(l.first) && m.holds(l.last) && !l.equals(m) }

// naiveMerge merges overlapping and adjacent ranges of one ASN.
func naiveMerge(lines []line) []line {
	out := slices.Clone(lines)
	for again := true; again; {
		again = false
		for i := range out {
			for j := range out {
				a, b := &out[i], &out[j]
				if a.prefix || b.prefix || a.asn != b.asn || a.asn == 0 || !a.overlaps(*b) && a.last.Next() != b.first || a.equals(*b) {
					continue
				}
				if b.first.Less(a.first) {
					a.first = b.first
				}
				if a.last.Less(b.last) {
					a.last = b.last
				}
				*b, again = *a, true
			}
		}
	}
	return out
}

// naiveConflict applies the rules of Load to every pair.
func naiveConflict(lines []line) bool {
	for _, a := range lines {
		for _, b := range lines {
			switch {
			case a.asn == b.asn, a.asn == 0, b.asn == 0, !a.overlaps(b):
			case !a.prefix && !b.prefix,
				a.prefix && b.prefix && a.equals(b),
				a.prefix && !b.prefix && !a.inside(b):
				return true
			}
		}
	}
	return false
}

// naiveLookup returns the ASN of the most specific prefix, or else of the range.
func naiveLookup(lines []line, a netip.Addr) uint32 {
	var best *line
	for i, l := range lines {
		switch {
		case l.asn == 0 || !l.holds(a):
		case best == nil, l.prefix && !best.prefix, l.prefix && l.inside(*best):
			best = &lines[i]
		}
	}
	if best == nil {
		return 0
	}
	return best.asn
}

func (l line) text() string {
	if l.prefix {
		return fmt.Sprintf("%s/%d %d\n", l.first, l.bits, l.asn)
	}
	return fmt.Sprintf("%s,%s,%d\n", l.first, l.last, l.asn)
}

func lastAddr(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// windows are blocks of 64 addresses at the edge cases of address arithmetic: the ends
// of the address spaces, the middle of an IPv6 address, inside one /16.
var windows = []netip.Addr{
	netip.MustParseAddr("0.0.0.0"),
	netip.MustParseAddr("10.0.255.224"),
	netip.MustParseAddr("192.0.2.64"),
	netip.MustParseAddr("255.255.255.192"),
	netip.MustParseAddr("::"),
	netip.MustParseAddr("2001:db8::ffff:ffff:ffff:ffe0"),
	netip.MustParseAddr("::fffe:ffff:ffc0"), // just below the IPv4-mapped block
	netip.MustParseAddr("::1:0:0:0"),        // just above it
	netip.MustParseAddr("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffc0"),
}

func at(window netip.Addr, n int) netip.Addr {
	for range n {
		window = window.Next()
	}
	return window
}

// drawLines generates lines inside one window.
func drawLines(t *rapid.T) (window netip.Addr, lines []line) {
	window = rapid.SampledFrom(windows).Draw(t, "window")
	// Probabilities that make both tables and conflicts common.
	prefixes := rapid.SampledFrom([]int{0, 4, 10}).Draw(t, "prefixes in ten")
	asns := rapid.SampledFrom([]uint32{1, 3, 1000}).Draw(t, "ASNs")
	return window, rapid.SliceOfN(rapid.Custom(func(t *rapid.T) line {
		l := line{asn: rapid.Uint32Range(0, asns).Draw(t, "asn")}
		l.prefix = rapid.IntRange(0, 9).Draw(t, "prefix") < prefixes
		n := rapid.IntRange(0, 63).Draw(t, "at")
		if l.prefix {
			l.bits = window.BitLen() - rapid.IntRange(0, 6).Draw(t, "host bits")
			p := netip.PrefixFrom(at(window, n), l.bits).Masked()
			l.first, l.last = p.Addr(), lastAddr(p)
		} else {
			l.first = at(window, n)
			l.last = at(window, min(63, n+rapid.IntRange(0, 20).Draw(t, "size")))
		}
		return l
	}), 1, 12).Draw(t, "lines")
}

// TestFlattenProperty compares the conflicts and lookups with those of the oracle, for
// every address of small tables.
func TestFlattenProperty(t *testing.T) {
	tables, conflicts := 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		window, lines := drawLines(rt)
		var text strings.Builder
		for _, l := range lines {
			text.WriteString(l.text())
		}
		table, err := parseAll(text.String())
		united := naiveMerge(lines)
		if naiveConflict(united) {
			if conflicts++; err == nil || !strings.Contains(err.Error(), " overlaps ") {
				rt.Fatalf("error %v, want an overlap in:\n%s", err, &text)
			}
			return
		}
		if known := slices.ContainsFunc(lines, func(l line) bool { return l.asn != 0 }); !known {
			return
		}
		if tables++; err != nil {
			rt.Fatalf("%v in:\n%s", err, &text)
		}
		addrs := []netip.Addr{window.Prev(), at(window, 64)}
		for i := range 64 {
			addrs = append(addrs, at(window, i))
		}
		for _, a := range addrs {
			if !a.IsValid() || a.Is4In6() {
				continue
			}
			if got, want := table.Lookup(a), naiveLookup(united, a); got != want {
				rt.Fatalf("Lookup(%s) = %d, want %d in:\n%s", a, got, want, &text)
			}
		}
		checkTable(t, table)
	})
	if t.Logf("%d tables, %d conflicts", tables, conflicts); tables == 0 || conflicts == 0 {
		t.Error("the test exercised nothing: want both tables and conflicts")
	}
}

// parseAll builds a table from the contents of files.
func parseAll[T string | []byte](contents ...T) (*Table, error) {
	var b builder
	for _, content := range contents {
		if err := b.read(bytes.NewReader([]byte(content)), "input", maxFile); err != nil {
			return nil, err
		}
	}
	return b.build()
}

// TestLookupOracle compares Lookup with a linear scan of larger random tables.
func TestLookupOracle(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for range 20 {
		ranges := randomRanges(rnd, 200, 200)
		rnd.Shuffle(len(ranges), func(i, j int) { ranges[i], ranges[j] = ranges[j], ranges[i] })
		table, err := New(ranges)
		if err != nil {
			t.Fatal(err)
		}
		check := func(a netip.Addr) {
			want := uint32(0)
			for _, r := range ranges {
				if !a.Less(r.First) && !r.Last.Less(a) {
					want = r.ASN
				}
			}
			if got := table.Lookup(a); got != want {
				t.Fatalf("Lookup(%s) = %d, want %d", a, got, want)
			}
		}
		for _, r := range ranges {
			for _, a := range []netip.Addr{r.First, r.Last, r.First.Prev(), r.Last.Next()} {
				if a.IsValid() {
					check(a)
				}
			}
		}
		for range 500 {
			check(segments.Addr4(rnd.Uint32()).Addr())
			check(segments.Addr6{Hi: 0x2000<<48 | rnd.Uint64()>>3, Lo: rnd.Uint64()}.Addr())
		}
		checkTable(t, table)
	}
}

// randomRanges generates ascending ranges like those of the Internet: n4 of IPv4
// over all its space in steps of 256, n6 of IPv6 in 2000::/3 in steps of a /48,
// with gaps, and 4-byte ASNs among them.
func randomRanges(rnd *rand.Rand, n4, n6 int) []Range {
	ranges := make([]Range, 0, n4+n6)
	randomASN := func() uint32 {
		if rnd.IntN(4) == 0 {
			return 4_200_000_000 + rnd.Uint32N(94_967_295)
		}
		return 1 + rnd.Uint32N(400_000)
	}
	slot4 := uint32(1<<24) / uint32(n4)
	for i := range uint32(n4) {
		size := 1 + rnd.Uint32N(slot4)
		if rnd.IntN(2) == 0 {
			size = slot4
		}
		first := segments.Addr4(i * slot4 << 8)
		ranges = append(ranges, Range{first.Addr(), (first + segments.Addr4(size<<8) - 1).Addr(), randomASN()})
	}
	slot6 := uint64(1<<45) / uint64(n6)
	for i := range uint64(n6) {
		size := 1 + rnd.Uint64N(slot6)
		if rnd.IntN(3) == 0 {
			size = slot6
		}
		hi := 0x2000<<48 + i*slot6<<16
		ranges = append(ranges, Range{segments.Addr6{Hi: hi, Lo: 0}.Addr(), segments.Addr6{Hi: hi + size<<16 - 1, Lo: ^uint64(0)}.Addr(), randomASN()})
	}
	return ranges
}
