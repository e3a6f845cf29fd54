// Command pool puts programs in front of a PostgreSQL whose clients keep their connections open, and think between their
// transactions, some of which lock the same row. It compares caps on connections, on turns and on transactions of shaperd, and
// maxconn of HAProxy. It prints how many transactions a second there were, of how many clients, and how many were open at once,
// which a relay before the server counts; and fails when shaperd breaks a cap or serves fewer than it promises.
//
// It needs root, and leaves nothing behind.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

func main() { lab.Main("demo-pool", demonstrate) }

// promised is the part of the transactions without a cap that a cap on transactions is checked to leave.
const promised = 0.8

func demonstrate(ctx context.Context, out io.Writer, args []string) error {
	flags := flag.NewFlagSet("demo-pool", flag.ContinueOnError)
	length := flags.Duration("length", 15*time.Second, "of the load, at each program")
	b, err := lab.ParseDemo(flags, args)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%d clients of pgbench stay connected, and think for 100 ms between transactions; one of 20 locks the same row as others.\n\n", clients)
	var list []*outcome
	for _, p := range programs {
		o, err := run(ctx, b, p, *length)
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		list = append(list, o)
	}
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintf(w, "\tTRANSACTIONS/S\tOF THOSE WITHOUT A CAP\tCLIENTS SERVED\tAT MOST AT ONCE\n")
	for _, o := range list {
		fmt.Fprintf(w, "%s\t%.0f\t%.0f %%\t%d\t%d\n", o.program.name, o.rate, 100*o.rate/list[0].rate, o.served, o.most)
	}
	w.Flush()
	var failed error
	check := func(ok bool, format string, args ...any) {
		verdict := "ok    "
		if !ok {
			verdict, failed = "FAILED", errors.New("a check has failed")
		}
		fmt.Fprintf(out, "%s  %s\n", verdict, fmt.Sprintf(format, args...))
	}
	for _, o := range list {
		if o.program.cap > 0 {
			check(o.most <= o.program.cap, "%s: never more than %d in a transaction", o.program.name, o.program.cap)
		}
		if o.program.promises {
			check(o.rate >= promised*list[0].rate && o.served == clients, "%s: %.0f %% and more of the transactions without a cap, of all clients", o.program.name, 100*promised)
		}
	}
	return failed
}
