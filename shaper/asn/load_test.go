package asn

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestFormats(t *testing.T) {
	ranges := []Range{rng("192.0.2.0", "192.0.2.255", 64500), rng("2001:db8::", "2001:db8::ffff", 4200000001)}
	prefixes := []Range{rng("192.0.2.0", "192.0.2.255", 64500), rng("2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", 4200000001)}
	for _, tt := range []struct {
		name    string
		content string
		want    []Range
	}{
		{"CSV", "192.0.2.0,192.0.2.255,64500\n2001:db8::,2001:db8::ffff,4200000001\n", ranges},
		{"CSV with names", "192.0.2.0,192.0.2.255,64500,\"Example, \"\"Inc.\"\"\"\n2001:db8::,2001:db8::ffff,4200000001,Ex \"am\" ple\n", ranges},
		{"CSV, all quoted", "\"192.0.2.0\",\"192.0.2.255\",\"AS64500\",\"E\"\n\"2001:db8::\" , \"2001:db8::ffff\",\"4200000001\"\n", ranges},
		{"CSV with blanks", " 192.0.2.0, 192.0.2.255 ,\tAS64500 , E\n2001:db8:: ,2001:db8::ffff,as4200000001 \n", ranges},
		{"CSV from Windows", "\xef\xbb\xbf192.0.2.0,192.0.2.255,64500\r\n\r\n2001:db8::,2001:db8::ffff,4200000001\r\n", ranges},
		{"iptoasn TSV", "192.0.2.0\t192.0.2.255\t64500\tZZ\tEXAMPLE - Example, Inc.\n192.0.3.0\t192.0.3.255\t0\tNone\tNot routed\n2001:db8::\t2001:db8::ffff\t4200000001\tZZ\tE\n", ranges},
		{"spaces", "192.0.2.0 192.0.2.255  64500\n2001:db8:: 2001:db8::ffff AS4200000001\n", ranges},
		{"comments, blank lines", "# a\n;b\n\n \t\n192.0.2.0,192.0.2.255,64500\n  # c\n2001:db8::,2001:db8::ffff,4200000001\n", ranges},
		{"unsorted", "2001:db8::,2001:db8::ffff,4200000001\n192.0.2.128,192.0.2.255,64500\n192.0.2.0,192.0.2.127,64500\n", ranges},
		{"duplicates", "192.0.2.0,192.0.2.255,64500\n192.0.2.0,192.0.2.255,64500\n2001:db8::,2001:db8::ffff,4200000001\n", ranges},
		{"overlap with the same ASN", "192.0.2.0,192.0.2.99,64500\n192.0.2.7,192.0.2.255,64500\n2001:db8::,2001:db8::ffff,4200000001\n", ranges},
		{"IPv4-mapped", "::ffff:192.0.2.0,::ffff:192.0.2.255,64500\n2001:db8::,2001:db8::ffff,4200000001\n", ranges},
		{"prefixes", "192.0.2.0/24 64500\n2001:db8::/32 AS4200000001\n", prefixes},
		{"prefixes with commas", "192.0.2.0/24,64500,\"Example, Inc.\"\n2001:db8::/32,AS4200000001,E\n", prefixes},
		{"pfx2as", "192.0.2.0\t24\t64500\n2001:db8::\t32\t4200000001\n", prefixes},
		{"pfx2as, several origins", "192.0.2.0\t24\t64500_64501\n2001:db8::\t32\t4200000001,64501_64502\n", prefixes},
		{"prefix, several origins", "192.0.2.0/24 64500,64501\n2001:db8::/32 4200000001_64500\n", prefixes},
		{"IPv4-mapped prefixes", "::ffff:192.0.2.0/120 64500\n2001:db8::\t32\t4200000001\n", prefixes},
		{
			"nested prefixes",
			"10.0.0.0/8 1\n10.1.0.0/16 2\n10.1.1.0/24 1\n10.255.255.0/24 3\n10.1.255.255/32 4\n",
			[]Range{
				rng("10.0.0.0", "10.0.255.255", 1), rng("10.1.0.0", "10.1.0.255", 2), rng("10.1.1.0", "10.1.1.255", 1),
				rng("10.1.2.0", "10.1.255.254", 2), rng("10.1.255.255", "10.1.255.255", 4),
				rng("10.2.0.0", "10.255.254.255", 1), rng("10.255.255.0", "10.255.255.255", 3),
			},
		},
		{
			"default routes",
			"0.0.0.0/0 1\n255.255.255.255/32 2\n::/0 3\n::fffe:0:0/95 4\nffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff/128 5\n",
			[]Range{
				rng("0.0.0.0", "255.255.255.254", 1), rng("255.255.255.255", "255.255.255.255", 2),
				rng("::", "::fffd:ffff:ffff", 3), rng("::fffe:0:0", "::fffe:ffff:ffff", 4),
				rng("::1:0:0:0", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe", 3),
				rng("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 5),
			},
		},
		{
			"prefix in a range",
			"10.0.0.7/32 2\n10.0.0.0,10.0.0.9,1\n",
			[]Range{rng("10.0.0.0", "10.0.0.6", 1), rng("10.0.0.7", "10.0.0.7", 2), rng("10.0.0.8", "10.0.0.9", 1)},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for name, content := range map[string][]byte{"plain": []byte(tt.content), "gzip": zip(t, tt.content)} {
				table, err := parseAll(content)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				if diff := cmp.Diff(tt.want, slices.Collect(table.All()), cmpAddr); diff != "" {
					t.Errorf("%s: %s", name, diff)
				}
				checkTable(t, table)
			}
		})
	}
}

func TestLoad_SeveralFiles(t *testing.T) {
	v4 := writeFile(t, "v4", []byte("192.0.2.0,192.0.2.255,64500\n"))
	v6 := writeFile(t, "v6", zip(t, "2001:db8::/32 64501\n"))
	own := writeFile(t, "own", []byte("192.0.2.7/32 64502\n"))
	table, err := Load(own, v6, v4)
	if err != nil {
		t.Fatal(err)
	}
	want := []Range{
		rng("192.0.2.0", "192.0.2.6", 64500), rng("192.0.2.7", "192.0.2.7", 64502), rng("192.0.2.8", "192.0.2.255", 64500),
		rng("2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", 64501),
	}
	if diff := cmp.Diff(want, slices.Collect(table.All()), cmpAddr); diff != "" {
		t.Error(diff)
	}

	other := writeFile(t, "other", []byte("\n192.0.2.255,192.0.3.0,64501\n"))
	_, err = Load(other, v4)
	wantErr := v4 + ":1: 192.0.2.0-192.0.2.255 AS64500 overlaps 192.0.2.255-192.0.3.0 AS64501 of " + other +
		":2; an address must have one ASN"
	checkError(t, err, wantErr)
}

// TestBadFiles loads every file of testdata/bad: each has one error.
func TestBadFiles(t *testing.T) {
	const dir = "testdata/bad/"
	want := map[string]string{
		"address.csv":                 `:3: address "198.51.100.256": expected an IPv4 or IPv6 address without zone`,
		"after_quote.csv":             `:3: "\"198.51.100.0\"x,198.51.100.255,64501": expected a comma after the closing quote`,
		"archive.zip":                 `: zip archive; extract it first: ` + expectedFormats,
		"asn_as_alone.csv":            `:3: ASN "AS": expected 0 to 4294967295, optionally prefixed with AS`,
		"asn_dotted.csv":              `:3: ASN "1.10": expected 0 to 4294967295, optionally prefixed with AS`,
		"asn_empty.csv":               `:3: "198.51.100.0,198.51.100.255,,Example": missing field; ` + expectedLine,
		"asn_huge.csv":                `:3: ASN "18446744073709551617": expected 0 to 4294967295, optionally prefixed with AS`,
		"asn_over_32_bits.csv":        `:3: ASN "4294967296": expected 0 to 4294967295, optionally prefixed with AS`,
		"asn_text.csv":                `:3: ASN "Example": expected 0 to 4294967295, optionally prefixed with AS`,
		"binary.bin":                  `: binary data "\x01\x02\x03192.0.2.0\n" without MMDB metadata at the end: the file is truncated or in another format; ` + expectedFormats,
		"cut_line.csv":                `:3: missing newline after "198.51.100.0,198.51.100.255,645" at the end; the file may be truncated, otherwise add one`,
		"empty.csv":                   `: empty file; ` + expectedFormats,
		"families.csv":                `:3: range 198.51.100.0-2001:db8:: mixes IPv4 and IPv6; expected one family`,
		"heading.csv":                 `:1: address "network": expected an IPv4 or IPv6 address, or # before a header line`,
		"html.csv":                    `:1: address "<!DOCTYPE": expected an IPv4 or IPv6 address, or # before a header line`,
		"last_address.csv":            `:3: address "198.51.100.x": expected an IPv4 or IPv6 address without zone`,
		"long_text.csv":               `:3: ASN "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"...: expected 0 to 4294967295, optionally prefixed with AS`,
		"missing_fields.csv":          `:3: "198.51.100.0,198.51.100.255": missing field; ` + expectedLine,
		"numeric_address.csv":         `:1: address "3221225984": expected an IPv4 or IPv6 address without zone`,
		"one_field.csv":               `:3: "198.51.100.0": missing field; ` + expectedLine,
		"only_as0.csv":                `: no range with an ASN; ` + expectedFormats,
		"only_comments.csv":           `: no range with an ASN; ` + expectedFormats,
		"open_quote_second.csv":       `:1: "\"192.0.2.255,64500": expected a closing quote`,
		"open_quote_third.csv":        `:1: "\"64500": expected a closing quote`,
		"open_quote.csv":              `:3: "\"198.51.100.0,198.51.100.255,64501": expected a closing quote`,
		"order.csv":                   `:3: range 198.51.100.255-198.51.100.0 is reversed; expected first <= last`,
		"origins.pfx2as":              `:1: ASN "x": expected 0 to 4294967295, optionally prefixed with AS`,
		"origins_empty.pfx2as":        `:1: ASN "": expected 0 to 4294967295, optionally prefixed with AS`,
		"overlap.csv":                 `:2: 192.0.2.0-192.0.2.255 AS64500 overlaps 192.0.2.128-192.0.3.255 AS64501 of ` + dir + `overlap.csv:1; an address must have one ASN`,
		"overlap_equal.csv":           `:2: 2001:db8::-2001:db8::ffff AS64501 overlaps 2001:db8::-2001:db8::ffff AS64500 of ` + dir + `overlap_equal.csv:1; an address must have one ASN`,
		"overlap_inside.csv":          `:3: 192.0.2.7-192.0.2.7 AS64501 overlaps 192.0.2.0-192.0.2.255 AS64500 of ` + dir + `overlap_inside.csv:1; an address must have one ASN`,
		"overlap_third.csv":           `:3: 192.0.2.15-192.0.2.16 AS64501 overlaps 192.0.2.5-192.0.2.20 AS64500 of ` + dir + `overlap_third.csv:2; an address must have one ASN`,
		"packed.bz2":                  `: bzip2 file; extract it first: ` + expectedFormats,
		"prefix_and_range.csv":        `:2: 192.0.2.0-192.0.2.7 AS64501 overlaps 192.0.2.0-192.0.2.255 AS64500 of ` + dir + `prefix_and_range.csv:1; an address must have one ASN`,
		"prefix_equal.pfx2as":         `:2: 192.0.2.0-192.0.2.255 AS64501 overlaps 192.0.2.0-192.0.2.255 AS64500 of ` + dir + `prefix_equal.pfx2as:1; an address must have one ASN`,
		"prefix_host_bits.pfx2as":     `:2: prefix 198.51.100.7/24 has bits set beyond its length; expected 198.51.100.0/24`,
		"prefix_length.pfx2as":        `:1: prefix "192.0.2.0/33": expected an IPv4 or IPv6 prefix such as 192.0.2.0/24 or 2001:db8::/32`,
		"prefix_length_column.pfx2as": `:1: prefix length "33": expected 0 to 32`,
		"prefix_length_huge.pfx2as":   `:1: prefix length "99999999999999999999": expected 0 to 128`,
		"prefix_no_asn.pfx2as":        `:1: "192.0.2.0/24": missing field; ` + expectedLine,
		"prefix_no_asn_column.pfx2as": `:1: "192.0.2.0\t24": missing field; ` + expectedLine,
		"prefix_over_range.csv":       `:2: 192.0.0.0-192.0.255.255 AS64500 overlaps 192.0.2.0-192.0.2.255 AS64501 of ` + dir + `prefix_over_range.csv:1; an address must have one ASN`,
		"utf16.csv":                   `: binary data "\xff\xfe1\x009\x002\x00.\x00\n\x00" without MMDB metadata at the end: the file is truncated or in another format; ` + expectedFormats,
		"zone.csv":                    `:3: address "fe80::1%eth0": expected an IPv4 or IPv6 address without zone`,
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		t.Run(f.Name(), func(t *testing.T) {
			if want[f.Name()] == "" {
				t.Fatal("no expected message for this file")
			}
			_, err := Load(dir + f.Name())
			checkError(t, err, dir+f.Name()+want[f.Name()])
			delete(want, f.Name())
		})
	}
	for name := range want {
		t.Errorf("%s%s is missing", dir, name)
	}
}

func TestUnreadableFiles(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	large := writeFile(t, "large", nil)
	if err := os.Truncate(large, maxFile+1); err != nil {
		t.Fatal(err)
	}
	dirInfo, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	missing := filepath.Join(dir, "asn.csv")
	for _, tt := range []struct{ name, path, want string }{
		{"missing", missing, missing + ": find ASN file: stat " + missing +
			": no such file or directory; check the path and that the daemon's user may read it"},
		{"directory", dir, dir + ": not a regular file (" + dirInfo.Mode().String() + ")"},
		{"pipe", pipe, pipe + ": not a regular file (prw-------)"},
		{"over 1 GiB", large, large + ": 1073741825 bytes; expected at most 1073741824"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Load(tt.path)
			checkError(t, err, tt.want)
		})
	}
	if _, err := Load(missing); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v does not wrap the cause", err)
	}
	_, err = Load()
	checkError(t, err, "load ASN table: missing file; expected at least one")
	_, err = Load(make([]string, 1<<16)...)
	checkError(t, err, "load ASN table: 65536 files; expected at most 65535")
}

type brokenReader struct{ r io.Reader }

func (b brokenReader) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if err == io.EOF {
		err = syscall.EIO
	}
	return n, err
}

// TestStreamErrors covers read, decompression and length errors.
func TestStreamErrors(t *testing.T) {
	const line = "192.0.2.0,192.0.2.255,64500\n"
	zipped := zip(t, line)
	badSum := slices.Clone(zipped)
	badSum[len(badSum)-8] ^= 1
	badData := slices.Clone(zipped)
	badData[10] = 0xff
	tar := append(bytes.Repeat([]byte{0}, 257), "ustar\x00"...)
	for _, tt := range []struct {
		name  string
		r     io.Reader
		limit int64
		want  string
	}{
		{"disk", brokenReader{strings.NewReader(line)}, maxFile, "f:2: read line: input/output error"},
		{"disk, at once", brokenReader{strings.NewReader("")}, maxFile, "f:1: read line: input/output error"},
		{"disk, in an MMDB", brokenReader{strings.NewReader("\x00")}, maxFile, "f: read file: input/output error"},
		{"gzip, header cut", bytes.NewReader(zipped[:5]), maxFile, "f: decompress gzip: unexpected EOF: the file is truncated; download it again"},
		{"gzip, magic alone", bytes.NewReader(zipped[:2]), maxFile, "f: decompress gzip: unexpected EOF: the file is truncated; download it again"},
		{"gzip, cut", bytes.NewReader(zipped[:len(zipped)-1]), maxFile, "f:2: read line: unexpected EOF: the file is truncated; download it again"},
		{"gzip, damaged", bytes.NewReader(badData), maxFile, "f:1: read line: flate: corrupt input before offset 1: the file is corrupt; download it again"},
		{"gzip, checksum", bytes.NewReader(badSum), maxFile, "f:2: read line: gzip: invalid checksum: the file is corrupt; download it again"},
		{
			"gzip with trailing data", bytes.NewReader(append(slices.Clone(zipped), "more than ten bytes"...)), maxFile,
			"f:2: read line: gzip: invalid header: the file is corrupt; download it again",
		},
		{
			"gzip of gzip", bytes.NewReader(zip(t, string(zipped))), maxFile,
			"f: gzip file inside a gzip file; extract it first: " + expectedFormats,
		},
		{"tar in gzip", bytes.NewReader(zip(t, string(tar))), maxFile, "f: tar archive; extract it first: " + expectedFormats},
		{"empty gzip", bytes.NewReader(zip(t, "")), maxFile, "f: empty file; " + expectedFormats},
		{
			"longer than the limit", strings.NewReader(strings.Repeat(line, 3)), int64(2 * len(line)),
			"f:1: read line: file exceeds the limit of 1 GiB",
		},
		{
			"longer than the limit, unpacked", bytes.NewReader(zip(t, strings.Repeat(line, 9000))), 1000,
			"f:1: read line: file exceeds the limit of 1 GiB",
		},
		{
			"long line", strings.NewReader(line + line[:len(line)-1] + "," + strings.Repeat("x", maxLine)), maxFile,
			`f:2: line "192.0.2.0,192.0.2.255,64500,xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"... is longer than 65536 bytes; ` + expectedLine,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b builder
			checkError(t, b.read(tt.r, "f", tt.limit), tt.want)
		})
	}
	t.Run("line of the maximum length", func(t *testing.T) {
		table, err := parseAll(line[:len(line)-1] + "," + strings.Repeat("x", maxLine-len(line)-1) + "\n")
		if err != nil || table.Lookup(rng("192.0.2.1", "192.0.2.1", 0).First) != 64500 {
			t.Errorf("error %v", err)
		}
	})
}

// TestTruncation cuts text at every 1/64 of its length. A cut between two lines cannot
// be detected in plain text; any other one must be.
func TestTruncation(t *testing.T) {
	var text strings.Builder
	for i := range 200 {
		fmt.Fprintf(&text, "10.0.%d.0,10.0.%d.255,%d,\"Example %d, Inc.\"\n", i, i, 64500+i, i)
	}
	whole := text.String()
	zipped := string(zip(t, whole))
	lines, errs := 0, 0
	for i := range 64 {
		cut := whole[:len(whole)*i/64]
		table, err := parseAll(cut)
		switch {
		case i > 0 && strings.HasSuffix(cut, "\n"):
			lines++
			if err != nil {
				t.Errorf("cut after a line, at byte %d: %v", len(cut), err)
			} else if v4, _ := count(table); v4 != strings.Count(cut, "\n") {
				t.Errorf("%d ranges of %d lines", v4, strings.Count(cut, "\n"))
			}
		case err == nil:
			t.Errorf("cut at byte %d: no error", len(cut))
		case i > 0 && !strings.Contains(err.Error(), fmt.Sprintf("input:%d: missing newline", strings.Count(cut, "\n")+1)):
			t.Errorf("cut at byte %d: %v", len(cut), err)
		default:
			errs++
		}
		cut = zipped[:len(zipped)*i/64]
		if _, err := parseAll(cut); err == nil {
			t.Errorf("gzip cut at byte %d: no error", len(cut))
		} else if i > 0 && !strings.Contains(err.Error(), "truncated") {
			t.Errorf("gzip cut at byte %d: %v", len(cut), err)
		}
	}
	t.Logf("%d cuts between lines, %d elsewhere", lines, errs)
}

func zip(t testing.TB, content string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write([]byte(content)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func writeFile(t testing.TB, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func checkError(t *testing.T, err error, want string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want %q", want)
	}
	if diff := cmp.Diff(want, err.Error()); diff != "" {
		t.Error(diff)
	}
}
