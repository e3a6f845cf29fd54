package asn

import (
	"bytes"
	"unicode"
	"unicode/utf8"
)

// maxName bounds the name of an AS, in bytes.
const maxName = 64

// nameRef is where a name stands in a text of names.
type nameRef struct {
	offset uint32
	length uint8
}

// Name returns what the files of t call an AS, or "" when they do not. It is valid UTF-8
// of at most 64 bytes; what cannot be printed is replaced by U+FFFD. Of several names
// the first one counts. It does not allocate.
func (t *Table) Name(asn uint32) string {
	if t == nil {
		return ""
	}
	ref := t.names[asn]
	return t.text[ref.offset:][:ref.length]
}

// asnSet is a set of ASNs, in pages by their upper half: all that there are take a few.
// Every line of a file asks it, which a map would slow down by a fifth.
type asnSet [1 << 16]*[1 << 10]uint64

func (s *asnSet) has(asn uint32) bool {
	page := s[asn>>16]
	return page != nil && page[asn>>6&(1<<10-1)]&(1<<(asn&63)) != 0
}

func (s *asnSet) add(asn uint32) {
	if s[asn>>16] == nil {
		s[asn>>16] = new([1 << 10]uint64)
	}
	s[asn>>16][asn>>6&(1<<10-1)] |= 1 << (asn & 63)
}

// named reports whether an ASN has a name already.
func (b *builder) named(asn uint32) bool { return b.names != nil && b.withName.has(asn) }

// name takes in the name of an ASN that has none, unless it is empty.
func (b *builder) name(asn uint32, name []byte) {
	if len(name) == 0 {
		return
	}
	if b.names == nil {
		b.names, b.withName = map[uint32]nameRef{}, new(asnSet)
	}
	from := len(b.text)
	b.text = appendName(b.text, name)
	b.names[asn] = nameRef{uint32(from), uint8(len(b.text) - from)}
	b.withName.add(asn)
}

// appendName appends as much of a name as fits, made fit to be shown.
func appendName(to, name []byte) []byte {
	ascii := 0
	for ascii < min(len(name), maxName) && name[ascii] >= ' ' && name[ascii] <= '~' {
		ascii++
	}
	to, name = append(to, name[:ascii]...), name[ascii:]
	for room := maxName - ascii; len(name) > 0; {
		r, size := utf8.DecodeRune(name)
		if !unicode.IsPrint(r) {
			r = unicode.ReplacementChar
		}
		if room -= utf8.RuneLen(r); room < 0 {
			break
		}
		to, name = utf8.AppendRune(to, r), name[size:]
	}
	return to
}

// nameIn returns the name in what follows the ASN of a range: the next column, or the
// one behind it where the next is a country, as in the tables of iptoasn.
func nameIn(columns []byte, comma bool) []byte {
	separator := byte('\t')
	if comma {
		separator = ','
	}
	name, rest := cutName(columns, separator)
	if country := len(name) == 2 && isUpper(name[0]) && isUpper(name[1]); country && len(rest) > 0 {
		name, _ = cutName(rest, separator)
	}
	return name
}

func isUpper(c byte) bool { return c >= 'A' && c <= 'Z' }

// cutName takes a column off a line, without its quotes and the blanks around it. Unlike
// cutField it has no errors, as a range is as good under any name, and makes one quote
// of two.
func cutName(line []byte, separator byte) (column, rest []byte) {
	line = trimBlank(line)
	if len(line) == 0 || line[0] != '"' {
		column, rest, _ = bytes.Cut(line, []byte{separator})
		return trimBlank(column), rest
	}
	line = line[1:]
	end, doubled := 0, false
	for end < len(line) && (line[end] != '"' || end+1 < len(line) && line[end+1] == '"') {
		if line[end] == '"' {
			doubled = true
			end++
		}
		end++
	}
	column = line[:end]
	_, rest, _ = bytes.Cut(line[end:], []byte{separator})
	if doubled {
		column = bytes.ReplaceAll(column, []byte(`""`), []byte(`"`))
	}
	return trimBlank(column), rest
}
