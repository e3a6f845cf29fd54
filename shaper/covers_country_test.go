package shaper

import (
	"net/netip"
	"testing"
	"time"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper/asn"
)

// Packets of one country, which a limit by country delays, do not delay those of another one in the same /8.
func TestShape_CountriesOfOnePrefix(t *testing.T) {
	at := netip.MustParseAddr
	table, err := asn.New(nil, asn.CountryRange{First: at("10.0.0.0"), Last: at("10.0.0.255"), Country: 0x4445}, asn.CountryRange{First: at("10.1.0.0"), Last: at("10.1.0.255"), Country: 0x4652})
	if err != nil {
		t.Fatal(err)
	}
	s := New(100)
	here := Match{Attach: []string{"a"}}
	p, err := s.Compile([]Limit{
		{Name: "by-net", Key: KeySource, IPv4Prefix: 8, IPv6Prefix: 32, Rate: 8e9, MaxDelay: 10 * time.Second, Match: here},
		{Name: "by-country", Key: KeyCountry, Rate: 8e3, MaxDelay: 10 * time.Second, Match: here},
	}, nil, []Attachment{{Name: "a"}}, table, false)
	if err != nil {
		t.Fatal(err)
	}
	s.Swap(p, leaky.Second)
	send := func(a string) time.Duration {
		f := Flow{Source: at(a), Destination: at("10.9.9.9"), Protocol: UDP, Origin: p.AttachmentIndex("a")}
		r := p.Route(&f)
		d := s.Shape(p, &f, r, r.ToDownstream, 1000, 1, leaky.Second)
		return d.Depart.Sub(leaky.Second).Duration()
	}
	for range 6 {
		t.Logf("DE: %v", send("10.0.0.1"))
	}
	if wait := send("10.1.0.1"); wait > time.Second {
		t.Errorf("the first packet from FR waits for %v, its own country and net owe nearly nothing", wait)
	}
}
