package cli

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"shaperd.dev/shaperd/api"
)

// formatOverrides formats overrides: "burst=64KiB, rate=20Mbit/s".
func formatOverrides(set map[string]string) string {
	var all []string
	for _, key := range slices.Sorted(maps.Keys(set)) {
		all = append(all, api.Printable(key+"="+set[key]))
	}
	return strings.Join(all, ", ")
}

// asnLabel formats an autonomous system: "AS64500 Example Ltd".
func asnLabel(asn uint32, name string) string {
	if asn == 0 {
		return ""
	}
	return strings.TrimSpace(fmt.Sprintf("AS%d %s", asn, api.Printable(name)))
}

// estimate formats an estimated value, with "<=" when it may be more than 10% too large.
func estimate(h api.Estimate, write func(float64) string) string {
	s := write(h.Value)
	if h.Error > h.Value/10 && s != "0" {
		return "<=" + s
	}
	return s
}
