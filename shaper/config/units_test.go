package config

import (
	"fmt"
	"math"
	"math/big"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"shaperd.dev/shaperd/shaper"
)

func TestParseRate(t *testing.T) {
	for s, want := range map[string]uint64{
		"10Mbit/s": 10e6, "10Mbit": 10e6, "10mbit/s": 10e6, "10MBIT/s": 10e6, "10 Mbit/s": 10e6,
		"5MB/s": 40e6, "5MiB/s": 5 << 23, "5mB/s": 40e6, "5mib/s": 0, "5mb/s": 0,
		"800kbit": 800e3, "800Kbit/s": 800e3, "800Kibit/s": 800 << 10, "64KB/s": 512e3, "64KiB/s": 64 << 13,
		"1.5Mbit/s": 1500e3, "0.125kB/s": 1000, "1.0625B/s": 0, "1.5B/s": 12, "0.000001Mbit/s": 0, "0.000008Mbit/s": 8,
		"1B/s": 8, "8bit/s": 8, "7bit/s": 0, "0.9B/s": 0, "9bit/s": 9,
		"1Tbit/s": 1e12, "1000Gbit/s": 1e12, "0.125TB/s": 1e12, "1000000000001bit/s": 0, "1Tibit/s": 0, "1TB/s": 0,
		"0.9Tibit/s": 0, "0.5Tibit/s": 1 << 39, "010Mbit/s": 10e6,
		"": 0, " ": 0, "bit/s": 0, ".5Mbit/s": 0, "5.Mbit/s": 0, "1.2.3Mbit/s": 0, "1e6bit/s": 0, "1_000bit/s": 0,
		"+10Mbit/s": 0, "-10Mbit/s": 0, " 10Mbit/s": 0, "10Mbit/s ": 0, "10Mbit /s": 0, "10Mbit/": 0, "10Mbit/S": 10e6, "5MB/S": 40e6,
		"10  Mbit/s": 0, "10Mbits/s": 0, "10Mbit//s": 0, "10/s": 0, "10M/s": 0, "10Pbit/s": 0, "10Mbps": 0, "10MBps": 0,
		"10B": 0, "10b": 0, "١٠Mbit/s": 0, "0Mbit/s": 0, "0": 0, "0.0kB/s": 0, "\x00": 0, "10\x00": 0,
	} {
		got, err := ParseRate(s)
		if got != want || (err == nil) != (want > 0) {
			t.Errorf("ParseRate(%q) = %d, %v; want %d", s, got, err, want)
		}
	}
}

// TestParseRate_Ambiguous checks that the error suggests both readings, and that both parse.
func TestParseRate_Ambiguous(t *testing.T) {
	for s, want := range map[string][2]uint64{
		"10": {10, 80}, "10M": {10e6, 80e6}, "10k": {10e3, 80e3}, "10Ki": {10 << 10, 80 << 10},
		"10mbps": {10e6, 80e6}, "10bps": {10, 80}, "10kbps": {10e3, 80e3}, "10MBps": {10e6, 80e6}, "10Kibps": {10 << 10, 80 << 10},
		"10Mb/s": {10e6, 80e6}, "10mb": {10e6, 80e6}, "10b": {10, 80}, "1.5Mb/s": {1500e3, 12e6},
	} {
		_, err := ParseRate(s)
		var readings [2]uint64
		for i, quoted := range quotedAfter(err, "write ") {
			readings[i], _ = ParseRate(quoted)
		}
		if readings != want {
			t.Errorf("ParseRate(%q): %v; readings %d, want %d", s, err, readings, want)
		}
	}
	for s, want := range map[string][2]uint64{
		"64": {64, 64 << 10}, "64k": {64e3, 64 << 10}, "64K": {64e3, 64 << 10}, "64Ki": {64e3, 64 << 10},
		"64m": {64e6, 64 << 20}, "2Gb": {2e9, 2 << 30}, "64b": {64, 64 << 10}, "1.5M": {15e5, 3 << 19},
	} {
		_, err := ParseSize(s)
		var readings [2]uint64
		for i, quoted := range quotedAfter(err, "write ") {
			readings[i], _ = ParseSize(quoted)
		}
		if readings != want {
			t.Errorf("ParseSize(%q): %v; readings %d, want %d", s, err, readings, want)
		}
	}
}

// quotedAfter returns the two quoted strings after a word in an error.
func quotedAfter(err error, word string) [2]string {
	var a, b string
	if err != nil {
		_, offer, _ := strings.Cut(err.Error(), word)
		fmt.Sscanf(offer, "%q or %q", &a, &b)
	}
	return [2]string{a, b}
}

func TestParseSize(t *testing.T) {
	const bad = math.MaxUint64
	for s, want := range map[string]uint64{
		"0B": 0, "1B": 1, "64KiB": 65536, "64kB": 64000, "64KB": 64000, "1.5KiB": 1536, "0.5kB": 500, "1 MiB": 1 << 20,
		"1TB": 1e12, "1TiB": 1 << 40, "1000000TB": 1e18, "1000000.000001TB": bad, "0.3B": bad, "0.1KiB": bad,
		"64": bad, "64K": bad, "64b": bad, "64Kb": bad, "64bit": bad, "64KiB/s": bad, "0": bad, "-1B": bad, "": bad, "B": bad,
		"99999999999999999999999999999999999999TB": bad, "1" + strings.Repeat("0", 1000) + "B": bad,
	} {
		got, err := ParseSize(s)
		if err != nil {
			got = bad
		}
		if got != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", s, got, err, want)
		}
	}
}

func TestParseFrequency(t *testing.T) {
	for s, want := range map[string]shaper.Frequency{
		"2000pps": {N: 2000, Per: time.Second}, "50/s": {N: 50, Per: time.Second}, "5/min": {N: 5, Per: time.Minute},
		"2/h": {N: 2, Per: time.Hour}, "5 /min": {N: 5, Per: time.Minute}, "9 pps": {N: 9, Per: time.Second}, "1/h": {N: 1, Per: time.Hour}, "1000000000/s": {N: 1e9, Per: time.Second},
		"10/15min": {N: 10, Per: 15 * time.Minute}, "5/24h": {N: 5, Per: 24 * time.Hour}, "7 /30s": {N: 7, Per: 30 * time.Second}, "60/60s": {N: 60, Per: time.Minute},
		"1/8784h": {N: 1, Per: shaper.MaxPer}, "1/8785h": {}, "5/0s": {}, "5/99999999999999999999s": {}, "5/15": {}, "5/1.5h": {}, "5/15 min": {}, "5/1m": {}, "5/3pps": {}, "0/15min": {},
		"1000000001/s": {}, "99999999999999999999/s": {}, "0/s": {}, "00pps": {}, "0": {}, "50": {}, "": {}, "/s": {}, "pps": {},
		"-5/s": {}, "+5/s": {}, "0.5/s": {}, "5/m": {}, "5/d": {}, "5  /s": {}, "5kpps": {}, "5PPS": {}, "5/sec": {}, "5/s ": {},
	} {
		got, err := ParseFrequency(s)
		if got != want || (err == nil) != (want.N > 0) {
			t.Errorf("ParseFrequency(%q) = %v, %v; want %v", s, got, err, want)
		}
	}
}

func TestParseDuration(t *testing.T) {
	const bad = -1
	for s, want := range map[string]time.Duration{
		"200ms": 200 * time.Millisecond, "2s": 2 * time.Second, "1m30s": 90 * time.Second, "1.5h": 90 * time.Minute,
		"0s": 0, "1ns": 1, "1us": time.Microsecond, "1µs": time.Microsecond,
		"0": bad, "5": bad, "1.5": bad, "": bad, "s": bad, "-1s": bad, "+1s": bad, "1d": bad, "1 s": time.Second, "200 ms": 200 * time.Millisecond, "1  s": bad, " 1s": bad, "1m 30s": bad, "1 m 3s": bad, "1s ": bad, "1 ": bad, "1 +s": bad, "1S": bad,
		"9223372036854775808ns": bad, "3000000h": bad,
	} {
		got, err := ParseDuration(s)
		if err != nil {
			got = bad
		}
		if got != want {
			t.Errorf("ParseDuration(%q) = %v, %v; want %v", s, got, err, want)
		}
	}
}

func TestFormat(t *testing.T) {
	for _, test := range []struct{ got, want string }{
		{FormatRate(10e6), "10Mbit/s"},
		{FormatRateBytes(10e6), "1.25MB/s"},
		{FormatRate(8), "8bit/s"},
		{FormatRateBytes(8), "1B/s"},
		{FormatRateBytes(9), "1.125B/s"},
		{FormatRate(1e12), "1Tbit/s"},
		{FormatRateBytes(1e12), "125GB/s"},
		{FormatRate(999999999999), "999.999999999Gbit/s"},
		{FormatRate(1234567), "1.234567Mbit/s"},
		{FormatRate(1000001), "1.000001Mbit/s"},
		{FormatSize(0), "0B"},
		{FormatSize(1), "1B"},
		{FormatSize(65536), "64KiB"},
		{FormatSize(64000), "64kB"},
		{FormatSize(1536), "1.5KiB"},
		{FormatSize(1500), "1.5kB"},
		{FormatSize(5 << 20), "5MiB"},
		{FormatSize(1e18), "1000000TB"},
		{FormatFrequency(shaper.Frequency{N: 5, Per: time.Minute}), "5/min"},
		{FormatDuration(0), "0s"},
		{FormatDuration(time.Hour), "1h"},
		{FormatDuration(90 * time.Minute), "1h30m"},
		{FormatDuration(10 * time.Minute), "10m"},
		{FormatDuration(20 * time.Hour), "20h"},
		{FormatDuration(10 * time.Second), "10s"},
		{FormatDuration(time.Hour + 10*time.Second), "1h0m10s"},
		{FormatDuration(200 * time.Millisecond), "200ms"},
	} {
		if test.got != test.want {
			t.Errorf("got %s, want %s", test.got, test.want)
		}
	}
}

func TestFormat_RoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.Uint64Range(shaper.MinRate, shaper.MaxRate).Draw(t, "rate")
		for _, s := range []string{FormatRate(rate), FormatRateBytes(rate)} {
			if got, err := ParseRate(s); got != rate {
				t.Fatalf("%s of %d is read as %d, %v", s, rate, got, err)
			}
		}
		size := rapid.Uint64Range(0, maxSize).Draw(t, "size") << rapid.IntRange(0, 40).Draw(t, "shift") % (maxSize + 1)
		if got, err := ParseSize(FormatSize(size)); got != size || err != nil {
			t.Fatalf("%s of %d is read as %d, %v", FormatSize(size), size, got, err)
		}
		d := time.Duration(rapid.Int64Min(0).Draw(t, "duration"))
		d -= d % rapid.SampledFrom([]time.Duration{1, time.Millisecond, time.Second, time.Minute, time.Hour}).Draw(t, "unit")
		if got, err := ParseDuration(FormatDuration(d)); got != d || err != nil {
			t.Fatalf("%s of %d is read as %d, %v", FormatDuration(d), d, got, err)
		}
		f := shaper.Frequency{
			N:   rapid.Uint64Range(1, maxFrequency).Draw(t, "n"),
			Per: rapid.SampledFrom([]time.Duration{time.Second, time.Minute, time.Hour}).Draw(t, "per"),
		}
		if got, err := ParseFrequency(FormatFrequency(f)); got != f || err != nil {
			t.Fatalf("%s of %v is read as %v, %v", FormatFrequency(f), f, got, err)
		}
	})
}

// TestParseRate_Exact compares with rates computed as fractions.
func TestParseRate_Exact(t *testing.T) {
	units := map[string]*big.Rat{
		"bit/s": big.NewRat(1, 1), "kbit/s": big.NewRat(1e3, 1), "Mbit/s": big.NewRat(1e6, 1), "Gbit/s": big.NewRat(1e9, 1), "Tbit": big.NewRat(1e12, 1),
		"B/s": big.NewRat(8, 1), "kB/s": big.NewRat(8e3, 1), "MB/s": big.NewRat(8e6, 1), "GB/s": big.NewRat(8e9, 1),
		"KiB/s": big.NewRat(8<<10, 1), "MiB/s": big.NewRat(8<<20, 1), "GiB/s": big.NewRat(8<<30, 1), "Kibit/s": big.NewRat(1<<10, 1),
	}
	var names []string
	for name := range units {
		names = append(names, name)
	}
	accepted := 0
	rapid.Check(t, func(t *rapid.T) {
		number := rapid.StringMatching(`[0-9]{1,6}(\.[0-9]{1,4})?`).Draw(t, "number")
		unit := rapid.SampledFrom(names).Draw(t, "unit")
		r, _ := new(big.Rat).SetString(number)
		r.Mul(r, units[unit])
		valid := r.IsInt() && r.Cmp(big.NewRat(8, 1)) >= 0 && r.Cmp(big.NewRat(1e12, 1)) <= 0
		got, err := ParseRate(number + unit)
		if valid != (err == nil) || valid && got != r.Num().Uint64() {
			t.Fatalf("ParseRate(%q) = %d, %v; want %v", number+unit, got, err, r)
		}
		if valid {
			accepted++
		}
	})
	if accepted == 0 {
		t.Error("no rate was valid")
	}
}
