// Command cold puts programs in front of a server that is cold after it has started: for some time its answers take four
// times as long, and if it gets more than 20 connections at once meanwhile it falls over, and starts again. It compares
// the circuit breaker of shaperd, which lets connections in at a ramp, with HAProxy and nginx. It prints how often the
// server fell and how many were answered, and fails when it falls again behind shaperd.
//
// It needs root, and leaves nothing behind.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

func main() { lab.Main("demo-cold", demonstrate) }

func demonstrate(ctx context.Context, out io.Writer, args []string) error {
	flags := flag.NewFlagSet("demo-cold", flag.ContinueOnError)
	length := flags.Duration("length", time.Minute, "of the load, at each program")
	b, err := lab.ParseDemo(flags, args)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "A server that fails after %v, is back %v later, and cold for another %v.\n"+
		"%d clients send one request after the other, each on a new connection, and again %v after a failure.\n\n",
		failsAfter, restartTime, coldTime, clients, retryAfter)
	var list []*outcome
	for i := range programs {
		o, err := run(ctx, b, &programs[i], *length)
		if err != nil {
			return fmt.Errorf("%s: %w", programs[i].name, err)
		}
		list = append(list, o)
	}
	printTable(out, list)
	return check(out, list)
}
