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
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

func main() { lab.Main("demo", run) }

func run(ctx context.Context, out io.Writer, args []string) error {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	binary := flags.String("bin", filepath.Join("bin", "shaperd"), "`path` of the daemon")
	report := flags.String("out", filepath.Join("demo", "report.html"), "`path` of the report; arrivals.svg is written to the same directory")
	length := flags.Duration("length", 13*time.Second, "duration of each of the two runs")
	during := flags.String("during", "", "shell `command` to run next to the load through the daemon, such as \"shaperd top\"; it gets SIGTERM at the end")
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
		var failed error // of the command
		watch := func(ctx context.Context, d *lab.Daemon) {
			var command sync.WaitGroup
			if d != nil && *during != "" {
				command.Go(func() { failed = runCommand(ctx, *during, d.Control) })
			}
			t.watch(ctx, p, i+1, len(phases))
			command.Wait()
		}
		if err := errors.Join(p.run(ctx, path, watch), failed); err != nil {
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

// runCommand runs a command, with the daemon's control socket in its environment, until it ends
// or ctx does. What the command writes is part of an error only.
func runCommand(ctx context.Context, command, control string) error {
	cmd := exec.CommandContext(ctx, "sh", "-c", "exec "+command)
	cmd.Env = append(os.Environ(), "SHAPERD_CONTROL="+control)
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	if out, err := cmd.CombinedOutput(); err != nil && ctx.Err() == nil {
		return fmt.Errorf("%s: %w\n%s", command, err, out)
	}
	return nil
}
