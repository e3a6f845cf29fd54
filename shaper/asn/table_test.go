package asn

import (
	"math"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

var cmpAddr = cmp.Comparer(func(a, b netip.Addr) bool { return a == b })

func rng(first, last string, asn uint32) Range {
	return Range{netip.MustParseAddr(first), netip.MustParseAddr(last), asn}
}

func TestNew(t *testing.T) {
	for _, tt := range []struct {
		name   string
		ranges []Range
		want   []Range
	}{
		{"none", nil, nil},
		{
			"sorts, IPv4 first",
			[]Range{rng("2001:db8::", "2001:db8::1", 3), rng("192.0.2.7", "192.0.2.9", 2), rng("10.0.0.0", "10.0.0.0", 1)},
			[]Range{rng("10.0.0.0", "10.0.0.0", 1), rng("192.0.2.7", "192.0.2.9", 2), rng("2001:db8::", "2001:db8::1", 3)},
		},
		{
			"merges neighbors of one ASN",
			[]Range{rng("10.0.1.0", "10.0.1.255", 1), rng("10.0.0.0", "10.0.0.255", 1), rng("10.0.2.0", "10.0.2.0", 2)},
			[]Range{rng("10.0.0.0", "10.0.1.255", 1), rng("10.0.2.0", "10.0.2.0", 2)},
		},
		{
			"merges over the middle of an IPv6 address",
			[]Range{rng("2001:db8::", "2001:db8::ffff:ffff:ffff:ffff", 1), rng("2001:db8:0:1::", "2001:db8:0:1::", 1)},
			[]Range{rng("2001:db8::", "2001:db8:0:1::", 1)},
		},
		{
			"both ends of both families",
			[]Range{
				rng("0.0.0.0", "0.0.0.0", 1), rng("255.255.255.255", "255.255.255.255", math.MaxUint32),
				rng("::", "::", 1), rng("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 2),
			},
			[]Range{
				rng("0.0.0.0", "0.0.0.0", 1), rng("255.255.255.255", "255.255.255.255", math.MaxUint32),
				rng("::", "::", 1), rng("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 2),
			},
		},
		{
			"everything, without the IPv4-mapped block",
			[]Range{rng("0.0.0.0", "255.255.255.255", 1), rng("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 2)},
			[]Range{
				rng("0.0.0.0", "255.255.255.255", 1),
				rng("::", "::fffe:ffff:ffff", 2), rng("::1:0:0:0", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 2),
			},
		},
		{"ASN 0 is ignored", []Range{rng("10.0.0.0", "10.0.0.9", 0), rng("10.0.0.5", "10.0.0.5", 1)}, []Range{rng("10.0.0.5", "10.0.0.5", 1)}},
		{"IPv4-mapped is IPv4", []Range{rng("::ffff:10.0.0.1", "::ffff:10.0.0.2", 1)}, []Range{rng("10.0.0.1", "10.0.0.2", 1)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			table, err := New(tt.ranges)
			if err != nil {
				t.Fatal(err)
			}
			got := slices.Collect(table.All())
			if diff := cmp.Diff(tt.want, got, cmpAddr); diff != "" {
				t.Error(diff)
			}
			checkTable(t, table)
		})
	}
}

func TestNewErrors(t *testing.T) {
	for _, tt := range []struct {
		name   string
		ranges []Range
		want   string
	}{
		{"no address", []Range{{ASN: 1}}, "build ASN table: range 0: missing or invalid address"},
		{
			"no last address",
			[]Range{{First: netip.IPv4Unspecified(), ASN: 1}},
			"build ASN table: range 0: missing or invalid address",
		},
		{
			"zone",
			[]Range{rng("fe80::1", "fe80::2", 1), rng("fe80::5%eth0", "fe80::6", 1)},
			"build ASN table: range 1: range fe80::5%eth0-fe80::6 has a zone; expected addresses without one",
		},
		{
			"mixed families",
			[]Range{rng("10.0.0.1", "2001:db8::", 1)},
			"build ASN table: range 0: range 10.0.0.1-2001:db8:: mixes IPv4 and IPv6; expected one family",
		},
		{
			"reversed",
			[]Range{rng("10.0.0.2", "10.0.0.1", 1)},
			"build ASN table: range 0: range 10.0.0.2-10.0.0.1 is reversed; expected first <= last",
		},
		{
			"overlap",
			[]Range{rng("10.0.0.9", "10.0.0.12", 1), rng("10.0.0.1", "10.0.0.9", 2)},
			"build ASN table: range 1: 10.0.0.1-10.0.0.9 AS2 overlaps 10.0.0.9-10.0.0.12 AS1 of range 0; an address must have one ASN",
		},
		{
			"overlap with the same ASN",
			[]Range{rng("2001:db8::", "2001:db8::9", 7), rng("2001:db8::2", "2001:db8::3", 7)},
			"build ASN table: range 1: 2001:db8::2-2001:db8::3 AS7 overlaps 2001:db8::-2001:db8::9 AS7 of range 0; an address must have one ASN",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			table, err := New(tt.ranges)
			if err == nil || table != nil {
				t.Fatalf("got table %v and error %v", table, err)
			}
			if diff := cmp.Diff(tt.want, err.Error()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestLookup(t *testing.T) {
	table, err := New([]Range{
		rng("10.0.0.0", "10.0.255.255", 1), rng("10.1.0.5", "10.1.0.6", 2), rng("10.255.255.255", "11.0.0.0", 3),
		rng("fe80::", "fe80::ff", 4), rng("::", "::9", 5),
	})
	if err != nil {
		t.Fatal(err)
	}
	v4only, err := New([]Range{rng("10.0.0.0", "10.0.255.255", 1)})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name  string
		table *Table
		addr  string
		want  uint32
	}{
		{"first", table, "10.0.0.0", 1},
		{"last", table, "10.0.255.255", 1},
		{"below the first range", table, "9.255.255.255", 0},
		{"lowest address", table, "0.0.0.0", 0},
		{"gap between", table, "10.1.0.4", 0},
		{"first in the middle of a /16", table, "10.1.0.5", 2},
		{"last in the middle of a /16", table, "10.1.0.6", 2},
		{"gap after", table, "10.1.0.7", 0},
		{"over a /8 border, below", table, "10.255.255.255", 3},
		{"over a /8 border, above", table, "11.0.0.0", 3},
		{"highest address", table, "255.255.255.255", 0},
		{"IPv4-mapped", table, "::ffff:10.0.0.1", 1},
		{"IPv4-mapped with zone", table, "::ffff:10.0.0.1%eth0", 1},
		{"IPv4-compatible is IPv6", table, "::10.0.0.1", 0},
		{"IPv6", table, "fe80::ff", 4},
		{"IPv6 with zone", table, "fe80::ff%eth0", 4},
		{"IPv6 gap", table, "fe80::100", 0},
		{"lowest IPv6 address", table, "::", 5},
		{"IPv6 in a table of IPv4", v4only, "fe80::ff", 0},
		{"zero table", new(Table), "10.0.0.1", 0},
		{"zero table, IPv6", new(Table), "fe80::1", 0},
		{"nil table", nil, "10.0.0.1", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.table.Lookup(netip.MustParseAddr(tt.addr)); got != tt.want {
				t.Errorf("Lookup(%s) = %d, want %d", tt.addr, got, tt.want)
			}
		})
	}
	if got := table.Lookup(netip.Addr{}); got != 0 {
		t.Errorf("Lookup of the zero Addr = %d, want 0", got)
	}
	addrs := []netip.Addr{netip.MustParseAddr("10.1.0.5"), netip.MustParseAddr("fe80::1%eth0"), netip.MustParseAddr("::ffff:10.1.0.5")}
	if n := testing.AllocsPerRun(100, func() {
		for _, a := range addrs {
			table.Lookup(a)
		}
	}); n != 0 {
		t.Errorf("Lookup allocates %v times", n)
	}
}

func TestNilTable(t *testing.T) {
	for name, table := range map[string]*Table{"nil": nil, "zero": new(Table)} {
		if v4, v6 := count(table); v4 != 0 || v6 != 0 {
			t.Errorf("%s: Len() = %d, %d", name, v4, v6)
		}
		for r := range table.All() {
			t.Errorf("%s: All yields %v", name, r)
		}
		if got := table.Name(64500); got != "" {
			t.Errorf("%s: Name is %q", name, got)
		}
	}
}

func TestAll_StopsEarly(t *testing.T) {
	table, err := New([]Range{rng("10.0.0.0", "10.0.0.1", 1), rng("10.1.0.0", "10.1.0.1", 1), rng("::", "::1", 1)})
	if err != nil {
		t.Fatal(err)
	}
	for stop := 1; stop <= 3; stop++ {
		n := 0
		for range table.All() {
			if n++; n == stop {
				break
			}
		}
		if n != stop {
			t.Errorf("All yields %d ranges before a break at %d", n, stop)
		}
	}
}

// checkTable checks the documented invariants of a table.
func checkTable(t *testing.T, table *Table) {
	t.Helper()
	var prev Range
	var v4, v6 int
	for r := range table.All() {
		if r.First.Is4() {
			v4++
		} else {
			v6++
		}
		switch {
		case r.ASN == 0, !r.First.IsValid(), r.First.BitLen() != r.Last.BitLen(), r.First.Is4In6(), r.Last.Is4In6(), r.Last.Less(r.First):
			t.Fatalf("bad range %v", r)
		case prev.ASN != 0 && !prev.Last.Less(r.First): // Less puts IPv4 first
			t.Fatalf("%v follows %v", r, prev)
		case prev.ASN == r.ASN && prev.Last.Next() == r.First:
			t.Fatalf("%v and %v are not merged", prev, r)
		}
		for _, a := range []netip.Addr{r.First, r.Last} {
			if got := table.Lookup(a); got != r.ASN {
				t.Fatalf("Lookup(%s) = %d, want the ASN of %v", a, got, r)
			}
		}
		if a := r.Last.Next(); a.IsValid() && !a.Is4In6() && table.Lookup(a) == r.ASN {
			t.Fatalf("Lookup(%s) is the ASN of %v before it", a, r)
		}
		if name := table.Name(r.ASN); len(name) > maxName || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) {
			t.Fatalf("AS%d is named %q", r.ASN, name)
		}
		prev = r
	}
	if n4, n6 := count(table); n4 != v4 || n6 != v6 {
		t.Fatalf("Len() = %d, %d; All yields %d, %d", n4, n6, v4, v6)
	}
	again, err := New(slices.Collect(table.All()))
	if err != nil {
		t.Fatalf("New of the ranges of All: %v", err)
	}
	again.names, again.text = table.names, table.text
	// Not cmp.Diff, which is slow for tables of the Internet's size.
	if !reflect.DeepEqual(table, again) {
		t.Fatalf("New of the ranges of All differs: %v", slices.Collect(again.All()))
	}
}

// count returns the number of ranges of each family.
func count(t *Table) (v4, v6 int) {
	for r := range t.All() {
		if r.First.Is4() {
			v4++
		} else {
			v6++
		}
	}
	return v4, v6
}
