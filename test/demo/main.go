// Command demo shows what shaperd is for. It builds three hosts in network
// namespaces, with a client host that is three sources and a downstream that
// really breaks, and has the same work done twice: once straight, once through
// the built daemon. It prints a table of both, draws what arrived at the
// downstream, and fails when the daemon broke a promise.
//
// It needs root, and leaves nothing behind but the pictures.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/test/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	go func() {
		<-ctx.Done()
		stop() // a second signal ends the program at once
	}()
	err := run(ctx, os.Stdout, os.Args[1:])
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return
	case errors.Is(err, context.Canceled):
		err = errors.New("interrupted; everything is cleaned up")
	}
	fmt.Fprintf(os.Stderr, "demo: %v\n", err)
	os.Exit(1)
}

func run(ctx context.Context, out io.Writer, args []string) error {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	binary := flags.String("bin", filepath.Join("bin", "shaperd"), "the daemon")
	page := flags.String("out", filepath.Join("demo", "report.html"), "the report; arrivals.svg goes beside it")
	length := flags.Duration("length", 13*time.Second, "of each of the two runs")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 || *length < 3*time.Second {
		return errors.New("it takes no arguments, and a -length of at least 3s")
	}
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root: run it as root, or with sudo")
	}
	path, err := filepath.Abs(*binary)
	if err != nil {
		return err
	}
	if _, err := os.Stat(path); err != nil {
		return fmt.Errorf("no daemon at %s: run make build", *binary)
	}
	if err := lab.Sweep(); err != nil {
		return err
	}

	t := newTerminal(out)
	t.introduce()
	phases := [2]*phase{newPhase("Direct", false, *length), newPhase("Through shaperd", true, *length)}
	for i, p := range phases {
		watch := func(ctx context.Context) { t.watch(ctx, p, i+1, len(phases)) }
		if err := p.run(ctx, path, watch); err != nil {
			return err
		}
	}
	before, after := measure(phases[0]), measure(phases[1])
	promises := promises(after)
	t.table(rows(before, after))
	t.promises(promises)
	if err := writeReport(*page, before, after, promises); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nPictures: %s, %s\n", *page, arrivalsPath(*page))
	return broken(promises)
}
