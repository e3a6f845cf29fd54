package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
)

func downstreamsCommand(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "downstreams",
		Short: "List downstreams; drain or enable them",
		Long: `List the downstreams of all listeners with their state, connections and measurements:

CONNECT is the median time of a handshake. ANSWERS/S is the rate of answered requests over
the last 10 s. ANSWER P50 and P99 are the time from the last byte of a request to the
first byte of its answer. FAILED counts failed dials, and RESETS connections that the
downstream has reset. CONNECT, P50 and P99 are of the last minute. Times exclude waits
inside shaperd.

"downstreams drain" stops new connections to a downstream, "downstreams enable" undoes
that.`,
		Example: `  shaperd downstreams
  shaperd downstreams drain 10.0.0.5:5432`,
		Annotations: jsonAnnotations,
		Args:        noArgs(`: use "downstreams drain DOWNSTREAM" or "downstreams enable DOWNSTREAM"`),
		RunE: func(cmd *cobra.Command, _ []string) error {
			all, err := e.client().Downstreams(cmd.Context())
			if err != nil {
				return err
			}
			return e.show(all, func(p *term.Printer) {
				if len(all) == 0 {
					p.Line("No listener has a downstream.")
				}
				p.Table(downstreamsTable(p, all))
			})
		},
	}
	cmd.AddCommand(
		setDownstreamCommand(e, true, "drain", "Stop new connections to a downstream", "Stop new connections to a downstream. Open connections continue. Survives reloads, and\nalso restarts if \"run\" has --state."),
		setDownstreamCommand(e, false, "enable", "Resume new connections to a drained downstream", "Resume new connections to a drained downstream."),
	)
	return cmd
}

func downstreamsTable(p *term.Printer, all []api.DownstreamStatus) *term.Table {
	t := term.NewTable("DOWNSTREAM", "LISTENER", "STATE", ">IN FLIGHT", ">MAX", ">CONNECT", ">ANSWERS/S", ">ANSWER P50", ">P99", ">FAILED", ">RESETS")
	measured := func(d api.Delay, seconds float64) string {
		if d.Count == 0 {
			return "-"
		}
		return term.Seconds(seconds)
	}
	for _, d := range all {
		state, most := d.State, "-"
		switch state {
		case "open":
			left := "next try is due"
			if d.RetryIn > 0 {
				left = "next try in " + term.Seconds(d.RetryIn)
			}
			state = p.Red(api.Printable(d.Error) + ", " + left)
		case "down", "failing":
			state = p.Red(strings.TrimSuffix(state+": "+api.Printable(d.Error), ": "))
		}
		if d.MaxConnections > 0 {
			most = fmt.Sprint(d.MaxConnections)
		}
		t.Add(d.Downstream, d.Listener, state, fmt.Sprint(d.InFlight), most,
			measured(d.Connect, d.Connect.P50), fmt.Sprintf("%.4g", d.TurnsRate), measured(d.Answer, d.Answer.P50), measured(d.Answer, d.Answer.P99),
			fmt.Sprint(d.DialsRefused+d.DialsTimedOut+d.DialsFailed), fmt.Sprint(d.Resets))
	}
	return t
}

func setDownstreamCommand(e env, drained bool, verb, short, long string) *cobra.Command {
	var listener string
	cmd := &cobra.Command{
		Use:   verb + " DOWNSTREAM",
		Short: short,
		Long: long + ` Write DOWNSTREAM as in the configuration
and in "shaperd downstreams".`,
		Example: fmt.Sprintf(`  shaperd downstreams %s 10.0.0.5:5432
  shaperd downstreams %[1]s 10.0.0.5:5432 --listener db`, verb),
		Annotations: changeAnnotations,
		Args:        wantArgs("DOWNSTREAM"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			all, err := e.client().Downstreams(cmd.Context())
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
			c := e.client()
			if err := c.SetDownstream(cmd.Context(), api.SetDownstream{Listener: listener, Downstream: args[0], Drained: drained}); err != nil {
				return downstreamError(cmd.Context(), c, listener, args[0], err)
			}
			all, err := c.Downstreams(cmd.Context())
			if err != nil {
				return e.afterChange(err)
			}
			all = slices.DeleteFunc(all, func(d api.DownstreamStatus) bool {
				return d.Downstream != args[0] || listener != "" && d.Listener != listener
			})
			return e.show(all, func(p *term.Printer) { p.Table(downstreamsTable(p, all)) })
		},
	}
	cmd.Flags().StringVar(&listener, "listener", "", "`name` of the listener (default: all that have the downstream)")
	return cmd
}

// downstreamError is usageFromAPI for a request about a downstream. The error for an unknown
// downstream lists those of the listener, or of all listeners when it is "".
func downstreamError(ctx context.Context, c *api.Client, listener, downstream string, err error) error {
	var said *api.APIError
	if !errors.As(err, &said) || said.Code != http.StatusNotFound {
		return usageFromAPI(err)
	}
	all, listErr := c.Downstreams(ctx)
	if listErr != nil {
		return usageFromAPI(err)
	}
	var listeners, downstreams []string
	for _, d := range all {
		listeners = append(listeners, d.Listener)
		if listener == "" || d.Listener == listener {
			downstreams = append(downstreams, d.Downstream)
		}
	}
	if listener != "" && downstreams == nil {
		return unknownName("listener", listener, listeners)
	}
	return unknownName("downstream", downstream, downstreams)
}
