// Command bench runs shaperd and its peers on the same work, between network namespaces,
// and compares the results. It measures packet timestamps and counters at the
// downstream's interface, and the kernel's accounting of CPU time and memory, never
// statistics of the programs themselves.
//
// "make bench", run as root, builds and installs everything it needs.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

func main() {
	if err := command(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func command(args []string) error {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	short := flags.Bool("short", false, "run a small part of each work once, and check generous bounds")
	repeat := flags.Int("repeat", 3, "repeat each load `n` times")
	match := flags.String("work", ".", "run only the loads whose work and name match `regexp`, as in \"W1 .*4 conn\"")
	only := flags.String("programs", "", "run only these comma-separated `programs`")
	shaperd := flags.String("shaperd", "bin/shaperd", "`path` of the daemon")
	peers := flags.String("peers", "build/peers", "the `directory` of install-peers")
	asn := flags.String("asn", "build/asn", "the `directory` of the published table of autonomous systems")
	out := flags.String("out", "bench", "the `directory` for report.html and report.json")
	again := flags.String("again", "", "measure nothing: render the report.json of an earlier run in `file`")
	compare := flags.String("compare", "", "compare with the report.json of an earlier run in `file`")
	profiles := flags.String("profile", "", "profile the program of -programs (default shaperd) into `directory`, and print the top entries")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil
		}
		return err
	}
	pattern, err := regexp.Compile(*match)
	if err != nil {
		return fmt.Errorf("-work: %w", err)
	}
	var earlier *report
	if *compare != "" {
		if earlier, err = readReport(*compare); err != nil {
			return err
		}
	}
	if *again != "" {
		r, err := readReport(*again)
		if err != nil {
			return err
		}
		return r.publish(os.Stdout, *out, earlier)
	}
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root")
	}
	if err := lab.Sweep(); err != nil {
		return err
	}
	bins, err := findBinaries(*shaperd, *peers, *asn)
	if err != nil {
		return err
	}
	net, err := newNetwork()
	if err != nil {
		return err
	}
	defer net.Remove()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	b := &bench{net: net, bins: bins, short: *short, repeat: *repeat, match: pattern, log: os.Stdout, report: &report{
		Began: time.Now(), Short: *short, Command: "bench " + strings.Join(args, " "), Machine: readMachine(), Versions: bins.versions(),
	}}
	b.profiler = &profiler{dir: *profiles}
	if err := b.profiler.prepare(); err != nil {
		return err
	}
	if *profiles != "" && *only == "" {
		*only = subject
	}
	if *only != "" {
		b.only = strings.Split(*only, ",")
	}
	if *short || *profiles != "" {
		b.repeat = 1
	}
	failed := b.run(ctx, works)
	if len(b.report.Cells) == 0 {
		return failed
	}
	if *profiles != "" {
		b.profiler.print(os.Stdout, bins.shaperd)
		return failed
	}
	if err := b.report.publish(os.Stdout, *out, earlier); err != nil || failed != nil {
		return errors.Join(failed, err)
	}
	if *short {
		return b.report.checkBounds()
	}
	return nil
}
