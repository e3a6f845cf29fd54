package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"
)

// bound is how many connections may come within d after the server was reached: the ramp, the first one, and checks.
func bound(d time.Duration) float64 {
	n, rate, seconds := 2.0, float64(ramp), d.Seconds()
	n += 5 * 1.12 * seconds // checks, whose intervals vary
	for ; seconds > 0; seconds -= 3 {
		n += rate * min(seconds, 3)
		rate *= 1.5
	}
	return n
}

// after returns the connections that came within d after each restart, as times since then. Those of the operator's
// pg_isready are among them.
func (o *outcome) after(d time.Duration) (all [][]time.Duration) {
	for _, at := range o.restarts {
		var list []time.Duration
		for _, a := range o.arrivals {
			if a >= at && a < at+d {
				list = append(list, a-at)
			}
		}
		all = append(all, list)
	}
	return all
}

// fastest returns the most connections that came within a second after a restart, and the excess over the ramp.
func (o *outcome) fastest() (perSecond int, excess float64) {
	excess = -1e9
	for _, list := range o.after(2500 * time.Millisecond) {
		first, _ := slices.BinarySearch(list, time.Second)
		perSecond = max(perSecond, first)
		for i, at := range list {
			excess = max(excess, float64(i+1)-bound(at))
		}
	}
	return perSecond, excess
}

func printTable(out io.Writer, list []*outcome) {
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "\tTRANSACTIONS\tREFUSED\tCUT OFF IN HANDSHAKE\tCUT OFF LATER\tOTHER\tCONNECTIONS IN THE FIRST SECOND\tBEYOND THE RAMP")
	for _, o := range list {
		most, excess := o.fastest()
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t%.1f\n", o.program.name, o.transactions, o.refused, o.cutBefore, o.cutLater, o.other, most, max(0, excess))
	}
	w.Flush()
	for _, o := range list {
		if o.sample != "" {
			fmt.Fprintf(out, "\nother at %s: %s", o.program.name, o.sample)
		}
	}
}

// check checks what shaperd promises.
func check(out io.Writer, list []*outcome) (failed error) {
	expect := func(ok bool, what string, args ...any) {
		verdict := "ok    "
		if !ok {
			verdict, failed = "FAILED", errors.New("a check has failed")
		}
		fmt.Fprintf(out, "%s  %s\n", verdict, fmt.Sprintf(what, args...))
	}
	fmt.Fprintln(out)
	for _, o := range list {
		if !o.program.ours {
			continue
		}
		_, excess := o.fastest()
		expect(o.refused+o.other == 0, "%s: no connect is refused, and none meets a server that is not ready", o.program.name)
		expect(excess <= 0, "%s: connections never come faster than the ramp", o.program.name)
		if o.program.announced {
			expect(o.cutBefore+o.cutLater == 0, "%s: no connection is cut off", o.program.name)
		}
	}
	return failed
}
