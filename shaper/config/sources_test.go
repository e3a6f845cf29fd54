package config

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/shaper"
)

func TestParseGroup(t *testing.T) {
	got, err := ParseGroup("gold.txt", "# customers\n192.0.2.1\n\n 198.51.100.0/24 # all of them\n2001:db8::/32\r\n::ffff:203.0.113.1")
	if err != nil {
		t.Fatal(err)
	}
	if want := "[192.0.2.1/32 198.51.100.0/24 2001:db8::/32 203.0.113.1/32]"; fmt.Sprint(got) != want {
		t.Errorf("%v, want %s", got, want)
	}
	_, err = ParseGroup("gold.txt", "192.0.2.1\n192.0.2.1/24\nexample.com\n")
	want := "gold.txt:2:1: \"192.0.2.1/24\" has host bits set: write \"192.0.2.0/24\"\n" +
		"gold.txt:3:1: \"example.com\" is not an address, or a prefix such as \"192.0.2.0/24\" or \"2001:db8::/32\""
	if err == nil || err.Error() != want {
		t.Errorf("%v\nwant\n%s", err, want)
	}
}

func TestParseValues(t *testing.T) {
	l := &shaper.Limit{Name: "l", Key: shaper.KeySource, IPv4Prefix: 24, IPv6Prefix: 64, Rate: 8e6, MaxConnections: 10}
	v, err := ParseValues("c.csv", "# source first\nsource, rate, max_connections\n192.0.2.0/24,100Mbit/s,200\n\n198.51.100.0/24,,5\n2001:db8::/48, \"1MB/s\",\n")
	if err != nil {
		t.Fatal(err)
	}
	got, err := v.For(l)
	if err != nil {
		t.Fatal(err)
	}
	values := func(rate uint64, connections int) shaper.Values {
		return shaper.Values{Rate: rate, MaxConnections: connections}
	}
	want := []shaper.SourceValues{
		{Source: netip.MustParsePrefix("192.0.2.0/24"), Values: values(100e6, 200)},
		{Source: netip.MustParsePrefix("198.51.100.0/24"), Values: values(8e6, 5)},
		{Source: netip.MustParsePrefix("2001:db8::/48"), Values: values(8e6, 10)},
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
	l.MaxConnections = 0
	if _, err := v.For(l); err == nil || !strings.Contains(err.Error(), `c.csv:3:1: limit "l": max_connections: has no effect without max_connections in the limit`) {
		t.Error(err)
	}

	for text, want := range map[string]string{
		"":                                     "c.csv:1:1: the file is empty: it needs a header such as source,rate,max_connections",
		"192.0.2.0/24,1MB/s":                   "c.csv:1:1: the first column is \"192.0.2.0/24\": must be source, in a header such as source,rate,max_connections",
		"source":                               "c.csv:1:1: no column but source: add some of rate, packets, burst, burst_packets, max_connections, new_connections, burst_connections",
		"source,bandwidth,rate,rate":           "c.csv:1:8: unknown key \"bandwidth\"; did you mean \"rate\"?\nc.csv:1:23: duplicate column rate",
		"source,rate\n192.0.2.0/24":            "c.csv:2:1: 1 columns, and the header has 2",
		"source,rate\nx,1MB/s":                 "c.csv:2:1: source: \"x\" is not an address, or a prefix such as \"192.0.2.0/24\" or \"2001:db8::/32\"",
		"source,rate\n10.0.0.0/8,5":            "c.csv:2:12: rate: \"5\" says neither bits nor bytes: write \"5bit/s\" or \"5B/s\"",
		"source,rate\n10.0.0.0/8,\"5":          "c.csv:2:14: extraneous or missing \" in quoted-field",
		"source,max_connections\n10.0.0.0/8,x": "c.csv:2:12: max_connections: must be an integer such as 100, not \"x\"",
		"source,rate\n10.0.0.0/8,1MB/s\n10.0.0.0/8,1MB/s":     "c.csv:3:1: source: 10.0.0.0/8 is also in line 2",
		"source,rate\n10.0.0.0/8,1MB/s\n\n10.0.0.9/8,1MB/s\n": "c.csv:4:1: source: \"10.0.0.9/8\" has host bits set: write \"10.0.0.0/8\"",
	} {
		if _, err := ParseValues("c.csv", text); err == nil || err.Error() != want {
			t.Errorf("%q:\n%v\nwant\n%s", text, err, want)
		}
	}
	v, _ = ParseValues("c.csv", "source,rate\n10.0.0.1/32,1MB/s\n")
	if _, err := v.For(l); err == nil || err.Error() != `c.csv:2:1: source: 10.0.0.1/32 is longer than ipv4_prefix = 24 of limit "l": a bucket has one value` {
		t.Error(err)
	}
}

func FuzzParseValues(f *testing.F) {
	f.Add("source,rate,max_connections\n192.0.2.0/24,100Mbit/s,200\n198.51.100.0/24,,5\n")
	f.Add("source,burst_packets,packets\n\"10.0.0.0/8\",5,9pps\n#")
	f.Fuzz(func(t *testing.T, text string) {
		v, err := ParseValues("c.csv", text)
		if (err == nil) != (v != nil && err == nil) {
			t.Fatal("neither values nor an error")
		}
		if err != nil {
			return
		}
		l := shaper.Limit{
			Name: "l", Key: shaper.KeySource, IPv4Prefix: 32, IPv6Prefix: 128, Rate: 8e6, Packets: shaper.Frequency{N: 1, Per: 1e9}, MaxConnections: 10,
			NewConnections: shaper.Frequency{N: 1, Per: 1e9}, Match: shaper.Match{Protocol: shaper.UDP},
		}
		if l.BySource, err = v.For(&l); err != nil {
			return
		}
		if _, err := shaper.New(1).Compile([]shaper.Limit{l}, nil, nil, nil, false); err != nil {
			t.Fatalf("does not compile: %v", err)
		}
	})
}
