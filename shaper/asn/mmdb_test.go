package asn

import (
	"bytes"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/maxmind/mmdbwriter"
	"github.com/maxmind/mmdbwriter/mmdbtype"
)

// network is one entry of an MMDB.
type network struct {
	prefix string
	record mmdbtype.DataType
}

func number(n uint32) mmdbtype.DataType {
	return mmdbtype.Map{
		"autonomous_system_number":       mmdbtype.Uint32(n),
		"autonomous_system_organization": mmdbtype.String("Example, Inc."),
	}
}

func writeMMDB(t testing.TB, opts mmdbwriter.Options, networks []network) []byte {
	t.Helper()
	opts.DatabaseType = "Example-ASN"
	opts.IncludeReservedNetworks = true
	opts.BuildEpoch = 1 // for the same bytes each time
	tree, err := mmdbwriter.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range networks {
		_, ipnet, err := net.ParseCIDR(n.prefix)
		if err != nil {
			t.Fatal(err)
		}
		if err := tree.Insert(ipnet, n.record); err != nil {
			t.Fatal(err)
		}
	}
	var b bytes.Buffer
	if _, err := tree.WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

var someNetworks = []network{
	{"192.0.2.0/24", number(64500)},
	{"192.0.3.0/24", number(64500)},
	{"198.51.100.128/25", number(4200000001)},
	{"255.255.255.255/32", number(64502)},
	{"2001:db8::/32", number(64501)},
	{"ffff::/16", number(64501)},
}

var someRanges = []Range{
	rng("192.0.2.0", "192.0.3.255", 64500),
	rng("198.51.100.128", "198.51.100.255", 4200000001),
	rng("255.255.255.255", "255.255.255.255", 64502),
	rng("2001:db8::", "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff", 64501),
	rng("ffff::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 64501),
}

func TestMMDB(t *testing.T) {
	all4, all6 := netip.MustParseAddr("255.255.255.255"), netip.MustParseAddr("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff")
	everything := []Range{
		{netip.IPv4Unspecified(), all4, 7},
		{netip.IPv6Unspecified(), netip.MustParseAddr("::fffe:ffff:ffff"), 7},
		{netip.MustParseAddr("::1:0:0:0"), all6, 7},
	}
	for _, tt := range []struct {
		name     string
		opts     mmdbwriter.Options
		networks []network
		want     []Range
	}{
		{"records of 24 bits", mmdbwriter.Options{RecordSize: 24}, someNetworks, someRanges},
		{"records of 28 bits", mmdbwriter.Options{RecordSize: 28}, someNetworks, someRanges},
		{"records of 32 bits", mmdbwriter.Options{RecordSize: 32}, someNetworks, someRanges},
		{"no aliases", mmdbwriter.Options{DisableIPv4Aliasing: true}, someNetworks, someRanges},
		{"tree of IPv4", mmdbwriter.Options{IPVersion: 4}, someNetworks[:4], someRanges[:3]},
		{"tree of IPv6 with IPv4 only", mmdbwriter.Options{}, someNetworks[:4], someRanges[:3]},
		{"IPv6 only", mmdbwriter.Options{}, someNetworks[4:], someRanges[3:]},
		{"all of IPv4", mmdbwriter.Options{IPVersion: 4}, []network{{"0.0.0.0/0", number(7)}}, everything[:1]},
		{"everything", mmdbwriter.Options{DisableIPv4Aliasing: true}, []network{{"::/0", number(7)}}, everything},
		{
			"IPv4-mapped",
			mmdbwriter.Options{DisableIPv4Aliasing: true},
			[]network{{"::ffff:192.0.2.0/120", number(7)}, {"2001:db8::/32", number(64501)}},
			[]Range{rng("192.0.2.0", "192.0.2.255", 7), someRanges[3]},
		},
		{
			"fields",
			mmdbwriter.Options{},
			[]network{
				{"10.0.0.0/32", mmdbtype.Map{"autonomous_system_number": mmdbtype.Uint64(1)}},
				{"10.0.0.1/32", mmdbtype.Map{"autonomous_system_number": mmdbtype.Uint16(2)}},
				{"10.0.0.2/32", mmdbtype.Map{"autonomous_system_number": mmdbtype.Int32(3)}},
				{"10.0.0.3/32", mmdbtype.Map{"asn": mmdbtype.Uint32(4)}},
				{"10.0.0.4/32", mmdbtype.Map{"asn": mmdbtype.String("AS5"), "name": mmdbtype.String("E")}},
				{"10.0.0.5/32", mmdbtype.Map{"asn": mmdbtype.String("4294967295")}},
				{"10.0.0.6/32", mmdbtype.Map{"asn": mmdbtype.String("AS9"), "autonomous_system_number": mmdbtype.Uint32(7)}},
				{"10.0.0.7/32", mmdbtype.Map{"asn": mmdbtype.String("")}},
				{"10.0.0.8/32", mmdbtype.Map{"asn": mmdbtype.String("AS0")}},
				{"10.0.0.9/32", mmdbtype.Map{"name": mmdbtype.String("E")}},
				{"10.0.0.10/32", mmdbtype.Map{"asn": mmdbtype.Map{}, "autonomous_system_number": mmdbtype.Uint32(8)}},
			},
			[]Range{
				rng("10.0.0.0", "10.0.0.0", 1), rng("10.0.0.1", "10.0.0.1", 2), rng("10.0.0.2", "10.0.0.2", 3),
				rng("10.0.0.3", "10.0.0.3", 4), rng("10.0.0.4", "10.0.0.4", 5), rng("10.0.0.5", "10.0.0.5", 4294967295),
				rng("10.0.0.6", "10.0.0.6", 7), rng("10.0.0.10", "10.0.0.10", 8),
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			data := writeMMDB(t, tt.opts, tt.networks)
			for name, content := range map[string][]byte{"plain": data, "gzip": zip(t, string(data))} {
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

func TestMMDBWithText(t *testing.T) {
	db := writeFile(t, "asn.mmdb", writeMMDB(t, mmdbwriter.Options{}, someNetworks))
	own := writeFile(t, "own", []byte("192.0.2.0/28 65000\n"))
	table, err := Load(db, own)
	if err != nil {
		t.Fatal(err)
	}
	if got := table.Lookup(netip.MustParseAddr("192.0.2.15")); got != 65000 {
		t.Errorf("ASN %d of the own prefix, want 65000", got)
	}
	if got := table.Lookup(netip.MustParseAddr("192.0.2.16")); got != 64500 {
		t.Errorf("ASN %d next to the own prefix, want 64500", got)
	}

	other := writeFile(t, "other", []byte("192.0.2.0/23 65000\n"))
	_, err = Load(other, db)
	checkError(t, err, db+": 192.0.2.0-192.0.3.255 AS64500 overlaps 192.0.2.0-192.0.3.255 AS65000 of "+other+
		":1; an address must have one ASN")
}

func TestMMDBErrors(t *testing.T) {
	one := func(record mmdbtype.DataType) []byte {
		return writeMMDB(t, mmdbwriter.Options{IPVersion: 4}, []network{{"192.0.2.0/24", record}})
	}
	good := one(number(64500))
	// change replaces a part of the good file, metadata included.
	change := func(oldNew ...string) []byte {
		for i := 0; i < len(oldNew); i += 2 {
			if !bytes.Contains(good, []byte(oldNew[i])) {
				t.Fatalf("%q is not in the file", oldNew[i])
			}
		}
		return []byte(strings.NewReplacer(oldNew...).Replace(string(good)))
	}
	// record overwrites the left record of a node of 28 bits.
	record := func(node int, value byte) []byte {
		data := slices.Clone(good)
		data[7*node], data[7*node+1], data[7*node+2] = 0, 0, value
		return data
	}
	for _, tt := range []struct {
		name string
		data []byte
		want string
	}{
		{
			"ASN over 32 bits", one(mmdbtype.Map{"asn": mmdbtype.Uint64(1 << 32)}),
			`input: network 192.0.2.0/24: ASN "4294967296": expected 0 to 4294967295, optionally prefixed with AS`,
		},
		{
			"negative ASN", one(mmdbtype.Map{"asn": mmdbtype.Int32(-1)}),
			`input: network 192.0.2.0/24: ASN "-1": expected 0 to 4294967295, optionally prefixed with AS`,
		},
		{
			"ASN as text", one(mmdbtype.Map{"asn": mmdbtype.String("Example")}),
			`input: network 192.0.2.0/24: ASN "Example": expected 0 to 4294967295, optionally prefixed with AS`,
		},
		{
			"ASN of another type", one(mmdbtype.Map{"asn": mmdbtype.Bool(true)}),
			`input: network 192.0.2.0/24: ASN "true": expected 0 to 4294967295, optionally prefixed with AS`,
		},
		{
			"record is not a map", one(mmdbtype.String("Example")),
			"input: network 192.0.2.0/24: decode record: ",
		},
		{
			"not an ASN database", one(mmdbtype.Map{"city": mmdbtype.String("Bonn")}),
			`input: MMDB of type "Example-ASN" has records without autonomous_system_number or asn; expected an ASN database`,
		},
		{
			"no networks", writeMMDB(t, mmdbwriter.Options{}, nil),
			"input: no range with an ASN; " + expectedFormats,
		},
		{
			"no metadata", good[:bytes.Index(good, []byte(mmdbMarker))],
			`input: binary data "`,
		},
		{"metadata only", append([]byte{0}, good[bytes.Index(good, []byte(mmdbMarker)):]...), "input: open MMDB: "},
		{"record size", change("record_size\xa1\x1c", "record_size\xa1\x14"), "input: open MMDB: "},
		{"IP version", change("ip_version\xa1\x04", "ip_version\xa1\x05"), "input: open MMDB: IP version 5: expected 4 or 6; the file is truncated or corrupt"},
		{"too many nodes", change("node_count\xc1\x18", "node_count\xc1\xff"), "input: open MMDB: "},
		{
			// (1<<64)/6 nodes: the size of tree and separator overflows to 12 bytes.
			"tree larger than memory", change("record_size\xa1\x1c", "record_size\xa1\x18", "node_count\xc1\x18", "node_count\x08\x02\x2a\xaa\xaa\xaa\xaa\xaa\xaa\xaa"),
			"input: open MMDB: 3074457345618258602 tree nodes do not fit in 259 bytes; the file is truncated or corrupt",
		},
		{"tree of loops", record(1, 0), "input: search tree is deeper than an address at ::aaaa:aaaa; the file is corrupt"},
		{"pointer into the separator", record(1, 24+15), "input: network 128.0.0.0/2: record is outside the data; the file is corrupt"},
		{"pointer beyond the data", record(1, 255), "input: network 128.0.0.0/2: record is outside the data; the file is corrupt"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parseAll(tt.data)
			if err == nil {
				t.Fatal("no error")
			}
			// Texts of the library after a colon are not checked.
			if got := err.Error(); got != tt.want && !(strings.HasSuffix(tt.want, " ") || strings.HasSuffix(tt.want, `"`)) || !strings.HasPrefix(got, tt.want) {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

// TestMMDBBomb loads small files whose nodes share branches at every level.
func TestMMDBBomb(t *testing.T) {
	// Each node points to the next with both records; the last one to the data.
	bomb := func(version, depth int, last uint32) []byte {
		var b bytes.Buffer
		for i := range depth {
			next := uint32(i + 1)
			if i == depth-1 {
				next = last
			}
			b.Write([]byte{0, byte(next >> 8), byte(next), 0, byte(next >> 8), byte(next)})
		}
		b.Write(make([]byte, mmdbSeparator))
		b.WriteString("\xe1\x43asn\xc1\x07") // {"asn": 7}
		b.WriteString(mmdbMarker + "\xe4" +
			"\x4anode_count\xc1" + string([]byte{byte(depth)}) +
			"\x4brecord_size\xa1\x18" +
			"\x4aip_version\xa1" + string([]byte{byte(version)}) +
			"\x4ddatabase_type\x41E")
		return b.Bytes()
	}
	for _, tt := range []struct {
		name string
		data []byte
		want string
	}{
		{"data", bomb(6, 128, 128+16), "input: search tree of 128 nodes takes over 67584 steps; the file is corrupt"},
		{"nothing", bomb(6, 128, 128), "input: search tree of 128 nodes takes over 67584 steps; the file is corrupt"},
		{"IPv4", bomb(4, 32, 32+16), "input: search tree of 32 nodes takes over 66048 steps; the file is corrupt"},
		{"too deep", bomb(4, 40, 40), "input: search tree is deeper than an address at ::; the file is corrupt"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := parseAll(tt.data)
			checkError(t, err, tt.want)
		})
	}
	t.Run("shared branches within bounds", func(t *testing.T) {
		table, err := parseAll(bomb(4, 10, 10+16))
		if err != nil {
			t.Fatal(err)
		}
		if got := table.Lookup(netip.MustParseAddr("203.0.113.1")); got != 7 {
			t.Errorf("ASN %d, want 7", got)
		}
	})
}

func TestMMDBTruncation(t *testing.T) {
	data := writeMMDB(t, mmdbwriter.Options{}, someNetworks)
	for i := range 64 {
		cut := data[:len(data)*i/64]
		var b builder
		err := b.read(bytes.NewReader(cut), "asn.mmdb", maxFile)
		if err == nil || !strings.HasPrefix(err.Error(), "asn.mmdb: ") {
			t.Errorf("cut at byte %d of %d: error %v", len(cut), len(data), err)
		} else if i > 0 && !strings.Contains(err.Error(), "truncated") {
			t.Errorf("cut at byte %d of %d: %v", len(cut), len(data), err)
		}
	}
	for cut := len(data) - 200; cut < len(data); cut++ {
		if err := new(builder).read(io.LimitReader(bytes.NewReader(data), int64(cut)), "asn.mmdb", maxFile); err == nil {
			t.Errorf("cut at byte %d of %d: no error", cut, len(data))
		}
	}
}
