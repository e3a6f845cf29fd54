package shaper_test

import (
	"fmt"
	"testing"

	"shaperd.dev/shaperd/shaper"
)

func TestParsePrefix(t *testing.T) {
	const neither = `is not an address, or a prefix such as "192.0.2.0/24" or "2001:db8::/32"`
	for s, want := range map[string]string{
		"10.0.0.0/8":           "10.0.0.0/8",
		"0.0.0.0/0":            "0.0.0.0/0",
		"2001:db8::/32":        "2001:db8::/32",
		"10.0.0.5":             "10.0.0.5/32",
		"2001:db8::7":          "2001:db8::7/128",
		"fe80::1":              "fe80::1/128",
		"::ffff:192.0.2.1":     "192.0.2.1/32",
		"10.0.0.5/8":           `has host bits set: write "10.0.0.0/8"`,
		"2001:db8::7/32":       `has host bits set: write "2001:db8::/32"`,
		"::ffff:10.0.0.5/104":  `has host bits set: write "10.0.0.0/8"`,
		"::ffff:0:0/90":        `has host bits set: write "::ffc0:0:0/90"`,
		"::ffff:192.0.2.0/120": "192.0.2.0/24",
		"::ffff:192.0.2.1/128": "192.0.2.1/32",
		"fe80::1%eth0":         "has an unsupported IPv6 zone",
		"fe80::%eth0/64":       "has an unsupported IPv6 zone",
		"10.0.0.0/33":          neither,
		"10.0.0":               neither,
		"here":                 neither,
		"":                     neither,
	} {
		got := ""
		if p, err := shaper.ParsePrefix(s); err != nil {
			got = err.Error()
		} else {
			got = fmt.Sprint(p)
		}
		if got != want {
			t.Errorf("%q: %s, want %s", s, got, want)
		}
	}
}
