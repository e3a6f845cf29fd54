package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// write writes the report into a folder, as JSON and as a page.
func (r *report) write(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	text, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "report.json"), append(text, '\n'), 0o644)
}

func readReport(path string) (*report, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r := &report{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("%s is no report of this harness: %w", path, err)
	}
	return r, nil
}

// writeCell prints a cell as a table: a row for each program, medians, and in brackets
// how many times better shaperd is.
func writeCell(w io.Writer, c *cell) {
	fmt.Fprintf(w, "\n%s  %s\n", c.Work, c.Name)
	var keys []string
	for _, key := range c.Figures {
		for _, o := range c.Outcomes {
			if _, ok := o.Figures[key]; ok {
				keys = append(keys, key)
				break
			}
		}
	}
	rows := [][]string{{""}}
	units := []string{""}
	for _, key := range keys {
		f := figureOf(key)
		rows[0] = append(rows[0], f.title)
		units = append(units, f.unit)
	}
	rows = append(rows, units)
	ours := c.outcome(subject)
	for _, o := range c.Outcomes {
		row := []string{o.Program}
		for _, key := range keys {
			st, ok := o.Figures[key]
			if !ok {
				row = append(row, "")
				continue
			}
			cell := figureOf(key).format(st.median())
			if ours != nil && o != ours {
				if r, ok := c.compare(key, ours, o); ok {
					cell += " (" + r.String() + ")"
				}
			}
			row = append(row, cell)
		}
		if o.Cannot != "" {
			row = []string{o.Program, o.Cannot}
		}
		rows = append(rows, row)
	}
	widths := make([]int, len(keys)+1)
	for _, row := range rows {
		for i, cell := range row {
			if len(row) == len(widths) {
				widths[i] = max(widths[i], len(cell))
			}
		}
	}
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			if i == 0 {
				fmt.Fprintf(&line, "  %-*s", max(widths[0], 9), cell)
			} else {
				fmt.Fprintf(&line, "  %*s", widths[i], cell)
			}
		}
		fmt.Fprintln(w, strings.TrimRight(line.String(), " "))
	}
}

// String is the ratio, with a ~ when repetitions differ much.
func (r ratio) String() string {
	text := strconv.FormatFloat(r.value, 'f', 2, 64)
	if r.value >= 10 {
		text = strconv.FormatFloat(r.value, 'f', 0, 64)
	}
	if r.noisy() {
		return "~" + text
	}
	return text
}

func (f figure) format(x float64) string {
	if f.digits < 0 {
		return grouped(int(x + 0.5))
	}
	return strconv.FormatFloat(x, 'f', f.digits, 64)
}

// grouped writes n with a comma between thousands.
func grouped(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func writeComparison(io.Writer, *report, *report) {}

func (r *report) bounds() error { return nil }
