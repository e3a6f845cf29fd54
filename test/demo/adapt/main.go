// Command adapt puts programs in front of servers that collapse when they get too many connections at once: a pool of
// threads that spin for a lock, PostgreSQL with pgbench far beyond its knee, and a server that writes to SQLite. It
// compares shaperd with an adaptive limit, which is told nothing of the server, with HAProxy at the best fixed
// maxconn, which it looks for first, at a wrong one, and without any. It prints how many answers came in time, and
// fails when shaperd's are fewer than it promises.
//
// It needs root, and leaves nothing behind.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

func main() {
	if len(os.Args) == 3 && os.Args[1] == lockServerVerb {
		fmt.Fprintln(os.Stderr, serveLocks(os.Args[2]))
		os.Exit(1)
	}
	lab.Main("demo-adapt", demonstrate)
}

func demonstrate(ctx context.Context, out io.Writer, args []string) error {
	flags := flag.NewFlagSet("demo-adapt", flag.ContinueOnError)
	length := flags.Duration("length", 40*time.Second, "of the load, at each program")
	only := flags.String("server", "", "`name` of the only server")
	b, err := lab.ParseDemo(flags, args)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%d clients send one request after the other, each on a new connection.\n", clients)
	var failed error
	for i := range servers {
		if *only == "" || *only == servers[i].name {
			if err := compare(ctx, out, b, &servers[i], *length); errors.Is(err, errCheck) {
				failed = err
			} else if err != nil {
				return fmt.Errorf("%s: %w", servers[i].name, err)
			}
		}
	}
	return failed
}

var errCheck = errors.New("a check has failed")

// compare runs all programs in front of a server.
func compare(ctx context.Context, out io.Writer, b lab.Binaries, sv *server, length time.Duration) error {
	fmt.Fprintf(out, "\n%s: %s\n", sv.name, sv.note)
	var fixed []*outcome
	for _, most := range []int{1, 2, 3, 4, 6, 8, 12, 16, 24, 32} {
		o, err := run(ctx, b, sv, haproxy(most), length/4)
		if err != nil {
			return err
		}
		fixed = append(fixed, o)
	}
	best := slices.MaxFunc(fixed, func(a, b *outcome) int { return int(a.good() - b.good()) }).program.most
	list := []program{haproxy(best), shaperd, haproxy(max(1, best/4)), haproxy(5 * best), haproxy(0)}
	var all []*outcome
	for _, p := range list {
		o, err := run(ctx, b, sv, p, length)
		if err != nil {
			return err
		}
		all = append(all, o)
	}
	printTable(out, all)
	for _, o := range all {
		if o.program.adapts {
			fmt.Fprintf(out, "shaperd: %s\n", o.adapted)
		}
	}
	return check(out, all)
}
