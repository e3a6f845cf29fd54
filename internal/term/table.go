package term

import (
	"strings"

	"github.com/charmbracelet/x/ansi"
)

// Table is a table with a head.
type Table struct {
	Rows  [][]string
	heads []string
	right []bool // columns aligned to the right
}

// NewTable returns a table with these columns. Those with the prefix ">" are aligned to the right.
func NewTable(heads ...string) *Table {
	t := &Table{right: make([]bool, len(heads))}
	for i, head := range heads {
		head, t.right[i] = strings.CutPrefix(head, ">")
		t.heads = append(t.heads, head)
	}
	return t
}

// Add appends a row. Its cells may be colored.
func (t *Table) Add(cells ...string) { t.Rows = append(t.Rows, cells) }

// Lines returns the head, then the rows.
func (t *Table) Lines() []string {
	all := append([][]string{t.heads}, t.Rows...)
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
