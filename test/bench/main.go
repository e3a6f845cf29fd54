// Command bench runs shaperd and its peers side by side, on the same work, between
// network namespaces, and compares what they come to. What it judges by are packet
// timestamps and counters at the downstream's interface, and the kernel's accounts of
// CPU time and memory; never what a program says about itself.
//
// "make bench" builds and installs what it needs, as root.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/test/lab"
)

func main() {
	if err := command(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func command(args []string) error {
	if len(args) > 0 && args[0] == "naive" {
		return runNaive(args[1:])
	}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	short := flags.Bool("short", false, "a small part of each work, once: that it works, and that generous bounds hold")
	repeat := flags.Int("repeat", 3, "repetitions of each load")
	match := flags.String("work", ".", "only the loads whose work and name match `regexp`, as in \"W1 .*4 conn\"")
	only := flags.String("programs", "", "only these `programs`, with commas between them")
	shaperd := flags.String("shaperd", "bin/shaperd", "the daemon's `file`")
	peers := flags.String("peers", "build/peers", "the `folder` of install-peers")
	out := flags.String("out", "bench", "the `folder` for report.html and report.json")
	compare := flags.String("compare", "", "compare with the report.json of an earlier run in this `file`")
	profiles := flags.String("profile", "", "profile the program, or the one of -programs, into this `folder`, and print what is at the top; a Go profile takes a daemon with the build tag profile")
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
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root")
	}
	if err := lab.Sweep(); err != nil {
		return err
	}
	bins, err := findBinaries(*shaperd, *peers)
	if err != nil {
		return err
	}
	net, err := newNetwork()
	if err != nil {
		return err
	}
	defer net.remove()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	b := &bench{net: net, bins: bins, short: *short, repeat: *repeat, match: pattern, log: os.Stdout, report: &report{
		Began: time.Now(), Short: *short, Machine: thisMachine(), Versions: bins.versions(),
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
	if err := b.run(ctx, works); err != nil {
		return err
	}
	if *profiles != "" {
		b.profiler.print(os.Stdout, bins.shaperd)
		return nil
	}
	if err := b.report.write(*out); err != nil {
		return err
	}
	fmt.Printf("\n%s and report.json beside it: %d loads in %.0f s\n", filepath.Join(*out, "report.html"), len(b.report.Cells), b.report.Seconds)
	if earlier != nil {
		writeComparison(os.Stdout, earlier, b.report)
	}
	if *short {
		return b.report.bounds()
	}
	return nil
}
