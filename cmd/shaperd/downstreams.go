package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"shaperd/control"
)

func downstreamsCommand(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "downstreams",
		Short: "Show downstreams, take them out of use or into it",
		Long: `Show the downstreams of all listeners: whether they get connections, and how many they
have. "downstreams drain" gives one no new connections, "downstreams enable" gives it
some again.`,
		Example: `  shaperd downstreams
  shaperd downstreams drain 10.0.0.5:5432`,
		Annotations: withJSON,
		Args:        noArgs(`: "downstreams drain DOWNSTREAM" or "downstreams enable DOWNSTREAM"`),
		RunE: func(cmd *cobra.Command, _ []string) error {
			all, err := e.daemon().Downstreams(cmd.Context())
			if err != nil {
				return err
			}
			return e.show(all, func(p *page) {
				if len(all) == 0 {
					p.line("There are no downstreams.")
				}
				p.table(p.downstreams(all))
			})
		},
	}
	cmd.AddCommand(
		setDownstreamCommand(e, true, "drain", "Give a downstream no new connections", "Give a downstream no new connections. Those that it has go on. Reloads do not end that,\nnor does a restart where \"run\" has --state."),
		setDownstreamCommand(e, false, "enable", "Give a downstream connections again", "Give a downstream that was drained connections again."),
	)
	return cmd
}

func (p *page) downstreams(all []control.DownstreamStatus) *table {
	t := newTable("DOWNSTREAM", "LISTENER", "STATE", ">IN FLIGHT", ">MOST")
	for _, d := range all {
		state, most := d.State, "-"
		if state == "down" || state == "failing" {
			state = p.red(strings.TrimSuffix(state+": "+printable(d.Error), ": "))
		}
		if d.Most > 0 {
			most = fmt.Sprint(d.Most)
		}
		t.add(d.Downstream, d.Listener, state, fmt.Sprint(d.InFlight), most)
	}
	return t
}

func setDownstreamCommand(e env, drained bool, verb, short, long string) *cobra.Command {
	var listener string
	cmd := &cobra.Command{
		Use:   verb + " DOWNSTREAM",
		Short: short,
		Long:  long + ` DOWNSTREAM is as the configuration and "shaperd downstreams" write it.`,
		Example: fmt.Sprintf(`  shaperd downstreams %s 10.0.0.5:5432
  shaperd downstreams %[1]s 10.0.0.5:5432 --listener db`, verb),
		Annotations: asOrder,
		Args:        args("DOWNSTREAM"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			all, err := e.daemon().Downstreams(cmd.Context())
			var names []string
			for _, d := range all {
				names = append(names, d.Downstream)
			}
			if err != nil || len(args) > 0 {
				names = nil
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			c := e.daemon()
			if err := c.SetDownstream(cmd.Context(), control.SetDownstream{Listener: listener, Downstream: args[0], Drained: drained}); err != nil {
				return ofDownstream(cmd.Context(), c, listener, args[0], err)
			}
			all, err := c.Downstreams(cmd.Context())
			if err != nil {
				return e.afterOrder(err)
			}
			all = slices.DeleteFunc(all, func(d control.DownstreamStatus) bool {
				return d.Downstream != args[0] || listener != "" && d.Listener != listener
			})
			return e.show(all, func(p *page) { p.table(p.downstreams(all)) })
		},
	}
	cmd.Flags().StringVar(&listener, "listener", "", "`name` of the listener; all that have it, without")
	return cmd
}

// ofDownstream is asUsage for what was asked of a downstream: it tells which there are when
// there is no such one, at the listener if it has a name.
func ofDownstream(ctx context.Context, c *control.Client, listener, downstream string, err error) error {
	var said *control.APIError
	if !errors.As(err, &said) || said.Code != http.StatusNotFound {
		return asUsage(err)
	}
	all, lack := c.Downstreams(ctx)
	if lack != nil {
		return asUsage(err)
	}
	var listeners, downstreams []string
	for _, d := range all {
		listeners = append(listeners, d.Listener)
		if listener == "" || d.Listener == listener {
			downstreams = append(downstreams, d.Downstream)
		}
	}
	if listener != "" && downstreams == nil {
		return unknown("listener", listener, listeners)
	}
	return unknown("downstream", downstream, downstreams)
}
