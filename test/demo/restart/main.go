// Command restart kills a PostgreSQL under load, and starts it again, many times: behind shaperd, which waits until it
// is back, behind shaperd of which an operator holds the listener, and behind HAProxy and nginx, one after the other. It
// prints what clients have noticed, and how fast connections came to the server that had just started, and fails
// when a check of shaperd fails.
//
// The clients are pgbench with a new connection for each transaction. What arrives is counted by the kernel of the server.
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

func main() { lab.Main("demo-restart", demonstrate) }

func demonstrate(ctx context.Context, out io.Writer, args []string) error {
	flags := flag.NewFlagSet("demo-restart", flag.ContinueOnError)
	kills := flags.Int("kills", 50, "`number` of times that the server is killed")
	b, err := lab.ParseDemo(flags, args)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "A PostgreSQL that is killed %d times, and started again %v later\n"+
		"%d clients make a new connection for each transaction. The server, once it is back, shall get %d\n"+
		"connections per second at first, and half as many more every 3 s.\n\n", *kills, downTime, clients, ramp)
	var list []*outcome
	for i := range programs {
		p := &programs[i]
		fmt.Fprintf(out, "%d/%d %s: %s\n", i+1, len(programs), p.name, p.note)
		start := time.Now()
		o, err := runProgram(ctx, b, p, *kills)
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		fmt.Fprintf(out, "    %v\n", time.Since(start).Round(time.Second))
		list = append(list, o)
	}
	fmt.Fprintln(out)
	printTable(out, list)
	return check(out, list)
}
