package cli

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
)

func eventsCommand(e env) *cobra.Command {
	var follow bool
	var kind string
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Show recent log records of the daemon",
		Long: `Show the last log records of the daemon at level info or above. With --follow, continue
with new records; with --json and --follow, print one record per line. --kind penalty
shows only the sources that penalties block. The journal contains the whole log.`,
		Example: `  shaperd events
  shaperd events --follow --kind penalty
  journalctl -u shaperd`,
		Annotations: jsonAnnotations,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if follow {
				ctx, stop := untilSignal(cmd.Context())
				defer stop()
				return followEvents(ctx, e, kind)
			}
			events, err := e.client().Events(cmd.Context(), 0, kind)
			if err != nil {
				return err
			}
			return e.show(events, func(p *term.Printer) { printEvents(p, events) })
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "continue with new events")
	cmd.Flags().StringVar(&kind, "kind", "", "show only events of this `kind`: penalty")
	cmd.RegisterFlagCompletionFunc("kind", cobra.FixedCompletions([]string{"penalty"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func printEvents(p *term.Printer, events []api.Event) {
	for _, event := range events {
		var attrs strings.Builder
		for _, key := range slices.Sorted(maps.Keys(event.Attrs)) {
			attrs.WriteString(" " + api.Printable(key) + "=" + quoteAttr(event.Attrs[key]))
		}
		level := event.Level
		if level == "error" {
			level = p.Red(level)
		}
		p.Line("%s %-5s %s%s", term.Clock(event.Time, time.Now()), level, api.Printable(event.Message), attrs.String())
	}
}

// quoteAttr returns the value of an attribute, quoted unless it is a single word.
func quoteAttr(s string) string {
	if s == "" || strings.ContainsAny(s, " =\"") {
		return strconv.Quote(s)
	}
	return api.Printable(s)
}

// followInterval is the time between two requests for new events.
const followInterval = time.Second

// followEvents prints events until ctx ends. When the daemon goes away, it waits for the next
// one, which numbers its events from 1.
func followEvents(ctx context.Context, e env, kind string) error {
	c := e.client()
	var last uint64
	var pid int
	tick := time.NewTicker(followInterval)
	defer tick.Stop()
	for first := true; ; first = false {
		events, err := fetchEvents(ctx, c, kind, &pid, &last)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && (first || !errors.Is(err, api.ErrNoDaemon)):
			return err
		}
		for _, event := range events {
			show := func() error { return e.show(event, func(p *term.Printer) { printEvents(p, []api.Event{event}) }) }
			if e.flags.json {
				show = func() error { return e.printJSONLine(event) }
			}
			if err := show(); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// fetchEvents returns the events of a kind, or of all, after *last, or all of them when the daemon's process is no
// longer *pid. It updates both.
func fetchEvents(ctx context.Context, c *api.Client, kind string, pid *int, last *uint64) ([]api.Event, error) {
	s, err := c.Status(ctx)
	if err != nil {
		return nil, err
	}
	if s.PID != *pid {
		*pid, *last = s.PID, 0
	}
	events, err := c.Events(ctx, *last, kind)
	if n := len(events); n > 0 {
		*last = events[n-1].ID
	}
	return events, err
}
