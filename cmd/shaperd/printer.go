package main

import (
	"fmt"
	"io"
	"math"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper/config"
)

// printer builds text output.
type printer struct {
	strings.Builder
	color bool
}

func (p *printer) line(format string, args ...any) { fmt.Fprintf(p, format+"\n", args...) }

// red colors problems, and nothing else.
func (p *printer) red(s string) string {
	if !p.color {
		return s
	}
	return "\x1b[31m" + s + "\x1b[0m"
}

// useColor reports whether output to w may be colored.
func useColor(w io.Writer) bool {
	return isTerminal(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

func isTerminal(w any) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// table is a table with a head.
type table struct {
	heads []string
	right []bool
	rows  [][]string
}

// newTable makes a table with these columns. Those with the prefix ">" are aligned to the right.
func newTable(heads ...string) *table {
	t := &table{right: make([]bool, len(heads))}
	for i, head := range heads {
		head, t.right[i] = strings.CutPrefix(head, ">")
		t.heads = append(t.heads, head)
	}
	return t
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

// lines returns the head, then the rows. Cells may be colored.
func (t *table) lines() []string {
	all := append([][]string{t.heads}, t.rows...)
	width := make([]int, len(t.heads))
	for _, row := range all {
		for i, cell := range row {
			width[i] = max(width[i], ansi.StringWidth(cell))
		}
	}
	var out []string
	for _, row := range all {
		var line strings.Builder
		for i, cell := range row {
			if i > 0 {
				line.WriteString("  ")
			}
			pad := strings.Repeat(" ", width[i]-ansi.StringWidth(cell))
			if t.right[i] {
				cell = pad + cell
			} else if i < len(row)-1 {
				cell += pad
			}
			line.WriteString(cell)
		}
		out = append(out, strings.TrimRight(line.String(), " "))
	}
	return out
}

// table prints t, if it has rows.
func (p *printer) table(t *table) {
	if len(t.rows) == 0 {
		return
	}
	for _, line := range t.lines() {
		p.line("%s", line)
	}
}

// round3 rounds v to three significant digits.
func round3(v float64) float64 {
	if v <= 0 || math.IsInf(v, 0) || math.IsNaN(v) {
		return 0
	}
	unit := math.Pow10(int(math.Floor(math.Log10(v))) - 2)
	if unit < 1 {
		return math.Round(v/unit) / math.Round(1/unit)
	}
	return math.Round(v/unit) * unit
}

// maxFigure bounds the figures that are formatted.
const maxFigure = 1e18

// rate formats bytes per second as bits, as configurations do.
func rate(v float64) string {
	bits := uint64(round3(math.Round(min(v, maxFigure) * 8)))
	if bits == 0 {
		return "0"
	}
	return config.FormatRate(bits)
}

// size formats a number of bytes, in powers of ten.
func size[N uint64 | float64](n N) string {
	if n < 1 {
		return "0"
	}
	return strings.TrimSuffix(config.FormatRateBytes(8*uint64(round3(min(float64(n), maxFigure)))), "/s")
}

// seconds formats a duration.
func seconds(v float64) string {
	if v <= 0 {
		return "0"
	}
	d := time.Duration(min(v, maxFigure/1e9) * 1e9)
	switch {
	case d >= time.Hour:
		d = d.Round(time.Minute)
	case d >= time.Minute:
		d = d.Round(time.Second)
	case d < time.Microsecond:
		d = time.Microsecond
	default:
		d = time.Duration(round3(float64(d)))
	}
	return config.FormatDuration(d)
}

// perSecond formats a number of events per second.
func perSecond(v float64) string {
	if v < 0.005 {
		return "0"
	}
	return number(v) + "/s"
}

func number(v float64) string { return strconv.FormatFloat(round3(v), 'f', -1, 64) }

// plural formats a number of things: "1 flow", "2 flows".
func plural(n int64, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprintf("%d %s", n, what)
}

func percent(v float64) string {
	if v > 0 && v < 0.01 {
		return "<1%"
	}
	return strconv.FormatFloat(math.Round(v*100), 'f', 0, 64) + "%"
}

// clockTime formats a point in time, with the date unless it is that of now.
func clockTime(t, now time.Time) string {
	t, now = t.Local(), now.Local()
	if t.Year() == now.Year() && t.YearDay() == now.YearDay() {
		return t.Format("15:04:05")
	}
	return t.Format("2006-01-02 15:04:05")
}

// untilText formats an end, or returns otherwise when t is nil.
func untilText(t *time.Time, now time.Time, otherwise string) string {
	if t == nil {
		return otherwise
	}
	return "until " + clockTime(*t, now)
}

// formatOverrides formats overrides: "burst=64KiB, rate=20Mbit/s".
func formatOverrides(set map[string]string) string {
	var all []string
	for _, key := range sortedKeys(set) {
		all = append(all, api.Printable(key+"="+set[key]))
	}
	return strings.Join(all, ", ")
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	sort.Strings(keys)
	return keys
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
