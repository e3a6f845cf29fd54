package main

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"
)

// promised is the part of the goodput of the best fixed cap that shaperd is checked to reach.
const promised = 0.9

func printTable(out io.Writer, list []*outcome) {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintf(w, "\tIN %v, A SECOND\tOF THE BEST CAP\tP50\tP99\tFAILED\n", inTime)
	for _, o := range list {
		fmt.Fprintf(w, "%s\t%.0f\t%.0f %%\t%v\t%v\t%d\n", o.program.name, o.good(), 100*o.good()/list[0].good(), o.percentile(50).Round(time.Millisecond), o.percentile(99).Round(time.Millisecond), o.failed)
	}
	w.Flush()
	for _, o := range list {
		if o.sample != nil {
			fmt.Fprintf(out, "failed at %s: %v\n", o.program.name, o.sample)
		}
	}
}

// check checks what shaperd promises. The best fixed cap is the first.
func check(out io.Writer, list []*outcome) (err error) {
	for _, o := range list {
		if !o.program.adapts {
			continue
		}
		verdict := "ok    "
		if o.good() < promised*list[0].good() {
			verdict, err = "FAILED", errCheck
		}
		fmt.Fprintf(out, "%s  %s: %.0f %% and more of what the best fixed cap gets\n", verdict, o.program.name, 100*promised)
	}
	return err
}
