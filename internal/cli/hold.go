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
		Short: "Hold new connections of a listener, such as during a restart of its server",
		Long: `Hold new connections and UDP flows of a listener: they wait, and do not reach its
downstreams. Open connections continue. With --end-idle, connections are closed on which
neither side owes an answer and nothing has moved for a second.

The hold ends after --for, or with "shaperd resume". Then waiting connections are admitted
at a rate that begins with the ramp of the listener, and grows. Each waits for at most
hold_timeout. A hold survives reloads, and also restarts if "run" has --state.`,
		Example: `  shaperd hold db --for 5m
  shaperd hold db --end-idle && systemctl restart postgresql && shaperd resume db`,
		Annotations:       changeAnnotations,
		Args:              wantArgs("LISTENER"),
		ValidArgsFunction: completeListeners(e),
		RunE: func(cmd *cobra.Command, args []string) error {
			return e.setListener(cmd.Context(), api.SetListener{Listener: args[0], Held: true, Duration: forTime.seconds(), EndIdle: endIdle})
		},
	}
	addForFlag(cmd, &forTime, "hold", `until "shaperd resume"`)
	cmd.Flags().BoolVar(&endIdle, "end-idle", false, "close idle connections")
	return cmd
}

func resumeCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "resume LISTENER",
		Short: "End the hold of a listener",
		Long: `End the hold of a listener. Waiting connections are admitted at a rate that begins with
the ramp of the listener, and grows by half every 3 seconds until no connection waits.`,
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
		fmt.Fprintf(&b, "HELD: new connections of %s have been held for %s, %s", listener, term.Seconds(h.For), end)
	case "down":
		fmt.Fprintf(&b, "DOWN: new connections of %s have waited for %s, until a downstream can be reached", listener, term.Seconds(h.For))
	default:
		fmt.Fprintf(&b, "RAMP: new connections of %s are admitted at %.3g/s, and the rate grows", listener, h.Rate)
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
