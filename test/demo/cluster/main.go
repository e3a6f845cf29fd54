// Command cluster shows a limit that several gateways share. It creates three gateways in front of
// one downstream, in network namespaces. A hot spot of the demand moves from one to the next, the
// store dies and comes back empty, and one gateway is cut off. It does so with shaperd, with
// HAProxy, and with proxies that count each hit in Redis, one after the other. It prints a table of
// what arrived at the downstream, draws it, and fails when a check of shaperd fails.
//
// It needs root, and leaves nothing behind except the picture.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

func main() { lab.Main("demo-cluster", demonstrate) }

var intro = fmt.Sprintf(`One limit of %d Mbit/s, three gateways
Each gateway has sources that send %d %% of the rate. More of them, which send all they can, move to
the next gateway every %d s. The limit is one for the three: what may their server get?

`, rate*8/1_000_000, 100*usualSources*usualRate/rate, visit/time.Second)

func demonstrate(ctx context.Context, out io.Writer, args []string) error {
	flags := flag.NewFlagSet("demo-cluster", flag.ContinueOnError)
	binary := flags.String("bin", filepath.Join("bin", "shaperd"), "`path` of the daemon")
	peers := flags.String("peers", filepath.Join("build", "peers"), "`directory` of HAProxy and perhit")
	picture := flags.String("out", filepath.Join("demo", "cluster.svg"), "`path` of the picture")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return errors.New("usage: demo-cluster takes no arguments")
	}
	if os.Geteuid() != 0 {
		return errors.New("network namespaces need root: run as root or with sudo")
	}
	b, err := findBinaries(*binary, *peers)
	if err != nil {
		return err
	}
	if err := lab.Sweep(); err != nil {
		return err
	}
	fmt.Fprint(out, intro)
	var list []outcome
	for i := range programs {
		p := &programs[i]
		fmt.Fprintf(out, "%d/%d %s: %s\n", i+1, len(programs), p.name, p.note)
		r := newRun(p, func(at time.Duration, what string) { fmt.Fprintf(out, "    %2.0f s  %s\n", at.Seconds(), what) })
		arrivals, err := r.do(ctx, b)
		if err != nil {
			return err
		}
		o := outcome{program: p, phases: r.phases, flow: newFlow(arrivals)}
		for _, ph := range r.phases {
			o.figures = append(o.figures, measure(o.flow, ph))
		}
		list = append(list, o)
	}
	fmt.Fprintln(out)
	printTable(out, list)
	fmt.Fprintln(out)
	failed := check(out, list[0])
	if err := os.MkdirAll(filepath.Dir(*picture), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(*picture, []byte(draw(list)), 0o644); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nPicture: %s\n", *picture)
	return failed
}
