package asn

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/maxmind/mmdbwriter"
)

// fuzzLoad asserts that content gives either a valid table or one clear error.
func fuzzLoad(t *testing.T, content []byte) {
	// The limit keeps gzip bombs short.
	var b builder
	err := b.read(bytes.NewReader(content), "input", 1<<20)
	var table *Table
	if err == nil {
		table, err = b.build()
	}
	if err != nil {
		if msg := err.Error(); !strings.HasPrefix(msg, "input:") || strings.Contains(msg, "\n") || len(msg) > 1000 {
			t.Fatalf("error is not one short line about the input: %q", msg)
		}
		return
	}
	checkTable(t, table)
}

func FuzzLoadText(f *testing.F) {
	files, err := filepath.Glob("testdata/bad/*")
	if err != nil || len(files) == 0 {
		f.Fatalf("testdata/bad: %d files, error %v", len(files), err)
	}
	for _, path := range files {
		content, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(content)
	}
	for _, content := range []string{
		"192.0.2.0,192.0.2.255,64500,\"Example, Inc.\"\n2001:db8::,2001:db8::ffff,AS64501,E\n",
		"\"192.0.2.0\",\"192.0.2.255\",\"64500\"\r\n",
		"192.0.2.0\t192.0.2.255\t64500\tZZ\tE\n0.0.0.0\t0.255.255.255\t0\tNone\tNot routed\n",
		"10.0.0.0/8 1\n10.1.0.0/16 2\n10.1.1.0/24 1\n10.0.0.0,10.255.255.255,1\n",
		"::/0 1\n0.0.0.0/0 2\n::fffe:0:0/95 3\n::ffff:10.0.0.0/104 4\nffff::\t16\t5_6,7\n",
	} {
		f.Add([]byte(content))
		f.Add(zip(f, content))
	}
	f.Fuzz(fuzzLoad)
}

func FuzzLoadMMDB(f *testing.F) {
	for _, opts := range []mmdbwriter.Options{
		{RecordSize: 24},
		{RecordSize: 28, DisableIPv4Aliasing: true},
		{RecordSize: 32, DisableMetadataPointers: true},
	} {
		data := writeMMDB(f, opts, someNetworks)
		f.Add(data)
		f.Add(data[:len(data)-1])
		opts.IPVersion = 4
		f.Add(writeMMDB(f, opts, someNetworks[:4]))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		if !isBinary(content[:min(len(content), sniffLen)]) {
			return
		}
		fuzzLoad(t, content)
	})
}
