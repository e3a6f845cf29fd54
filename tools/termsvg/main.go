// Command termsvg makes animated pictures of programs in a terminal.
//
//	termsvg record -size 100x30 -out top.cast -keys '5s enter' -- shaperd top
//	termsvg render -title 'shaperd top' -out top.svg top.cast
//
// A recording is an asciicast, version 2: asciinema plays it, too. A picture is an SVG without
// scripts, so that a web page can show it as an image.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, unix.SIGTERM)
	err := run(ctx, os.Stdout, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "termsvg:", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("usage: termsvg record [FLAG]... -out FILE -- COMMAND [ARGUMENT]..., or termsvg render [FLAG]... -out FILE RECORDING")

func run(ctx context.Context, out io.Writer, args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	flags := flag.NewFlagSet("termsvg "+args[0], flag.ContinueOnError)
	path := flags.String("out", "", "`path` of the result")
	switch args[0] {
	case "record":
		size := flags.String("size", "80x24", "`columns x rows` of the terminal")
		keys := flags.String("keys", "", "keys to press, each after an instant: \"2s enter, 4s tab, 6s q\"")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		if *path == "" || flags.NArg() == 0 {
			return errUsage
		}
		var r recording
		if n, err := fmt.Sscanf(*size, "%dx%d", &r.columns, &r.rows); n != 2 || r.columns < 1 || r.rows < 1 {
			return fmt.Errorf("size %q: %w", *size, err)
		}
		presses, err := parseKeys(*keys)
		if err != nil {
			return err
		}
		failed := record(ctx, &r, flags.Args(), presses, out)
		return errors.Join(failed, writeFile(*path, r.write))
	case "render":
		o := options{label: "Recording of a terminal"}
		flags.StringVar(&o.title, "title", "", "`text` above the terminal")
		flags.StringVar(&o.label, "label", o.label, "description for those who cannot see the picture")
		flags.Float64Var(&o.speed, "speed", 1, "`factor` by which the picture is faster than the recording")
		flags.DurationVar(&o.step, "step", 200*time.Millisecond, "shortest `duration` of a frame, in the recording")
		flags.DurationVar(&o.hold, "hold", 4*time.Second, "`duration` of the last frame")
		if err := flags.Parse(args[1:]); err != nil {
			return err
		}
		if *path == "" || flags.NArg() != 1 || o.speed <= 0 || o.step <= 0 || o.hold <= 0 {
			return errUsage
		}
		f, err := os.Open(flags.Arg(0))
		if err != nil {
			return err
		}
		defer f.Close()
		r, err := readRecording(f)
		if err != nil {
			return fmt.Errorf("%s: %w", f.Name(), err)
		}
		frames, err := r.frames(o.step)
		if err != nil {
			return fmt.Errorf("%s: %w", f.Name(), err)
		}
		return writeFile(*path, func(w io.Writer) error { return writeSVG(w, r, frames, o) })
	}
	return errUsage
}

func writeFile(path string, write func(io.Writer) error) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}
