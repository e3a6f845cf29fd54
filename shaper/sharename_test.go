package shaper

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"
)

func sharedPolicy(t interface{ Fatal(...any) }) *Policy {
	s := New(1000)
	limit := func(name string, key Fields) Limit {
		return Limit{Name: name, Key: key, Rate: 8000, Shared: true, IPv4Prefix: 24, IPv6Prefix: 48, NewConnections: Frequency{}}
	}
	p, err := s.Compile([]Limit{
		limit("all", 0), limit("source", KeySource), limit("rest", KeySource|KeyASN|KeyPort|KeyListen),
		{Name: "own", Rate: 8000, IPv4Prefix: 32, IPv6Prefix: 64},
	}, []Listener{{Name: "web"}, {Name: "none"}}, nil, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestShareName_RoundTrip(t *testing.T) {
	p := sharedPolicy(t)
	rapid.Check(t, func(t *rapid.T) {
		i := rapid.IntRange(0, p.Len()-1).Draw(t, "limit")
		if !p.Limit(i).Shared {
			return
		}
		var b [4]byte
		copy(b[:], rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "source"))
		source := netip.AddrFrom4(b)
		if rapid.Bool().Draw(t, "IPv6") {
			source = netip.AddrFrom16([16]byte{0x20, b[0], b[1], b[2], b[3]})
		}
		f := Flow{Source: source, Port: rapid.Uint16().Draw(t, "port"), Origin: uint16(rapid.IntRange(0, len(p.listeners)).Draw(t, "origin"))}
		k := p.Key(i, &f, Route{ASN: rapid.Uint32().Draw(t, "asn")})
		if rapid.Bool().Draw(t, "new") {
			k.Limit++
		}
		got, limit, err := p.ParseShareName(p.ShareName(k))
		if err != nil || got != k || limit != i {
			t.Fatalf("%s: %+v, limit %d, %v; want %+v, limit %d", p.ShareName(k), got, limit, err, k, i)
		}
	})
}

func FuzzParseShareName(f *testing.F) {
	p := sharedPolicy(f)
	for _, s := range []string{"all", "all/new", "source|source=192.0.2.0/24", "rest|source=2001:db8::/48|asn=1|port=2|origin=web", "own", "source"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		k, _, err := p.ParseShareName(name)
		if err == nil && p.ShareName(k) != name {
			t.Errorf("%q is parsed as %q", name, p.ShareName(k))
		}
	})
}
