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
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	short := flags.Bool("short", false, "a small part of each work, once: that it works, and that generous bounds hold")
	repeat := flags.Int("repeat", 3, "repetitions of each load")
	match := flags.String("work", ".", "only the loads whose work and name match `regexp`, as in \"W1 .*4 conn\"")
	only := flags.String("programs", "", "only these `programs`, with commas between them")
	shaperd := flags.String("shaperd", "bin/shaperd", "the daemon's `file`")
	peers := flags.String("peers", "build/peers", "the `folder` of install-peers")
	asn := flags.String("asn", "build/asn", "the `folder` of the published table of autonomous systems")
	out := flags.String("out", "bench", "the `folder` for report.html and report.json")
	again := flags.String("again", "", "measure nothing: show the report.json of an earlier run in this `file`")
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
	if *again != "" {
		r, err := readReport(*again)
		if err != nil {
			return err
		}
		return r.present(os.Stdout, *out, earlier)
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
	defer net.remove()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	defer stop()
	b := &bench{net: net, bins: bins, short: *short, repeat: *repeat, match: pattern, log: os.Stdout, report: &report{
		Began: time.Now(), Short: *short, Command: "bench " + strings.Join(args, " "), Machine: thisMachine(), Versions: bins.versions(),
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
	if err := b.report.present(os.Stdout, *out, earlier); err != nil || failed != nil {
		return errors.Join(failed, err)
	}
	if *short {
		return b.report.bounds()
	}
	return nil
}
