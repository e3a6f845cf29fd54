package asn

import (
	"fmt"
	"iter"
	"net/netip"
)

// Country is a country by its code of two letters (ISO 3166-1 alpha-2), or 0 if it is unknown.
type Country uint16

// unknownCountry is the text of Country 0.
const unknownCountry = "unknown"

func (c Country) String() string {
	if c == 0 {
		return unknownCountry
	}
	return string([]byte{byte(c >> 8), byte(c)})
}

// unassigned is ZZ, which databases have where they know no country: a code that ISO 3166-1 leaves to users.
const unassigned Country = 'Z'<<8 | 'Z'

// ParseCountry parses a code of two letters, or "unknown".
func ParseCountry(s string) (Country, error) {
	if s == unknownCountry {
		return 0, nil
	}
	if c := countryOf(s); c != 0 && c != unassigned {
		return c, nil
	}
	return 0, fmt.Errorf("%s is not a country code of two letters such as \"DE\" (ISO 3166-1), or \"unknown\"", quote(s))
}

// countryOf returns the country of a code in either case, or 0 if it is none.
func countryOf(code string) Country {
	if len(code) != 2 {
		return 0
	}
	c := Country(0)
	for i := range len(code) {
		letter := code[i] &^ 0x20
		if !isUpper(letter) {
			return 0
		}
		c = c<<8 | Country(letter)
	}
	return c
}

// countryFields are the fields of MMDB records that have a country, as the common databases name them: a code, or a table
// with one.
type countryFields struct {
	Code       any `maxminddb:"country_code"`
	Country    any `maxminddb:"country"`
	Registered any `maxminddb:"registered_country"`
}

// country returns the country of a record, 0 if it has none that is known. The first field that has one counts.
func (f *countryFields) country() Country {
	for _, value := range []any{f.Country, f.Code, f.Registered} {
		if table, ok := value.(map[string]any); ok {
			value = table["iso_code"]
		}
		code, _ := value.(string)
		if c := countryOf(code); c != 0 && c != unassigned {
			return c
		}
	}
	return 0
}

// Country returns the country of an address, like [Table.Lookup]. It is 0 unless t was loaded with countries.
func (t *Table) Country(addr netip.Addr) Country {
	if t == nil || !addr.IsValid() {
		return 0
	}
	return Country(t.countries.Lookup(addr.Unmap()))
}

// CountryRange is the range of addresses First to Last, inclusive and of one family, in one country.
type CountryRange struct {
	First, Last netip.Addr
	Country     Country
}

// Countries yields the ranges of countries, like [Table.All].
func (t *Table) Countries() iter.Seq[CountryRange] {
	return func(yield func(CountryRange) bool) {
		if t == nil {
			return
		}
		each := func(r Range) bool { return yield(CountryRange{r.First, r.Last, Country(r.ASN)}) }
		_ = eachRange(&t.countries.V4, highest4, each) && eachRange(&t.countries.V6, highest6, each)
	}
}

// LoadCountries is [Load] with the countries of addresses, which the records of MMDBs have as country.iso_code,
// country_code, country, or registered_country.iso_code. A file may have countries without ASNs. It is also an error if two
// files, or two networks of one, have different countries for an address, or if no file has any.
func LoadCountries(paths ...string) (*Table, error) {
	b := builder{countries: &builder{noun: "country"}}
	t, err := b.load(paths)
	if err != nil {
		return nil, err
	}
	if b.countries.entries() == 0 {
		return nil, fmt.Errorf("%s: no record with a country in any file; expected one MMDB with country.iso_code, country_code or country", paths[0])
	}
	b.countries.files = b.files
	c, err := b.countries.build()
	if err != nil {
		return nil, err
	}
	t.countries = c.addrs
	return t, nil
}
