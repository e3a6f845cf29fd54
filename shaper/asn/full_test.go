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

	"shaperd.dev/shaperd/shaper/segments"
)

// The size of the Internet's table, and the bounds of its cost.
const (
	fullV4, fullV6 = 411_961, 103_197
	fullNames      = 91_065

	maxLoad     = 10.0     // times the time that encoding/csv takes to read the files
	maxRetained = 64 << 20 // bytes of heap
	maxNames    = 8 << 20  // bytes of maxRetained for names, in the published table
	maxLookup   = 3.0      // times the time of a binary search in a sorted slice
)

// knownOverlap is the one error of the published table: 215.0.0.0/16 has two
// ASNs. fixedLine is the line that the lines around it suggest.
const (
	knownOverlap = "214.95.0.0,215.0.255.255,749,"
	fixedLine    = "214.95.0.0,214.255.255.255,749,"
)

// TestFullTable checks the bounds for a table of the size of the Internet's: the
// published one, in the directory SHAPERD_ASN_DATA that fetch.sh fills, or else a
// synthetic one.
func TestFullTable(t *testing.T) {
	paths, published := fullTable(t)
	if published {
		_, err := Load(paths...)
		checkError(t, err, fmt.Sprintf("%s:399116: 215.0.0.0-215.1.3.255 AS721 overlaps 214.95.0.0-215.0.255.255 AS749 of %[1]s:399115; an address must have one ASN", paths[0]))
		paths[0] = fixTable(t, paths[0])
	}

	// The minimum of three: other load on the machine only adds.
	var table *Table
	took, reference := time.Duration(math.MaxInt64), time.Duration(math.MaxInt64)
	peak, retained := uint64(0), uint64(0)
	for range 3 {
		table = nil //nolint:ineffassign // frees the table of the last run before the measurement
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

	v4, v6 := count(table)
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
		for range 5 { // the minimum: other load on the machine only adds
			lookup = min(lookup, timeEach(addrs, func(a netip.Addr) { table.Lookup(a) }))
			search = min(search, timeEach(addrs, func(a netip.Addr) { _, _ = slices.BinarySearchFunc(starts, a, netip.Addr.Compare) }))
		}
		t.Logf("%s lookup %v, binary search %v", family, lookup, search)
		if lookup.Seconds() > maxLookup*search.Seconds() && !raceEnabled() {
			t.Errorf("%s lookup takes %v, a binary search %v", family, lookup, search)
		}
	}
}

// readAll returns the time that encoding/csv takes to read the files.
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

// timeEach returns the mean time of do for one of addrs.
func timeEach(addrs []netip.Addr, do func(netip.Addr)) time.Duration {
	start := time.Now()
	for _, a := range addrs {
		do(a)
	}
	return time.Since(start) / time.Duration(len(addrs))
}

// checkAgainstCSV looks up both ends of every range of a file, read with a different
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

// fixTable returns a copy of the published IPv4 table without its error.
func fixTable(tb testing.TB, path string) string {
	tb.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		tb.Fatal(err)
	}
	if n := strings.Count(string(content), knownOverlap); n != 1 {
		tb.Fatalf("%s: contains %q %d times, want once; fetch.sh has the version that this test expects", path, knownOverlap, n)
	}
	return writeFile(tb, "asn-ipv4.csv", []byte(strings.Replace(string(content), knownOverlap, fixedLine, 1)))
}

// lookupAddrs draws many known addresses of each family, in random order.
func lookupAddrs(table *Table) map[string][]netip.Addr {
	const n = 1 << 18
	rnd := rand.New(rand.NewPCG(1, 0))
	var v4, v6 []netip.Addr
	for r := range table.All() {
		if r.First.Is4() {
			first, last := segments.ToAddr4(r.First), segments.ToAddr4(r.Last)
			v4 = append(v4, (first + segments.Addr4(rnd.Uint64N(uint64(last-first)+1))).Addr())
		} else {
			first := segments.ToAddr6(r.First)
			v6 = append(v6, segments.Addr6{Hi: first.Hi, Lo: first.Lo | rnd.Uint64()&segments.ToAddr6(r.Last).Lo}.Addr())
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

// heap returns the bytes of live and dead objects, or with collect of live ones only.
func heap(collect bool) uint64 {
	if collect {
		runtime.GC()
	}
	s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(s)
	return s[0].Value.Uint64()
}

// watchPeak samples the heap every millisecond, garbage included. The returned function
// stops it and returns the peak.
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

// raceEnabled reports whether the race detector is on, which makes times meaningless.
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
		paths[0] = fixTable(b, paths[0])
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
		paths[0] = fixTable(b, paths[0])
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
