package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"shaperd/control"
)

func connectionsCommand(e env) *cobra.Command {
	var q control.ConnectionQuery
	var limit *string
	var sort *oneOf
	var top *int
	cmd := &cobra.Command{
		Use:   "connections",
		Short: "Show connections, and which limit holds them back",
		Long: `Show TCP connections and UDP flows: whose they are, how far they are, what passed, how
long they waited altogether, which limit holds them now and which has held them longest.
"connections kill" ends some.`,
		Example: `  shaperd connections --source 192.0.2.0/24 --sort waited
  shaperd connections --limit per-source --top 5
  shaperd connections kill 4711`,
		Annotations: withJSON,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			q.Limit, q.Sort, q.Top = *limit, sort.value, *top
			c := e.daemon()
			if err := known(cmd.Context(), c, q); err != nil {
				return err
			}
			all, err := c.Connections(cmd.Context(), q)
			if err != nil {
				return asUsage(err)
			}
			return e.show(all, func(p *page) {
				p.table(connectionsTable(all.Connections))
				if left := all.Total - len(all.Connections); left > 0 {
					p.line("and %d more: --top", left)
				} else if all.Total == 0 {
					p.line("There are no such connections.")
				}
			})
		},
	}
	limit = e.limitFlag(cmd, "of a limit that they are under")
	cmd.Flags().StringVar(&q.Listener, "listener", "", "`name` of their listener")
	cmd.Flags().StringVar(&q.Source, "source", "", "`prefix` or address that they come from")
	sort = choice(cmd, "sort", "what to sort by", "bytes", "age", "waited", "idle")
	top = topFlag(cmd)
	cmd.AddCommand(killCommand(e))
	return cmd
}

// known finds out whether there is what q names, because of nothing there are no
// connections.
func known(ctx context.Context, c *control.Client, q control.ConnectionQuery) error {
	if q.Limit != "" {
		if _, err := c.Limit(ctx, q.Limit); err != nil {
			return ofLimit(ctx, c, q.Limit, err)
		}
	}
	if q.Listener == "" {
		return nil
	}
	s, err := c.Status(ctx)
	if err != nil {
		return err
	}
	var names []string
	for _, l := range s.Listeners {
		names = append(names, l.Name)
	}
	if !slices.Contains(names, q.Listener) {
		return unknown("listener", q.Listener, names)
	}
	return nil
}

func connectionsTable(all []control.Connection) *table {
	t := newTable(">ID", "SOURCE", "LISTENER", "DOWNSTREAM", "STAGE", ">AGE", ">IDLE", ">TO", ">FROM", ">WAITED", "HELD BY", "HELD MOST BY", "AS")
	for _, c := range all {
		t.add(strconv.FormatUint(c.ID, 10), printable(c.Source), fmt.Sprintf("%s %s/%d", c.Listener, c.Protocol, c.Port), printable(c.Downstream), c.Stage,
			seconds(c.Age), seconds(c.Idle), size(c.ToDownstream), size(c.FromDownstream), seconds(c.Waited), c.HeldBy, c.HeldMost, system(c.ASN, c.ASName))
	}
	return t
}

func killCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "kill ID...",
		Short: "End connections by a reset",
		Long: `End connections by a reset, by their number in "shaperd connections". One that has gone
keeps none of the others from being ended.`,
		Example:     `  shaperd connections kill 4711 4712`,
		Annotations: withJSON,
		Args:        args("ID..."),
		RunE: func(cmd *cobra.Command, args []string) error {
			var ids []uint64
			for _, arg := range args {
				id, err := strconv.ParseUint(arg, 10, 64)
				if err != nil {
					return usageError{fmt.Errorf(`%q is no ID: "shaperd connections" shows them in its first column`, arg)}
				}
				ids = append(ids, id)
			}
			ended, errs := []uint64{}, []error{}
			for _, id := range ids {
				if err := e.daemon().Kill(cmd.Context(), id); err != nil {
					errs = append(errs, fmt.Errorf("end connection %d: %w", id, err))
					continue
				}
				ended = append(ended, id)
			}
			err := e.show(ended, func(p *page) {
				for _, id := range ended {
					p.line("connection %d was ended", id)
				}
			})
			return errors.Join(append(errs, err)...)
		},
	}
}
