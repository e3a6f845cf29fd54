package lab

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Metrics are metric values by series: the name with its labels, as written.
type Metrics map[string]float64

// ParseMetrics parses the text of a scrape.
func ParseMetrics(text string) (Metrics, error) {
	m := Metrics{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		cut := strings.LastIndexByte(line, ' ')
		if cut < 0 {
			return nil, fmt.Errorf("no value in %q", line)
		}
		v, err := strconv.ParseFloat(line[cut+1:], 64)
		if err != nil {
			return nil, fmt.Errorf("value in %q: %w", line, err)
		}
		m[line[:cut]] = v
	}
	return m, nil
}

// Sum adds the values of all metrics whose name contains name and that have all the
// labels, each written name="value".
func (m Metrics) Sum(name string, labels ...string) (total float64) {
	for series, v := range m {
		metric, rest, _ := strings.Cut(series, "{")
		if strings.HasSuffix(metric, "_bucket") || !strings.Contains(metric, name) {
			continue
		}
		if !slices.ContainsFunc(labels, func(l string) bool { return !strings.Contains(rest, l) }) {
			total += v
		}
	}
	return total
}

// String lists the daemon's own metrics, without those of its runtime.
func (m Metrics) String() string {
	var lines []string
	for series, v := range m {
		if strings.HasPrefix(series, "shaperd") && !strings.Contains(series, "_bucket{") {
			lines = append(lines, fmt.Sprintf("%s %v", series, v))
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
