package asn

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/maxmind/mmdbwriter"
	"github.com/maxmind/mmdbwriter/mmdbtype"
)

func iso(code string) mmdbtype.DataType { return mmdbtype.Map{"iso_code": mmdbtype.String(code)} }

func country(code string) Country { return Country(code[0])<<8 | Country(code[1]) }

func countries(first, last, code string) CountryRange {
	return CountryRange{netip.MustParseAddr(first), netip.MustParseAddr(last), country(code)}
}

// The fields are those of the databases of MaxMind, DB-IP, IPinfo and ip-location-db.
func TestLoadCountries(t *testing.T) {
	db := writeFile(t, "countries.mmdb", writeMMDB(t, mmdbwriter.Options{}, []network{
		{"192.0.2.0/25", mmdbtype.Map{"country": iso("DE"), "registered_country": iso("FR")}},
		{"192.0.2.128/25", mmdbtype.Map{"country_code": mmdbtype.String("DE"), "country": mmdbtype.String("Germany")}},
		{"198.51.100.0/24", mmdbtype.Map{"country": mmdbtype.String("at"), "asn": mmdbtype.String("AS64500")}},
		{"203.0.113.0/24", mmdbtype.Map{"registered_country": iso("FR"), "autonomous_system_number": mmdbtype.Uint32(64501)}},
		{"203.0.114.0/24", mmdbtype.Map{"country": iso(""), "country_code": mmdbtype.String("D1"), "autonomous_system_number": mmdbtype.Uint32(64501)}},
		{"203.0.115.0/24", mmdbtype.Map{"country": iso("ZZ")}},
		{"2001:db8::/32", mmdbtype.Map{"country": iso("CH")}},
	}))
	csv := writeFile(t, "asn.csv", []byte("192.0.2.0,192.0.2.9,64499\n"))
	table, err := LoadCountries(csv, db)
	if err != nil {
		t.Fatal(err)
	}
	want := []CountryRange{
		countries("192.0.2.0", "192.0.2.255", "DE"),
		countries("198.51.100.0", "198.51.100.255", "AT"),
		countries("203.0.113.0", "203.0.113.255", "FR"),
		countries("2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", "CH"),
	}
	if diff := cmp.Diff(want, slices.Collect(table.Countries()), cmpAddr); diff != "" {
		t.Error(diff)
	}
	for addr, want := range map[string]string{
		"192.0.2.200": "DE", "::ffff:198.51.100.7": "AT", "203.0.114.1": "unknown", "203.0.115.1": "unknown", "8.8.8.8": "unknown", "2001:db8::1": "CH", "2001:db9::": "unknown",
	} {
		if got := table.Country(netip.MustParseAddr(addr)).String(); got != want {
			t.Errorf("%s is in country %s, want %s", addr, got, want)
		}
	}
	for addr, want := range map[string]uint32{"192.0.2.5": 64499, "198.51.100.7": 64500, "203.0.114.1": 64501, "2001:db8::1": 0} {
		if got := table.Lookup(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s is of AS %d, want %d", addr, got, want)
		}
	}
	if c := (*Table)(nil).Country(netip.MustParseAddr("192.0.2.1")); c != 0 {
		t.Errorf("without a table: %v", c)
	}
	if c := table.Country(netip.Addr{}); c != 0 {
		t.Errorf("without an address: %v", c)
	}
}

func TestLoadCountries_Errors(t *testing.T) {
	file := func(name string, networks ...network) string {
		return writeFile(t, name, writeMMDB(t, mmdbwriter.Options{}, networks))
	}
	german := file("german.mmdb", network{"192.0.2.0/24", mmdbtype.Map{"country": iso("DE")}})
	french := file("french.mmdb", network{"192.0.2.128/25", mmdbtype.Map{"country": iso("FR")}})
	numbers := file("numbers.mmdb", network{"192.0.2.0/24", number(64500)})
	for _, tt := range []struct {
		name  string
		paths []string
		want  string
	}{
		{"no countries", []string{numbers}, "numbers.mmdb: no record with a country in any file"},
		{"two countries", []string{german, french, numbers}, "french.mmdb: 192.0.2.128-192.0.2.255 FR overlaps 192.0.2.0-192.0.2.255 DE of " + german + "; an address must have one country"},
		{"neither", []string{german, file("names.mmdb", network{"10.0.0.0/8", mmdbtype.Map{"name": mmdbtype.String("E")}})}, "names.mmdb: MMDB of type"},
	} {
		if _, err := LoadCountries(tt.paths...); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %s", tt.name, err, tt.want)
		}
	}
	if _, err := LoadCountries(german); err != nil {
		t.Errorf("countries alone: %v", err)
	}
	if _, err := Load(german); err != nil { // the last limit by country was removed
		t.Errorf("countries alone, and none is needed: %v", err)
	}
	if _, err := Load(numbers, numbers); err != nil {
		t.Errorf("the same file twice: %v", err)
	}
}

func TestParseCountry(t *testing.T) {
	for text, want := range map[string]Country{"DE": country("DE"), "de": country("DE"), "unknown": 0} {
		if got, err := ParseCountry(text); err != nil || got != want {
			t.Errorf("ParseCountry(%q) = %v, %v, want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"", "D", "DEU", "D1", "@@", "  ", "Unknown", "ZZ", "zz"} {
		if got, err := ParseCountry(text); err == nil {
			t.Errorf("ParseCountry(%q) = %v, want an error", text, got)
		}
	}
}
