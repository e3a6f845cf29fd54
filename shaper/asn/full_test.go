package asn

import (
	"bufio"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// The size of the Internet's table, and what it may cost.
const (
	fullV4, fullV6 = 411_961, 103_197
	fullNames      = 91_065

	maxLoad     = 10.0     // of the time that encoding/csv takes to read the files
	maxRetained = 64 << 20 // bytes of heap
	maxNames    = 8 << 20  // of that, in the published table
	maxLookup   = 3.0      // of the time that a binary search in a sorted slice takes
)

// knownOverlap is the one mistake of the published table: 215.0.0.0/16 has two
// ASNs. mended is the line as the lines around it suggest.
const (
	knownOverlap = "214.95.0.0,215.0.255.255,749,"
	mended       = "214.95.0.0,214.255.255.255,749,"
)

// TestFullTable holds a table of the size of the Internet's to its bounds: the
// published one, of the directory that SHAPERD_ASN_DATA names and fetch.sh
// fills, or else a synthetic one.
func TestFullTable(t *testing.T) {
	paths, published := fullTable(t)
	if published {
		_, err := Load(paths...)
		checkError(t, err, fmt.Sprintf("%s:399116: 215.0.0.0-215.1.3.255 AS721 overlaps 214.95.0.0-215.0.255.255 AS749 of %[1]s:399115; expected one ASN for an address", paths[0]))
		paths[0] = mendTable(t, paths[0])
	}

	// The least of three: what else the machine does only adds.
	var table *Table
	took, reference := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
	peak, retained := uint64(0), uint64(0)
	for range 3 {
		table = nil
		before := heap(true)
		stop := watchPeak()
		start := time.Now()
		var err error
		table, err = Load(paths...)
		took = min(took, time.Since(start))
		peak = max(peak, stop()-before)
		if err != nil {
			t.Fatal(err)
		}
		retained = heap(true) - before
		reference = min(reference, readAll(t, paths))
	}
	t.Logf("load %v, encoding/csv %v, heap retained %.1f MiB, at most %.1f MiB while loading", took, reference, float64(retained)/(1<<20), float64(peak)/(1<<20))
	if took.Seconds() > maxLoad*reference.Seconds() && !raceEnabled() {
		t.Errorf("load takes %v, encoding/csv %v", took, reference)
	}
	if retained > maxRetained {
		t.Errorf("table retains %d bytes, at most %d", retained, maxRetained)
	}

	v4, v6 := table.Len()
	if !published && (v4 > fullV4 || v6 > fullV6 || v4 < fullV4*9/10 || v6 < fullV6*9/10) ||
		published && (v4 != fullV4 || v6 != fullV6) {
		t.Errorf("table has %d and %d ranges, want %d and %d", v4, v6, fullV4, fullV6)
	}
	checkTable(t, table)
	named, names := len(table.names), uint64(0)
	if published {
		before := heap(true)
		table.names, table.text = nil, ""
		names = before - heap(true)
	}
	t.Logf("%d names take %.1f MiB", named, float64(names)/(1<<20))
	if published && (named != fullNames || names > maxNames) {
		t.Errorf("%d names, want %d; they retain %d bytes, at most %d", named, fullNames, names, maxNames)
	}
	for _, path := range paths {
		checkAgainstCSV(t, table, path)
	}

	for family, addrs := range lookupAddrs(table) {
		starts := segmentStarts(table, family)
		lookup, search := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
		for range 5 { // the least: what else the machine does only adds
			lookup = min(lookup, timeEach(addrs, func(a netip.Addr) { table.Lookup(a) }))
			search = min(search, timeEach(addrs, func(a netip.Addr) { _, _ = slices.BinarySearchFunc(starts, a, netip.Addr.Compare) }))
		}
		t.Logf("%s lookup %v, binary search %v", family, lookup, search)
		if lookup.Seconds() > maxLookup*search.Seconds() && !raceEnabled() {
			t.Errorf("%s lookup takes %v, a binary search %v", family, lookup, search)
		}
	}
}

// readAll returns how long encoding/csv takes to read the files.
func readAll(t *testing.T, paths []string) time.Duration {
	t.Helper()
	start := time.Now()
	for _, path := range paths {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		r := csv.NewReader(bufio.NewReader(f))
		r.ReuseRecord = true
		for err == nil {
			_, err = r.Read()
		}
		f.Close()
		if !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
	}
	return time.Since(start)
}

// segmentStarts returns the first addresses of a family's ranges, sorted.
func segmentStarts(table *Table, family string) []netip.Addr {
	var starts []netip.Addr
	for r := range table.All() {
		if r.First.Is4() == (family == "IPv4") {
			starts = append(starts, r.First)
		}
	}
	return starts
}

// timeEach returns what do takes for one of addrs.
func timeEach(addrs []netip.Addr, do func(netip.Addr)) time.Duration {
	start := time.Now()
	for _, a := range addrs {
		do(a)
	}
	return time.Since(start) / time.Duration(len(addrs))
}

// checkAgainstCSV looks up both ends of every range of a file, read by another
// parser.
func checkAgainstCSV(t *testing.T, table *Table, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r := csv.NewReader(bufio.NewReader(f))
	r.ReuseRecord = true
	for {
		row, err := r.Read()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		want, err := strconv.ParseUint(row[2], 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		for _, text := range row[:2] {
			if got := table.Lookup(netip.MustParseAddr(text)); uint64(got) != want {
				t.Fatalf("Lookup(%s) = %d, want %d of %s", text, got, want, path)
			}
		}
	}
}

// fullTable returns the files of the published table, or of a synthetic one.
func fullTable(tb testing.TB) (paths []string, published bool) {
	tb.Helper()
	if dir := os.Getenv("SHAPERD_ASN_DATA"); dir != "" {
		paths = []string{filepath.Join(dir, "asn-ipv4.csv"), filepath.Join(dir, "asn-ipv6.csv")}
		for _, path := range paths {
			if _, err := os.Stat(path); err != nil {
				tb.Fatalf("SHAPERD_ASN_DATA: %v; run testdata/fetch.sh %s", err, dir)
			}
		}
		return paths, true
	}

	const seed = 1 // one table for all runs, so that figures compare
	rnd := rand.New(rand.NewPCG(seed, 0))
	v4, v6 := new(strings.Builder), new(strings.Builder)
	for _, r := range randomRanges(rnd, fullV4, fullV6) {
		to := v4
		if r.First.Is6() {
			to = v6
		}
		fmt.Fprintf(to, "%s,%s,%d,\"Example %d, Inc.\"\n", r.First, r.Last, r.ASN, r.ASN)
	}
	return []string{
		writeFile(tb, "asn-ipv4.csv", []byte(v4.String())),
		writeFile(tb, "asn-ipv6.csv", []byte(v6.String())),
	}, false
}

// mendTable returns a copy of the published IPv4 table without its mistake.
func mendTable(tb testing.TB, path string) string {
	tb.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	if n := strings.Count(string(content), knownOverlap); n != 1 {
		tb.Fatalf("%s: %q is in it %d times, want once; fetch.sh names the version that this test knows", path, knownOverlap, n)
	}
	return writeFile(tb, "asn-ipv4.csv", []byte(strings.Replace(string(content), knownOverlap, mended, 1)))
}

// lookupAddrs draws many known addresses of each family, in random order.
func lookupAddrs(table *Table) map[string][]netip.Addr {
	const n = 1 << 18
	rnd := rand.New(rand.NewPCG(1, 0))
	var v4, v6 []netip.Addr
	for r := range table.All() {
		if r.First.Is4() {
			first, last := toAddr4(r.First), toAddr4(r.Last)
			v4 = append(v4, (first + addr4(rnd.Uint64N(uint64(last-first)+1))).addr())
		} else {
			first := toAddr6(r.First)
			v6 = append(v6, addr6{first.hi, first.lo | rnd.Uint64()&toAddr6(r.Last).lo}.addr())
		}
	}
	pick := func(from []netip.Addr) []netip.Addr {
		out := make([]netip.Addr, n)
		for i := range out {
			out[i] = from[rnd.IntN(len(from))]
		}
		return out
	}
	return map[string][]netip.Addr{"IPv4": pick(v4), "IPv6": pick(v6)}
}

// heap returns the bytes of live and dead objects, or of live ones alone.
func heap(collect bool) uint64 {
	if collect {
		runtime.GC()
	}
	s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// watchPeak returns a function that ends the watch and returns the most that the
// heap held, looked at every millisecond, garbage included.
func watchPeak() (stop func() uint64) {
	done, result := make(chan struct{}), make(chan uint64)
	go func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for peak := uint64(0); ; {
			peak = max(peak, heap(false))
			select {
			case <-done:
				result <- peak
				return
			case <-tick.C:
			}
		}
	}()
	return func() uint64 { close(done); return <-result }
}

// raceEnabled tells a build in which times mean nothing.
func raceEnabled() bool {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return false
	}
	for _, s := range info.Settings {
		if s.Key == "-race" {
			return s.Value == "true"
		}
	}
	return false
}

func BenchmarkLoad(b *testing.B) {
	paths, published := fullTable(b)
	if published {
		paths[0] = mendTable(b, paths[0])
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Load(paths...); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkLookup(b *testing.B) {
	paths, published := fullTable(b)
	if published {
		paths[0] = mendTable(b, paths[0])
	}
	table, err := Load(paths...)
	if err != nil {
		b.Fatal(err)
	}
	for family, addrs := range lookupAddrs(table) {
		b.Run(family, func(b *testing.B) {
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				table.Lookup(addrs[i%len(addrs)])
				i++
			}
		})
	}
}
