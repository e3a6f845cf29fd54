package asn

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"

	"shaperd.dev/shaperd/shaper/segments"
)

// source is the position of an entry in the input.
type source struct {
	line uint32 // from 1; 0 in an MMDB; index of the range for New
	file uint16 // index into builder.files, or noFile
}

// noFile is the file of a range passed to New.
const noFile = math.MaxUint16

// entry is one range of the input.
type entry[A segments.Address[A]] struct {
	first, last A
	asn         uint32
	src         source
}

// family holds the entries of one address family. Ranges and prefixes are separate
// because only prefixes nest.
type family[A segments.Address[A]] struct {
	ranges, prefixes []entry[A]
}

// builder collects entries in any order and builds a table of them.
type builder struct {
	files  []string
	v4     family[segments.Addr4]
	v6     family[segments.Addr6]
	strict bool // ranges of the same ASN must not overlap either

	hasCountries bool // some record has a country, whether or not they are loaded

	countries *builder // has the countries as ASNs; nil without countries
	noun      string   // what the numbers are, in errors; "" is ASN

	names     map[uint32]nameRef // in text
	text      []byte
	namedASNs *asnSet // ASNs in names; nil if there are none
}

// add adds one range, unless its ASN is 0. Its errors do not contain the position of the
// range; the caller adds it.
func (b *builder) add(first, last netip.Addr, asn uint32, src source) error {
	switch {
	case !first.IsValid() || !last.IsValid():
		return errors.New("missing or invalid address")
	case first.Zone() != "" || last.Zone() != "":
		return fmt.Errorf("range %s-%s has a zone; expected addresses without one", first, last)
	}
	first, last = first.Unmap(), last.Unmap()
	switch {
	case first.Is4() != last.Is4():
		return fmt.Errorf("range %s-%s mixes IPv4 and IPv6; expected one family", first, last)
	case last.Less(first):
		return fmt.Errorf("range %s-%s is reversed; expected first <= last", first, last)
	case asn == 0:
	case first.Is4():
		b.v4.ranges = append(b.v4.ranges, entry[segments.Addr4]{segments.ToAddr4(first), segments.ToAddr4(last), asn, src})
	default:
		b.v6.ranges = append6(b.v6.ranges, entry[segments.Addr6]{segments.ToAddr6(first), segments.ToAddr6(last), asn, src})
	}
	return nil
}

// addPrefix adds one masked prefix, unless its ASN is 0.
func (b *builder) addPrefix(p netip.Prefix, asn uint32, src source) {
	addBlock(&b.v4.prefixes, &b.v6.prefixes, p, asn, src)
}

// addNetwork adds a masked prefix as a range, unless its ASN is 0.
func (b *builder) addNetwork(p netip.Prefix, asn uint32, src source) {
	addBlock(&b.v4.ranges, &b.v6.ranges, p, asn, src)
}

func addBlock(to4 *[]entry[segments.Addr4], to6 *[]entry[segments.Addr6], p netip.Prefix, asn uint32, src source) {
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	switch {
	case asn == 0:
	case p.Addr().Is4():
		first := segments.ToAddr4(p.Addr())
		*to4 = append(*to4, entry[segments.Addr4]{first, first.Last(p.Bits()), asn, src})
	default:
		first := segments.ToAddr6(p.Addr())
		*to6 = append6(*to6, entry[segments.Addr6]{first, first.Last(p.Bits()), asn, src})
	}
}

// mappedFirst and mappedLast bound ::ffff:0:0/96, the IPv4-mapped addresses.
var (
	mappedFirst = segments.Addr6{Lo: 0xffff_0000_0000}
	mappedLast  = segments.Addr6{Lo: 0xffff_ffff_ffff}
)

// append6 cuts the IPv4-mapped block out of an entry that overlaps it, as
// ::/0 does: those addresses are looked up as IPv4, so an IPv6 entry never
// applies to them.
func append6(to []entry[segments.Addr6], e entry[segments.Addr6]) []entry[segments.Addr6] {
	if e.last.Compare(mappedFirst) < 0 || e.first.Compare(mappedLast) > 0 {
		return append(to, e)
	}
	if e.first.Compare(mappedFirst) < 0 {
		to = append(to, entry[segments.Addr6]{e.first, mappedFirst.Prev(), e.asn, e.src})
	}
	if e.last.Compare(mappedLast) > 0 {
		to = append(to, entry[segments.Addr6]{mappedLast.Next(), e.last, e.asn, e.src})
	}
	return to
}

// entries returns the number of entries so far.
func (b *builder) entries() int {
	if b == nil {
		return 0
	}
	return len(b.v4.ranges) + len(b.v4.prefixes) + len(b.v6.ranges) + len(b.v6.prefixes)
}

// build builds the table. The builder must not be used afterwards.
func (b *builder) build() (*Table, error) {
	t := &Table{names: b.names, text: string(b.text)}
	var err error
	if t.addrs.V4, err = flatten(b, b.v4, highest4); err != nil {
		return nil, err
	}
	if t.addrs.V6, err = flatten(b, b.v6, highest6); err != nil {
		return nil, err
	}
	return t, nil
}

// location formats the position of an entry.
func (b *builder) location(s source) string {
	switch {
	case s.file == noFile:
		return fmt.Sprintf("range %d", s.line)
	case s.line == 0:
		return b.files[s.file]
	}
	return fmt.Sprintf("%s:%d", b.files[s.file], s.line)
}

func sortEntries[A segments.Address[A]](entries []entry[A]) {
	// Equal entries are in order of input, so that messages are deterministic.
	order := func(x, y entry[A]) int {
		if c := x.first.Compare(y.first); c != 0 {
			return c
		}
		if c := y.last.Compare(x.last); c != 0 {
			return c
		}
		return x.src.compare(y.src)
	}
	if !slices.IsSortedFunc(entries, order) {
		slices.SortFunc(entries, order)
	}
}

func (s source) compare(t source) int {
	return cmp.Or(cmp.Compare(s.file, t.file), cmp.Compare(s.line, t.line))
}
