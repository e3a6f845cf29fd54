package segments_test

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper/segments"
)

// The reference for a lookup is the last start that is not above the address.
func TestMap_Lookup(t *testing.T) {
	rnd := testutil.Rand(t)
	for range 200 {
		var m segments.Map
		n := rnd.IntN(300)
		starts4 := fill(&m.V4, rnd, n, func() segments.Addr4 { return segments.Addr4(rnd.Uint32() >> rnd.IntN(32)) })
		starts6 := fill(&m.V6, rnd, n, func() segments.Addr6 {
			return segments.Addr6{Hi: rnd.Uint64() >> rnd.IntN(64), Lo: rnd.Uint64() >> rnd.IntN(64)}
		})
		for range 100 {
			check(t, &m, starts4, segments.Addr4(rnd.Uint32()>>rnd.IntN(32)))
			check(t, &m, starts6, segments.Addr6{Hi: rnd.Uint64() >> rnd.IntN(64), Lo: rnd.Uint64()})
		}
		for _, s := range starts4 {
			check(t, &m, starts4, s.at)
			check(t, &m, starts4, s.at.Prev())
		}
		for _, s := range starts6 {
			check(t, &m, starts6, s.at)
			check(t, &m, starts6, s.at.Prev())
		}
	}
}

type start[A any] struct {
	at    A
	value uint32
}

// fill sets up to n values in f, some of them twice, and returns them.
func fill[A segments.Address[A]](f *segments.Family[A], rnd *rand.Rand, n int, random func() A) (all []start[A]) {
	for range n {
		all = append(all, start[A]{random(), rnd.Uint32N(3)})
	}
	slices.SortStableFunc(all, func(a, b start[A]) int { return a.at.Compare(b.at) })
	for _, s := range all {
		f.Set(s.at, s.value)
	}
	f.Build()
	return all
}

func check[A segments.Address[A]](t *testing.T, m *segments.Map, starts []start[A], at A) {
	t.Helper()
	want := uint32(0)
	for _, s := range starts {
		if s.at.Compare(at) <= 0 {
			want = s.value
		}
	}
	if got := m.Lookup(at.Addr()); got != want {
		t.Fatalf("%v: %d, want %d, with %v", at.Addr(), got, want, starts)
	}
}

func TestLastAddr(t *testing.T) {
	for prefix, want := range map[string]string{
		"0.0.0.0/0": "255.255.255.255", "192.0.2.0/24": "192.0.2.255", "192.0.2.1/32": "192.0.2.1",
		"::/0": "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "2001:db8::/63": "2001:db8:0:1:ffff:ffff:ffff:ffff",
		"2001:db8::/64": "2001:db8::ffff:ffff:ffff:ffff", "2001:db8::/65": "2001:db8::7fff:ffff:ffff:ffff", "::1/128": "::1",
	} {
		if got := segments.LastAddr(netip.MustParsePrefix(prefix)); got.String() != want {
			t.Errorf("%s: %v, want %s", prefix, got, want)
		}
	}
}
