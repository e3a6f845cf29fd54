package asn

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"
)

// source tells where an entry was read.
type source struct {
	line uint32 // counted from 1; 0 in an MMDB; the index of the range for New
	file uint16 // index into builder.files, or noFile
}

// noFile is the file of a range that New was given.
const noFile = math.MaxUint16

// entry is one range as read.
type entry[A key[A]] struct {
	first, last A
	asn         uint32
	src         source
}

// family is what was read for one address family. Ranges and prefixes are kept
// apart because only prefixes nest.
type family[A key[A]] struct {
	ranges, prefixes []entry[A]
}

// builder gathers entries in any order and makes a table of them.
type builder struct {
	files  []string
	v4     family[addr4]
	v6     family[addr6]
	strict bool // ranges of one ASN must not overlap either

	names    map[uint32]nameRef // in text
	text     []byte
	withName *asnSet // nil without names
}

// add takes in one range, unless its ASN is 0. Its errors are about the range
// alone and leave it to the caller to say where the range stands.
func (b *builder) add(first, last netip.Addr, asn uint32, src source) error {
	switch {
	case !first.IsValid() || !last.IsValid():
		return errors.New("range without an address at each end")
	case first.Zone() != "" || last.Zone() != "":
		return fmt.Errorf("range %s-%s has a zone; expected addresses without one", first, last)
	}
	first, last = first.Unmap(), last.Unmap()
	switch {
	case first.Is4() != last.Is4():
		return fmt.Errorf("range %s-%s is of IPv4 at one end and of IPv6 at the other; expected one family", first, last)
	case last.Less(first):
		return fmt.Errorf("range %s-%s starts above its end; expected first <= last", first, last)
	case asn == 0:
	case first.Is4():
		b.v4.ranges = append(b.v4.ranges, entry[addr4]{toAddr4(first), toAddr4(last), asn, src})
	default:
		b.v6.ranges = append6(b.v6.ranges, entry[addr6]{toAddr6(first), toAddr6(last), asn, src})
	}
	return nil
}

// addPrefix takes in one masked prefix, unless its ASN is 0.
func (b *builder) addPrefix(p netip.Prefix, asn uint32, src source) {
	addBlock(&b.v4.prefixes, &b.v6.prefixes, p, asn, src)
}

// addNetwork takes in a masked prefix as the range it is, unless its ASN is 0.
func (b *builder) addNetwork(p netip.Prefix, asn uint32, src source) {
	addBlock(&b.v4.ranges, &b.v6.ranges, p, asn, src)
}

func addBlock(to4 *[]entry[addr4], to6 *[]entry[addr6], p netip.Prefix, asn uint32, src source) {
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	switch {
	case asn == 0:
	case p.Addr().Is4():
		first, host := toAddr4(p.Addr()), uint64(1)<<(32-p.Bits())-1
		*to4 = append(*to4, entry[addr4]{first, first | addr4(host), asn, src})
	default:
		first := toAddr6(p.Addr())
		*to6 = append6(*to6, entry[addr6]{first, first.last(p.Bits()), asn, src})
	}
}

// append6 cuts the IPv4-mapped block out of an entry that reaches into it, as
// ::/0 does: those addresses are looked up as IPv4, so an IPv6 entry can never
// answer for them.
func append6(to []entry[addr6], e entry[addr6]) []entry[addr6] {
	if e.last.compare(mappedFirst) < 0 || e.first.compare(mappedLast) > 0 {
		return append(to, e)
	}
	if e.first.compare(mappedFirst) < 0 {
		to = append(to, entry[addr6]{e.first, mappedFirst.prev(), e.asn, e.src})
	}
	if e.last.compare(mappedLast) > 0 {
		to = append(to, entry[addr6]{mappedLast.next(), e.last, e.asn, e.src})
	}
	return to
}

// entries counts what was taken in so far.
func (b *builder) entries() int {
	return len(b.v4.ranges) + len(b.v4.prefixes) + len(b.v6.ranges) + len(b.v6.prefixes)
}

// build makes the table. It uses up what the builder holds.
func (b *builder) build() (*Table, error) {
	t := &Table{names: b.names, text: string(b.text)}
	var err error
	if t.v4, err = flatten(b, b.v4, ^addr4(0)); err != nil {
		return nil, err
	}
	if t.v6, err = flatten(b, b.v6, addr6{^uint64(0), ^uint64(0)}); err != nil {
		return nil, err
	}
	return t, nil
}

// place names where an entry was read.
func (b *builder) place(s source) string {
	switch {
	case s.file == noFile:
		return fmt.Sprintf("range %d", s.line)
	case s.line == 0:
		return b.files[s.file]
	}
	return fmt.Sprintf("%s:%d", b.files[s.file], s.line)
}

func sortEntries[A key[A]](entries []entry[A]) {
	// Of equal entries the one read first comes first, so that messages do not
	// depend on the sort.
	order := func(x, y entry[A]) int {
		if c := x.first.compare(y.first); c != 0 {
			return c
		}
		if c := y.last.compare(x.last); c != 0 {
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
