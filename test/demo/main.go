// Command demo shows what shaperd is for. It creates three hosts in network namespaces: a
// client host with three sources, a shaper, and a downstream that really fails under
// load. It runs the same work twice, once directly and once through the daemon. It prints
// a table of both, draws the arrivals at the downstream, and fails when a check of the
// daemon fails.
//
// It needs root, and leaves nothing behind except the report.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

func main() { lab.Main("demo", run) }

func run(ctx context.Context, out io.Writer, args []string) error {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	binary := flags.String("bin", filepath.Join("bin", "shaperd"), "`path` of the daemon")
	report := flags.String("out", filepath.Join("demo", "report.html"), "`path` of the report; arrivals.svg is written to the same directory")
	length := flags.Duration("length", 13*time.Second, "duration of each of the two runs")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 || *length < 3*time.Second {
		return errors.New("usage: demo takes no arguments, and -length must be at least 3s")
	}
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root: run as root or with sudo")
	}
	path, err := filepath.Abs(*binary)
	if err != nil {
		return err
	}
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("no daemon at %s: run \"make build\" first", *binary)
	}
	if err := lab.Sweep(); err != nil {
		return err
	}

	t := newTerminal(out)
	t.printIntro()
	phases := [2]*phase{newPhase("Direct", false, *length), newPhase("Through shaperd", true, *length)}
	for i, p := range phases {
		watch := func(ctx context.Context) { t.watch(ctx, p, i+1, len(phases)) }
		if err := p.run(ctx, path, watch); err != nil {
			return err
		}
	}
	before, after := measure(phases[0]), measure(phases[1])
	results := checks(after)
	t.printTable(rows(before, after))
	t.printChecks(results)
	if err := writeReport(*report, before, after, results); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nReport: %s, %s\n", *report, arrivalsPath(*report))
	return failedChecks(results)
}
