package lab

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

// Main is the main function of a program that makes hosts: it runs f with the arguments of the command line until that
// ends or a signal comes, prints its error, and exits. A second signal kills the program.
func Main(name string, f func(ctx context.Context, out io.Writer, args []string) error) {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM, unix.SIGHUP)
	go func() {
		<-ctx.Done()
		stop()
	}()
	err := f(ctx, os.Stdout, os.Args[1:])
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
		return
	case errors.Is(err, context.Canceled):
		err = errors.New("interrupted, cleaned up")
	}
	fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
	os.Exit(1)
}
