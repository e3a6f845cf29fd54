package asn

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
)

const expectedLine = `expected "first,last,asn", "prefix asn" or "prefix length asn"`

var byteOrderMark = []byte("\xef\xbb\xbf")

// readText reads the lines of a text file. The buffer of br must hold maxLine bytes.
func (b *builder) readText(br *bufio.Reader, name string) error {
	src := source{file: uint16(len(b.files) - 1)}
	for {
		src.line++
		line, err := br.ReadSlice('\n')
		switch {
		case err == io.EOF && len(line) == 0:
			return nil
		case err == io.EOF:
			return fmt.Errorf("%s:%d: missing newline after %s at the end; the file may be truncated, otherwise add one",
				name, src.line, quote(line))
		case errors.Is(err, bufio.ErrBufferFull):
			return fmt.Errorf("%s:%d: line %s is longer than %d bytes; %s",
				name, src.line, quote(line), maxLine, expectedLine)
		case err != nil:
			return fmt.Errorf("%s:%d: read line: %w", name, src.line, readError(err))
		}
		if src.line == 1 {
			line = bytes.TrimPrefix(line, byteOrderMark)
		}
		if line = trimBlank(line); len(line) == 0 || line[0] == '#' || line[0] == ';' {
			continue
		}
		if err := b.addLine(line, src); err != nil {
			return fmt.Errorf("%s:%d: %w", name, src.line, err)
		}
	}
}

// addLine parses one line, without surrounding blanks, and adds its entry.
func (b *builder) addLine(line []byte, src source) error {
	comma := hasCommas(line)
	first, rest, err := cutField(line, comma)
	if err != nil {
		return err
	}
	second, rest, err := cutField(rest, comma)
	if err != nil {
		return err
	}
	if len(second) == 0 {
		return fmt.Errorf("%s: missing field; %s", quote(line), expectedLine)
	}

	if bytes.IndexByte(first, '/') >= 0 {
		p, err := netip.ParsePrefix(string(first))
		if err != nil {
			return fmt.Errorf("prefix %s: expected an IPv4 or IPv6 prefix such as 192.0.2.0/24 or 2001:db8::/32", quote(first))
		}
		return b.addPrefixText(p, second, src)
	}

	lo, err := parseAddr(first)
	if err != nil {
		return err
	}
	third, rest, err := cutField(rest, comma)
	if err != nil {
		return err
	}
	if len(third) == 0 {
		return fmt.Errorf("%s: missing field; %s", quote(line), expectedLine)
	}
	if isDigits(second) {
		bits, err := strconv.ParseUint(string(second), 10, 8)
		if err != nil || int(bits) > lo.BitLen() {
			return fmt.Errorf("prefix length %s: expected 0 to %d", quote(second), lo.BitLen())
		}
		return b.addPrefixText(netip.PrefixFrom(lo, int(bits)), third, src)
	}

	hi, err := parseAddr(second)
	if err != nil {
		return err
	}
	asn, err := parseASN(string(third))
	if err != nil {
		return err
	}
	if asn != 0 && !b.hasName(asn) {
		b.addName(asn, parseName(rest, comma))
	}
	return b.add(lo, hi, asn, src)
}

func (b *builder) addPrefixText(p netip.Prefix, origins []byte, src source) error {
	if p.Masked() != p {
		return fmt.Errorf("prefix %s has bits set beyond its length; expected %s", p, p.Masked())
	}
	asn, err := parseOrigins(origins)
	if err != nil {
		return err
	}
	b.addPrefix(p, asn, src)
	return nil
}

// parseOrigins parses the ASN of a prefix, or the first of several: CAIDA joins
// the origins of a prefix with "_" and the members of an AS set with ",".
func parseOrigins(text []byte) (uint32, error) {
	var first uint32
	for i := 0; ; i++ {
		end := bytes.IndexAny(text, "_,")
		one := text
		if end >= 0 {
			one = text[:end]
		}
		asn, err := parseASN(string(one))
		if err != nil {
			return 0, err
		}
		if i == 0 {
			first = asn
		}
		if end < 0 {
			return first, nil
		}
		text = text[end+1:]
	}
}

func parseAddr(text []byte) (netip.Addr, error) {
	a, err := netip.ParseAddr(string(text))
	if err != nil && !bytes.ContainsAny(text, ".:0123456789") {
		return a, fmt.Errorf("address %s: expected an IPv4 or IPv6 address, or # before a header line", quote(text))
	}
	if err != nil || a.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("address %s: expected an IPv4 or IPv6 address without zone", quote(text))
	}
	return a, nil
}

// hasCommas reports whether commas separate the fields of a line, by the character after
// its first field. Otherwise blanks do, and "64500,64501" is one field.
func hasCommas(line []byte) bool {
	if line[0] == '"' {
		line = line[1:]
		line = line[bytes.IndexByte(line, '"')+1:]
	}
	i := bytes.IndexAny(line, ",\t ")
	if i < 0 {
		return false
	}
	rest := trimBlank(line[i:])
	return len(rest) > 0 && rest[0] == ','
}

// cutField cuts the first field off a line and strips its quotes and surrounding blanks.
// A missing field is empty.
func cutField(line []byte, comma bool) (field, rest []byte, err error) {
	line = trimBlank(line)
	if len(line) > 0 && line[0] == '"' {
		end := bytes.IndexByte(line[1:], '"')
		if end < 0 {
			return nil, nil, fmt.Errorf("%s: expected a closing quote", quote(line))
		}
		field, rest = line[1:1+end], trimBlank(line[2+end:])
		if comma && len(rest) > 0 {
			if rest[0] != ',' {
				return nil, nil, fmt.Errorf("%s: expected a comma after the closing quote", quote(line))
			}
			rest = rest[1:]
		}
		return field, rest, nil
	}
	separators := " \t"
	if comma {
		separators = ","
	}
	end := bytes.IndexAny(line, separators)
	if end < 0 {
		return line, nil, nil
	}
	return trimBlank(line[:end]), line[end+1:], nil
}

// trimBlank is bytes.TrimSpace limited to the blanks of a text table.
func trimBlank(text []byte) []byte {
	for len(text) > 0 && isBlank(text[0]) {
		text = text[1:]
	}
	for len(text) > 0 && isBlank(text[len(text)-1]) {
		text = text[:len(text)-1]
	}
	return text
}

func isBlank(c byte) bool { return c == ' ' || c == '\t' || c == '\r' || c == '\n' }

func isDigits(text []byte) bool {
	for _, c := range text {
		if c < '0' || c > '9' {
			return false
		}
	}
	return true
}
