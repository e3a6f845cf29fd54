package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"shaperd.dev/shaperd/test/lab/plot"
)

// An outcome is what arrived from one program, and its figures by phase.
type outcome struct {
	*program
	phases  []phase
	flow    flow
	figures []figures
}

// worst returns the largest excess of all phases, in bytes.
func (o outcome) worst() (worst float64) {
	for _, f := range o.figures {
		worst = max(worst, f.excess)
	}
	return worst
}

// printTable prints a row per program and phase.
func printTable(out io.Writer, list []outcome) {
	const format = "%-8s %-18s %9s %12s %8s   %s\n"
	fmt.Fprintf(out, "%27s %22s %8s   %s\n", "", "most beyond the rate", "use of", "hot spot followed:")
	fmt.Fprintf(out, format, "", "", "as time", "as bytes", "the rate", "median, how often")
	for _, o := range list {
		name := o.name
		for i, f := range o.figures {
			fmt.Fprintf(out, format, name, o.phases[i].name, milliseconds(f.excessTime()), plot.Grouped(int(f.excess)),
				fmt.Sprintf("%.0f %%", 100*f.use), followText(f))
			name = ""
		}
	}
}

func followText(f figures) string {
	n, median := f.followed()
	text := milliseconds(median)
	if median == never {
		text = "never"
	}
	return fmt.Sprintf("%7s, %d of %d", text, n, len(f.follows))
}

func milliseconds(d time.Duration) string {
	return plot.Grouped(int(d.Round(time.Millisecond).Milliseconds())) + " ms"
}

// What is expected of shaperd, also on a busy machine.
const (
	mostExcess  = 20 * time.Millisecond // of the rate; its own bound is a third of that
	leastUse    = 0.9                   // undisturbed
	longestMove = 500 * time.Millisecond
)

// check prints what is expected of shaperd and whether it is so, and returns an error if not.
func check(out io.Writer, o outcome) error {
	var failed []string
	expect := func(ok bool, format string, args ...any) {
		text, mark := fmt.Sprintf(format, args...), "pass"
		if !ok {
			mark = "FAIL"
			failed = append(failed, text)
		}
		fmt.Fprintf(out, "%s  %s\n", mark, text)
	}
	for i, f := range o.figures {
		expect(f.excessTime() <= mostExcess, "%s: never more than the rate: at most %s beyond it", o.phases[i].name, milliseconds(f.excessTime()))
	}
	calm := o.figures[0]
	expect(calm.use >= leastUse, "%s: the rate is used: %.0f %% of it", o.phases[0].name, 100*calm.use)
	_, median := calm.followed()
	expect(median <= longestMove, "%s: the hot spot is followed: in %s", o.phases[0].name, milliseconds(median))
	if len(failed) > 0 {
		return errors.New("check failed: " + strings.Join(failed, "; "))
	}
	return nil
}
