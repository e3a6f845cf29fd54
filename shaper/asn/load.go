package asn

import (
	"bufio"
	"bytes"
	"compress/flate"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

const (
	// maxFile bounds a file, and what a gzip file unpacks to, in bytes. The
	// whole Internet takes about 35 MB.
	maxFile = 1 << 30
	// maxLine bounds a line of text with its newline, in bytes.
	maxLine = 64 << 10
	// maxQuote bounds a quotation of a file in a message, in bytes.
	maxQuote = 64
	// sniffLen is the length of the head of a file that determines its format, in bytes.
	sniffLen = 4 << 10
)

const expectedFormats = `expected CSV or TSV of "first,last,asn", pfx2as or an MMDB, plain or gzip`

// Load builds one table from all files, in any order. The format of each is detected by
// its content, not by its name, and each may be compressed with gzip:
//
//   - Ranges, as CSV or TSV: "first,last,asn[,name]", inclusive. The name may be
//     preceded by a country of two letters; further columns are ignored.
//     This is the format of ip-location-db, DB-IP and iptoasn.
//   - Prefixes, as text: "prefix asn" or CAIDA's "prefix<TAB>length<TAB>asn",
//     also separated by commas. Prefixes may nest: the more specific one wins.
//     Of several origins ("64500_64501", "64500,64501") the first is used.
//   - MMDB: the record's autonomous_system_number, or its asn as a number or
//     as a string, and its autonomous_system_organization. One that has countries
//     need not have any. The networks count as
//     ranges. Aliases of the IPv4 subtree (6to4, Teredo) are not followed.
//
// In text an ASN is "64500" or "AS64500", fields may be in double quotes, and
// blank lines and lines that start with # or ; are skipped. Every line must end with
// a newline, including the last one: otherwise a truncated number could go unnoticed.
// Lines with ASN 0 are ignored. An IPv4-mapped IPv6 address counts as IPv4.
//
// Overlapping or adjacent ranges of one ASN count as one range. It is an error
// if ranges of two ASNs overlap, if a prefix has two ASNs, or if a range and a
// prefix of another ASN overlap; except that a prefix may be inside a larger
// range, and then wins.
//
// It is also an error if a file cannot be read, exceeds 1 GiB (also decompressed),
// has a line over 64 KiB, contains no range with an ASN, or contains anything but
// the above: nothing is skipped. An error begins with the path, and with the line
// if there is one; errors of the operating system are wrapped.
func Load(paths ...string) (*Table, error) {
	var b builder
	return b.load(paths)
}

// load loads files, and builds their table of ASNs.
func (b *builder) load(paths []string) (*Table, error) {
	if len(paths) == 0 {
		return nil, errors.New("load ASN table: missing file; expected at least one")
	}
	if len(paths) > noFile {
		return nil, fmt.Errorf("load ASN table: %d files; expected at most %d", len(paths), noFile)
	}
	for _, path := range paths {
		if err := b.loadFile(path); err != nil {
			return nil, err
		}
	}
	return b.build()
}

func (b *builder) loadFile(path string) error {
	const advice = "check the path and that the daemon's user may read it"
	// Checked before it is opened, as opening a pipe would wait for a writer.
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("%s: find ASN file: %w; %s", path, err, advice)
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s: not a regular file (%s)", path, info.Mode())
	}
	if info.Size() > maxFile {
		return fmt.Errorf("%s: %d bytes; expected at most %d", path, info.Size(), maxFile)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // it may have been replaced by a pipe
	if err != nil {
		return fmt.Errorf("%s: open ASN file: %w; %s", path, err, advice)
	}
	defer f.Close()
	return b.read(f, path, maxFile)
}

// read reads one file of at most limit bytes, also after decompression.
func (b *builder) read(r io.Reader, name string, limit int64) error {
	b.files = append(b.files, name)
	before := b.entries() + b.countries.entries()
	b.hasCountries = false

	br := bufio.NewReaderSize(&limitedReader{r, limit}, maxLine)
	// A read error recurs when the rest is read, so Peek's may be dropped.
	if head, _ := br.Peek(2); string(head) == "\x1f\x8b" {
		zr, err := gzip.NewReader(br)
		if err != nil {
			return fmt.Errorf("%s: decompress gzip: %w", name, readError(err))
		}
		br = bufio.NewReaderSize(&limitedReader{zr, limit}, maxLine)
	}

	head, err := br.Peek(sniffLen)
	switch {
	case len(head) == 0 && errors.Is(err, io.EOF):
		return fmt.Errorf("%s: empty file; %s", name, expectedFormats)
	case isBinary(head):
		err = b.readMMDB(br, name)
	default:
		err = b.readText(br, name)
	}
	if err != nil {
		return err
	}
	if b.entries()+b.countries.entries() == before && !b.hasCountries {
		return fmt.Errorf("%s: no range with an ASN; %s", name, expectedFormats)
	}
	return nil
}

// isBinary reports whether a file is not text, by its control characters. An
// MMDB starts with node numbers, whose leading bytes are zero.
func isBinary(head []byte) bool {
	return bytes.ContainsFunc(head, func(c rune) bool {
		return c < ' ' && c != '\t' && c != '\n' && c != '\r'
	})
}

// otherFormats are unsupported formats that operators may well try, by their magic bytes.
var otherFormats = []struct{ name, magic string }{
	{"zip archive", "PK\x03\x04"},
	{"bzip2 file", "BZh"},
	{"xz file", "\xfd7zXZ\x00"},
	{"zstd file", "\x28\xb5\x2f\xfd"},
	{"gzip file inside a gzip file", "\x1f\x8b"},
}

// binaryError returns an error that guesses the format of a binary file that is not an MMDB.
func binaryError(name string, data []byte) error {
	for _, f := range otherFormats {
		if bytes.HasPrefix(data, []byte(f.magic)) {
			return fmt.Errorf("%s: %s; extract it first: %s", name, f.name, expectedFormats)
		}
	}
	if len(data) > 262 && string(data[257:262]) == "ustar" {
		return fmt.Errorf("%s: tar archive; extract it first: %s", name, expectedFormats)
	}
	return fmt.Errorf("%s: binary data %s without MMDB metadata at the end: the file is truncated or in another format; %s",
		name, quote(data), expectedFormats)
}

// limitedReader fails after more than left bytes, unlike io.LimitReader, which would end
// the file there.
type limitedReader struct {
	r    io.Reader
	left int64
}

var errTooLong = errors.New("file exceeds the limit of 1 GiB")

func (l *limitedReader) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if l.left -= int64(n); l.left < 0 {
		return 0, errTooLong
	}
	return n, err
}

// readError adds advice to a read error.
func readError(err error) error {
	var corrupt flate.CorruptInputError
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return fmt.Errorf("%w: the file is truncated; download it again", io.ErrUnexpectedEOF)
	case errors.Is(err, gzip.ErrHeader), errors.Is(err, gzip.ErrChecksum), errors.As(err, &corrupt):
		return fmt.Errorf("%w: the file is corrupt; download it again", err)
	}
	return err
}

// quote quotes text for a message: one line, printable, truncated.
func quote[T string | []byte](text T) string {
	if len(text) > maxQuote {
		return strconv.Quote(string(text[:maxQuote])) + "..."
	}
	return strconv.Quote(string(text))
}

// parseASN parses "64500" or "AS64500".
func parseASN(text string) (uint32, error) {
	digits := text
	if len(text) > 2 && (text[0] == 'A' || text[0] == 'a') && (text[1] == 'S' || text[1] == 's') {
		digits = text[2:]
	}
	n := uint64(0)
	for i := range len(digits) {
		c := digits[i] - '0'
		if n = n*10 + uint64(c); c > 9 || n > math.MaxUint32 {
			return 0, asnError(text)
		}
	}
	if digits == "" {
		return 0, asnError(text)
	}
	return uint32(n), nil
}

func asnError(text string) error {
	return fmt.Errorf("ASN %s: expected 0 to 4294967295, optionally prefixed with AS", quote(text))
}
