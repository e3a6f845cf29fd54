package config

import (
	"fmt"
	"math/big"
	"strconv"
	"strings"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// scale is a prefix of a unit.
type scale struct {
	prefix string
	factor uint64
}

// Scales of SI and of IEC, in descending order.
var (
	decimal = []scale{{"T", 1e12}, {"G", 1e9}, {"M", 1e6}, {"k", 1e3}, {"", 1}}
	binary  = []scale{{"Ti", 1 << 40}, {"Gi", 1 << 30}, {"Mi", 1 << 20}, {"Ki", 1 << 10}}
)

// quantityParts is a quantity split into number and unit: "1.5Mbit/s" is 1.5, "M", "bit", "/s".
type quantityParts struct {
	number string
	scale  scale
	base   string
	per    string
}

// splitQuantity splits a quantity. The case of a prefix is ignored, as no unit here is
// milli. The rest keeps its case, because b and B differ.
func splitQuantity(s string) (quantityParts, error) {
	unit := strings.TrimLeft(s, "0123456789.")
	p := quantityParts{number: s[:len(s)-len(unit)]}
	whole, fraction, point := strings.Cut(p.number, ".")
	switch {
	case strings.HasPrefix(s, "-"):
		return p, fmt.Errorf("%s is negative", quote(s))
	case strings.HasPrefix(s, "$"):
		return p, fmt.Errorf("%s does not start with a number: variables are not expanded", quote(s))
	case whole == "" || point && (fraction == "" || strings.Contains(fraction, ".")):
		return p, fmt.Errorf("%s does not start with a number", quote(s))
	case len(p.number) > 40:
		return p, fmt.Errorf("%s has too many digits", quote(s))
	}
	p.base = strings.TrimPrefix(unit, " ")
	if strings.ContainsAny(unit, "0123456789") {
		return p, fmt.Errorf("%s is not a decimal number with a unit", quote(s))
	}
	if slash := strings.IndexByte(p.base, '/'); slash >= 0 {
		p.base, p.per = p.base[:slash], p.base[slash:]
	}
	for _, scales := range [][]scale{binary, decimal} {
		for _, p.scale = range scales {
			n := len(p.scale.prefix)
			if len(p.base) >= n && strings.EqualFold(p.base[:n], p.scale.prefix) {
				p.base = p.base[n:]
				return p, nil
			}
		}
	}
	panic("unreachable: the last prefix is empty")
}

// withUnit formats the quantity with another unit after its prefix.
func (p quantityParts) withUnit(unit string) string { return p.number + p.scale.prefix + unit }

func (p quantityParts) zero() bool { return strings.Trim(p.number, "0.") == "" }

// errZero returns the error for zero, which is not "unlimited".
func errZero(s string) error {
	return fmt.Errorf("%s would stop all traffic; for no limit, remove the key, or set observe = true", quote(s))
}

// times returns number * scale * factor, and whether it is an integer.
func (p quantityParts) times(factor uint64) (*big.Int, bool) {
	r, _ := new(big.Rat).SetString(p.number)
	n := new(big.Int).SetUint64(p.scale.factor)
	n.Mul(n, new(big.Int).SetUint64(factor))
	r.Mul(r, new(big.Rat).SetInt(n))
	return r.Num(), r.IsInt()
}

// ParseRate parses a rate in bits, "10Mbit/s" or "10Mbit", or in bytes, "5MB/s"
// or "5MiB/s", and returns bit/s, from 8 to 1e12. The case of "bit" and of the
// prefix is ignored; a lone b is an error, as is every other spelling that some
// read as bits and some as bytes.
func ParseRate(s string) (uint64, error) {
	p, err := splitQuantity(s)
	if err != nil {
		return 0, err
	}
	readings := fmt.Sprintf("write %q or %q", p.withUnit("bit/s"), p.withUnit("B/s"))
	factor := uint64(1)
	switch {
	case p.zero():
		return 0, errZero(s)
	case p.base == "":
		return 0, fmt.Errorf("%s says neither bits nor bytes: %s", quote(s), readings)
	case p.base == "pps":
		return 0, fmt.Errorf("%s counts packets: that is the key packets", quote(s))
	case strings.EqualFold(p.base, "bps"):
		return 0, fmt.Errorf("%s is in bytes to tc and in bits to most people: %s", quote(s), readings)
	case p.base == "b":
		return 0, fmt.Errorf("%s may be in bits or in bytes: %s", quote(s), readings)
	case p.base == "B" && p.per == "":
		return 0, fmt.Errorf("%s is a size, not a rate: write %q", quote(s), p.withUnit("B/s"))
	case p.base == "B" && strings.EqualFold(p.per, "/s"):
		factor = 8
	case !strings.EqualFold(p.base, "bit") || p.per != "" && !strings.EqualFold(p.per, "/s"):
		return 0, fmt.Errorf("%s has an unknown unit: write a rate such as \"10Mbit/s\" or \"5MB/s\"", quote(s))
	}
	n, exact := p.times(factor)
	switch {
	case exact && n.Cmp(big.NewInt(shaper.MaxRate)) > 0:
		return 0, fmt.Errorf("%s is above 1Tbit/s", quote(s))
	case !exact:
		return 0, fmt.Errorf("%s is not a whole number of bits a second", quote(s))
	case n.Cmp(big.NewInt(shaper.MinRate)) < 0:
		return 0, fmt.Errorf("%s is below 1B/s", quote(s))
	}
	return n.Uint64(), nil
}

// FormatRate formats a rate in bits: "10Mbit/s". It is the inverse of ParseRate.
func FormatRate(bits uint64) string { return formatScaled(bits, 1, decimal) + "bit/s" }

// FormatRateBytes formats a rate in bytes: "1.25MB/s" for 10 Mbit/s. ParseRate
// parses it.
func FormatRateBytes(bits uint64) string { return formatScaled(bits, 8, decimal) + "B/s" }

// ParseSize parses a size in bytes, "64kB" or "64KiB", at most 1EB.
func ParseSize(s string) (uint64, error) {
	p, err := splitQuantity(s)
	if err != nil {
		return 0, err
	}
	switch {
	case p.per != "":
		return 0, fmt.Errorf("%s is a rate, not a size: write a size such as \"64KiB\"", quote(s))
	case p.base == "" && p.scale.prefix == "":
		return 0, fmt.Errorf("%s has no unit: write %q or %q", quote(s), p.withUnit("B"), p.withUnit("KiB"))
	case p.base == "b" && p.scale.prefix == "":
		return 0, fmt.Errorf("%s may be in bits or in bytes: write %q or %q", quote(s), p.withUnit("B"), p.withUnit("KiB"))
	case p.base == "" || p.base == "b":
		letter := p.scale.prefix[:1]
		si, iec := strings.Replace(letter, "K", "k", 1), strings.ToUpper(letter)+"i"
		return 0, fmt.Errorf("%s is ambiguous: write %q or %q", quote(s), p.number+si+"B", p.number+iec+"B")
	case p.base != "B":
		return 0, fmt.Errorf("%s has an unknown unit: write a size in bytes such as \"64KiB\" or \"64kB\"", quote(s))
	}
	n, exact := p.times(1)
	if !exact {
		return 0, fmt.Errorf("%s is not a whole number of bytes", quote(s))
	}
	if n.Cmp(big.NewInt(maxSize)) > 0 {
		return 0, fmt.Errorf("%s is above 1EB", quote(s))
	}
	return n.Uint64(), nil
}

const maxSize = 1e18

// FormatSize formats a size, "64KiB" or "1.5kB", whichever is shorter. It is the
// inverse of ParseSize.
func FormatSize(bytes uint64) string {
	si := formatScaled(bytes, 1, decimal)
	if bytes < binary[len(binary)-1].factor {
		return si + "B"
	}
	if iec := formatScaled(bytes, 1, binary); len(iec) <= len(si)+1 {
		return iec + "B"
	}
	return si + "B"
}

// formatScaled formats n/parts exactly, in the largest scale in which it is at least 1.
func formatScaled(n, parts uint64, scales []scale) string {
	i := 0
	for i < len(scales)-1 && n < scales[i].factor*parts {
		i++
	}
	unit := scales[i].factor * parts
	digits := strconv.FormatUint(n/unit, 10)
	if rest := n % unit; rest > 0 {
		digits += "."
		for ; rest > 0; rest %= unit {
			rest *= 10
			digits += strconv.FormatUint(rest/unit, 10)
		}
	}
	return digits + scales[i].prefix
}

// periods are the units of frequencies.
var periods = map[string]time.Duration{"pps": time.Second, "/s": time.Second, "/min": time.Minute, "/h": time.Hour}

const maxFrequency = 1e9

// ParseFrequency parses a rate of events: "2000pps", "50/s", "5/min", "2/h" or "10/15min"; an
// integer from 1 to 1e9, and a period of up to [shaper.MaxPer].
func ParseFrequency(s string) (shaper.Frequency, error) {
	unit := strings.TrimLeft(s, "0123456789")
	number := s[:len(s)-len(unit)]
	unit = strings.TrimPrefix(unit, " ")
	times := ""
	if of, ok := strings.CutPrefix(unit, "/"); ok {
		name := strings.TrimLeft(of, "0123456789")
		times, unit = of[:len(of)-len(name)], "/"+name
	}
	per, ok := periods[unit]
	switch {
	case strings.HasPrefix(s, "-"):
		return shaper.Frequency{}, fmt.Errorf("%s is negative", quote(s))
	case number != "" && strings.Trim(number, "0") == "" && (ok || unit == ""):
		return shaper.Frequency{}, errZero(s)
	case number != "" && unit == "":
		return shaper.Frequency{}, fmt.Errorf("%s has no unit: write %q or %q", quote(s), number+"/s", number+"/min")
	case strings.HasPrefix(unit, "."):
		return shaper.Frequency{}, fmt.Errorf("%s is not a whole number: count over a minute or an hour, such as \"30/min\"", quote(s))
	case number != "" && unit == "/m":
		return shaper.Frequency{}, fmt.Errorf("%s: minutes are min: write %q", quote(s), s+"in")
	case number == "" || !ok:
		return shaper.Frequency{}, fmt.Errorf("%s is not a whole number a second, minute or hour, such as \"50/s\", \"5/min\" or \"10/15min\"", quote(s))
	}
	if times != "" {
		n, err := strconv.ParseUint(times, 10, 32)
		if err != nil || n == 0 || time.Duration(n) > shaper.MaxPer/per {
			return shaper.Frequency{}, fmt.Errorf("%s: the period must be from 1s to %s", quote(s), FormatDuration(shaper.MaxPer))
		}
		per *= time.Duration(n)
	}
	n, err := strconv.ParseUint(number, 10, 64)
	if err != nil || n > maxFrequency {
		return shaper.Frequency{}, fmt.Errorf("%s is above 1000000000", quote(s))
	}
	return shaper.Frequency{N: n, Per: per}, nil
}

// FormatFrequency is the inverse of ParseFrequency, for periods of whole seconds.
func FormatFrequency(f shaper.Frequency) string {
	unit, per := "s", time.Second
	switch {
	case f.Per == 0:
	case f.Per%time.Hour == 0:
		unit, per = "h", time.Hour
	case f.Per%time.Minute == 0:
		unit, per = "min", time.Minute
	}
	times := ""
	if n := f.Per / per; n > 1 {
		times = strconv.FormatInt(int64(n), 10)
	}
	return strconv.FormatUint(f.N, 10) + "/" + times + unit
}

// ParseDuration parses a time as [time.ParseDuration] does, but requires a unit even
// for 0 and refuses a sign. A space may precede a single unit, as in "200 ms".
func ParseDuration(s string) (time.Duration, error) {
	text := s
	if number, unit, ok := strings.Cut(s, " "); ok && strings.Trim(number, "0123456789.") == "" && strings.Trim(unit, "0123456789. ") == unit {
		text = number + unit
	}
	d, err := time.ParseDuration(text)
	switch {
	case strings.HasPrefix(s, "-"):
		return 0, fmt.Errorf("%s is negative", quote(s))
	case s != "" && strings.Trim(s, "0123456789.") == "":
		return 0, fmt.Errorf("%s has no unit: write %q or %q", quote(s), s+"ms", s+"s")
	case err != nil || strings.HasPrefix(s, "+"):
		return 0, fmt.Errorf("%s is not a time such as \"200ms\", \"2s\" or \"1m30s\"", quote(s))
	}
	return d, nil
}

// FormatDuration is the inverse of ParseDuration. It formats as [time.Duration.String]
// does, but without trailing zeros: "1h", not "1h0m0s".
func FormatDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
