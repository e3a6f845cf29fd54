package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/sys/unix"
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

// section prints t after an empty line, if it has rows.
func (p *printer) section(t *table) {
	if len(t.rows) > 0 {
		p.line("")
		p.table(t)
	}
}
