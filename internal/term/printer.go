// Package term formats what the command line prints: lines and tables, with color where the
// terminal has it, and figures in human units. It writes nothing by itself, and one goroutine
// uses a [Printer].
package term

import (
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Printer builds text output.
type Printer struct {
	strings.Builder
	Color bool // whether to color problems
}

// Line adds a formatted line.
func (p *Printer) Line(format string, args ...any) { fmt.Fprintf(p, format+"\n", args...) }

// Red colors s if p colors. It is for problems, and nothing else.
func (p *Printer) Red(s string) string { return p.paint("31", s) }

// Yellow colors s if p colors. It is for what may become a problem.
func (p *Printer) Yellow(s string) string { return p.paint("33", s) }

func (p *Printer) paint(color, s string) string {
	if !p.Color {
		return s
	}
	return "\x1b[" + color + "m" + s + "\x1b[0m"
}

// UseColor reports whether output to w may be colored.
func UseColor(w io.Writer) bool {
	return IsTerminal(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// IsTerminal reports whether w is a terminal.
func IsTerminal(w any) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// Table adds t, if it has rows.
func (p *Printer) Table(t *Table) {
	if len(t.Rows) == 0 {
		return
	}
	for _, line := range t.Lines() {
		p.Line("%s", line)
	}
}

// Section adds an empty line and t, if it has rows.
func (p *Printer) Section(t *Table) {
	if len(t.Rows) > 0 {
		p.Line("")
		p.Table(t)
	}
}
