package asn

import (
	"bytes"
	"unicode"
	"unicode/utf8"
)

// maxName bounds the name of an AS, in bytes.
const maxName = 64

// nameRef is the position of a name in Table.text.
type nameRef struct {
	offset uint32
	length uint8
}

// Name returns the name of an AS in the files of t, or "" if it has none. It is valid UTF-8
// of at most 64 bytes; unprintable characters are replaced by U+FFFD. Of several names the
// first one is used. It does not allocate.
func (t *Table) Name(asn uint32) string {
	if t == nil {
		return ""
	}
	ref := t.names[asn]
	return t.text[ref.offset:][:ref.length]
}

// asnSet is a set of ASNs, in pages by their upper half: all ASNs in use take a few pages.
// Every line of a file is looked up in it; a map would slow loading down by a fifth.
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

// hasName reports whether an ASN already has a name.
func (b *builder) hasName(asn uint32) bool { return b.names != nil && b.namedASNs.has(asn) }

// addName adds the name of an ASN that has none, unless it is empty.
func (b *builder) addName(asn uint32, name []byte) {
	if len(name) == 0 {
		return
	}
	if b.names == nil {
		b.names, b.namedASNs = map[uint32]nameRef{}, new(asnSet)
	}
	from := len(b.text)
	b.text = appendName(b.text, name)
	b.names[asn] = nameRef{uint32(from), uint8(len(b.text) - from)}
	b.namedASNs.add(asn)
}

// appendName appends a name, truncated to maxName and sanitized for display.
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

// parseName returns the name in the columns after the ASN of a range: the first one, or the
// second if the first is a country, as in the tables of iptoasn.
func parseName(columns []byte, comma bool) []byte {
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

// cutName cuts the first column off a line and strips its quotes and surrounding blanks.
// Unlike cutField it unescapes doubled quotes and has no errors, as a bad name does not
// invalidate a range.
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
