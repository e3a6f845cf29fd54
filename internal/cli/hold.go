package cli

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
)

func holdCommand(e env) *cobra.Command {
	var forTime durationFlag
	var endIdle bool
	cmd := &cobra.Command{
		Use:   "hold LISTENER",
		Short: "Make new connections of a listener wait, while its server is restarted",
		Long: `Make new connections and UDP flows of a listener wait, instead of passing them on to its
downstreams. Open connections go on; with --end-idle those are closed on which neither side
owes an answer and nothing has moved for a second. The hold ends after --for, or with
"shaperd resume": then those that wait are let in at a rate that begins with ramp, and grows.
Each waits for hold_timeout at most. Survives reloads, and restarts when "run" has --state.`,
		Example: `  shaperd hold db --for 5m
  shaperd hold db --end-idle && systemctl restart postgresql && shaperd resume db`,
		Annotations:       changeAnnotations,
		Args:              wantArgs("LISTENER"),
		ValidArgsFunction: completeListeners(e),
		RunE: func(cmd *cobra.Command, args []string) error {
			return e.setListener(cmd.Context(), api.SetListener{Listener: args[0], Held: true, Duration: forTime.seconds(), EndIdle: endIdle})
		},
	}
	addForFlag(cmd, &forTime, `until "shaperd resume"`)
	cmd.Flags().BoolVar(&endIdle, "end-idle", false, "close idle connections")
	return cmd
}

func resumeCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "resume LISTENER",
		Short: "End the hold of a listener",
		Long: `End the hold of a listener. Connections that wait are let in at a rate that begins with
the ramp of the listener, and grows by half every 3 seconds until none waits.`,
		Example:           `  shaperd resume db`,
		Annotations:       changeAnnotations,
		Args:              wantArgs("LISTENER"),
		ValidArgsFunction: completeListeners(e),
		RunE: func(cmd *cobra.Command, args []string) error {
			return e.setListener(cmd.Context(), api.SetListener{Listener: args[0]})
		},
	}
}

func (e env) setListener(ctx context.Context, s api.SetListener) error {
	c := e.client()
	held, err := c.SetListener(ctx, s)
	var said *api.APIError
	if errors.As(err, &said) && said.Code == http.StatusNotFound {
		return unknownName("listener", s.Listener, listenerNames(ctx, c))
	}
	if err != nil {
		return usageFromAPI(err)
	}
	return e.show(held, func(p *term.Printer) {
		if s.EndIdle {
			p.Line("%s closed.", term.Plural(int64(held.Ended), "idle connection"))
		}
		if held.Hold == nil {
			p.Line("%s is not held.", api.Printable(s.Listener))
			return
		}
		p.Line("%s", holdText(s.Listener, held.Waiting, held.Hold))
	})
}

// holdText says why connections of a listener wait, and for how long.
func holdText(listener string, waiting int, h *api.Hold) string {
	var b strings.Builder
	listener = api.Printable(listener)
	switch h.State {
	case "held":
		end := `until "shaperd resume ` + listener + `"`
		if h.Left > 0 {
			end = "for another " + term.Seconds(h.Left)
		}
		fmt.Fprintf(&b, "HELD: new connections of %s wait, since %s, %s", listener, term.Seconds(h.For), end)
	case "down":
		fmt.Fprintf(&b, "DOWN: new connections of %s wait, since %s, until a downstream can be reached", listener, term.Seconds(h.For))
	default:
		fmt.Fprintf(&b, "RAMP: new connections of %s are let in at %.3g/s, and growing", listener, h.Rate)
	}
	fmt.Fprintf(&b, "; %d waiting", waiting)
	if h.LastServed > 0 && waiting > 0 {
		fmt.Fprintf(&b, ", the last of them for another %s", term.Seconds(h.LastServed))
	}
	return b.String() + "."
}

func listenerNames(ctx context.Context, c *api.Client) (names []string) {
	s, err := c.Status(ctx)
	if err != nil {
		return nil
	}
	for _, l := range s.Listeners {
		names = append(names, l.Name)
	}
	return names
}

func completeListeners(e env) func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return func(cmd *cobra.Command, args []string, _ string) (names []string, _ cobra.ShellCompDirective) {
		if len(args) == 0 {
			names = listenerNames(cmd.Context(), e.client())
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}
