package shaper

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"

	"shaperd.dev/shaperd/shaper/asn"
)

func sharedPolicy(t interface{ Fatal(...any) }) *Policy {
	s := New(1000)
	limit := func(name string, key Fields) Limit {
		return Limit{Name: name, Key: key, Rate: 8000, Shared: true, IPv4Prefix: 24, IPv6Prefix: 48, NewConnections: Frequency{}}
	}
	p, err := s.Compile([]Limit{
		limit("all", 0), limit("source", KeySource), limit("rest", KeySource|KeyASN|KeyPort|KeyListen), limit("destination", KeyDestination|KeyPort), limit("downstream", KeyDownstream), limit("country", KeyCountry), limit("tlv", KeyTLV),
		{Name: "own", Rate: 8000, IPv4Prefix: 32, IPv6Prefix: 64},
	}, []Listener{{Name: "web", Downstream: []Downstream{{Host: "a"}, {Host: "fd00::1", Port: 80}}}, {Name: "none"}}, nil, nil, false)
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
		f := Flow{Source: source, Destination: source, TLVs: []TLV{{0, rapid.Uint64().Draw(t, "tlv")}}, Downstream: uint16(rapid.IntRange(1, 2).Draw(t, "downstream")), Port: rapid.Uint16().Draw(t, "port"), Origin: uint16(rapid.IntRange(0, len(p.listeners)).Draw(t, "origin"))}
		k := p.Key(i, &f, Route{ASN: rapid.Uint32().Draw(t, "asn"), Country: rapid.SampledFrom([]asn.Country{0, 'D'<<8 | 'E', 'Z'<<8 | 'A'}).Draw(t, "country")})
		if rapid.Bool().Draw(t, "new") {
			k.Limit++
		}
		got, limit, err := p.ParseShareName(p.ShareName(k))
		if err != nil || got != k || limit != i {
			t.Fatalf("%s: %+v, limit %d, %v; want %+v, limit %d", p.ShareName(k), got, limit, err, k, i)
		}
	})
}

// The same limits, listeners and attachments have other IDs on another host, which has had others before.
func TestShareName_OnAnotherHost(t *testing.T) {
	listeners := []Listener{{Name: "a", Addresses: []Address{{Protocol: UDP}}}, {Name: "web", Addresses: []Address{{Protocol: TCP}}}}
	limits := []Limit{
		{Name: "database", Rate: 8, Shared: true},
		{Name: "per-client", Rate: 8, Shared: true, Key: KeySource | KeyPort | KeyListen, IPv4Prefix: 24, IPv6Prefix: 64},
		{Name: "per_as", Rate: 8, Shared: true, Key: KeyASN},
		{Name: "attached", Rate: 8, Shared: true, Key: KeyAttach, Match: Match{Attach: []string{"a"}}},
	}
	attachment := Attachment{Name: "a"}
	p, other := mustCompile(t, New(10), limits, listeners, attachment), New(10)
	mustCompile(t, other, []Limit{{Name: "gone", Rate: 8}}, []Listener{{Name: "gone", Addresses: []Address{{Protocol: UDP}}}}, Attachment{Name: "gone"})
	q := mustCompile(t, other, limits, listeners, attachment)
	for _, tt := range []struct {
		limit  string
		flow   Flow
		attach bool
		new    bool
		want   string
	}{
		{limit: "database", want: "database"},
		{limit: "database", new: true, want: "database/new"},
		{limit: "per-client", flow: Flow{Port: 443}, want: "per-client|source=10.1.2.0/24|port=443|origin=web"},
		{limit: "per-client", flow: Flow{Source: netip.MustParseAddr("2001:db8::1")}, new: true, want: "per-client/new|source=2001:db8::/64|port=0|origin=web"},
		{limit: "per_as", want: "per_as|asn=64500"},
		{limit: "attached", attach: true, want: "attached|origin=a"},
	} {
		f := tt.flow
		if !f.Source.IsValid() {
			f.Source = netip.MustParseAddr("10.1.2.3")
		}
		keyOf := func(p *Policy) Key {
			f.Origin = p.ListenerIndex("web")
			if tt.attach {
				f.Origin = p.AttachmentIndex("a")
			}
			k := p.Key(p.Find(tt.limit), &f, Route{ASN: 64500})
			if tt.new {
				k.Limit++
			}
			return k
		}
		if name := p.ShareName(keyOf(p)); name != tt.want {
			t.Errorf("a bucket of %s is %q, want %q", tt.limit, name, tt.want)
		}
		if got, _, err := q.ParseShareName(tt.want); err != nil || got != keyOf(q) {
			t.Errorf("%s is %+v on another host, %v; want %+v", tt.want, got, err, keyOf(q))
		}
	}
	for _, name := range []string{
		"", "|", "unknown", "database|", "database/old", "database/new/new", "database|new", "database|port=1",
		"per_as", "per_as|asn=064500", "per_as|asn=4294967296", "per_as|asn=-1", "per_as|asn=1|asn=1", "per_as|asn=1|new",
		"per-client|source=10.1.2.3/24|port=1|origin=web", "per-client|source=10.1.2.0/25|port=1|origin=web", "per-client|source=::ffff:10.1.2.0/120|port=1|origin=web",
		"per-client|source=2001:db8::/65|port=1|origin=web", "per-client|port=1|source=10.1.2.0/24|origin=web", "per-client|source=10.1.2.0/24|port=1|origin=gone",
		"per-client|source=2001:DB8::/64|port=1|origin=web", "attached|origin=web",
	} {
		if k, _, err := p.ParseShareName(name); err == nil {
			t.Errorf("%q is taken for %+v", name, k)
		}
	}
	if name := p.ShareName(Key{Limit: p.State(p.Find("attached")).ID, Origin: 1000}); name != "" {
		t.Errorf("a bucket of an attachment that is gone is %q", name)
	}
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
