package main

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"shaperd/control"
)

func eventsCommand(e env) *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Show what the daemon logged",
		Long: `Show the last lines that the daemon logged at level info or above. With --follow, go on
with what comes, and with --json and --follow, print an event a line. The whole log is
in the journal.`,
		Example: `  shaperd events
  shaperd events --follow
  journalctl -u shaperd`,
		Annotations: withJSON,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if follow {
				ctx, stop := untilSignal(cmd.Context())
				defer stop()
				return followEvents(ctx, e)
			}
			events, err := e.daemon().Events(cmd.Context(), 0)
			if err != nil {
				return err
			}
			return e.show(events, func(p *page) { p.events(events) })
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what comes")
	return cmd
}

func (p *page) events(events []control.Event) {
	for _, event := range events {
		var attrs strings.Builder
		for _, key := range sorted(event.Attrs) {
			attrs.WriteString(" " + printable(key) + "=" + word(event.Attrs[key]))
		}
		level := event.Level
		if level == "error" {
			level = p.red(level)
		}
		p.line("%s %-5s %s%s", clock(event.Time, time.Now()), level, printable(event.Message), attrs.String())
	}
}

// word is the value of an attribute, quoted where it would not be read as one.
func word(s string) string {
	if s == "" || strings.ContainsAny(s, " =\"") {
		return strconv.Quote(s)
	}
	return printable(s)
}

// followInterval is how often new events are asked for.
const followInterval = time.Second

// followEvents shows events until ctx ends. A daemon that goes away is waited for: its
// next one counts events from 1.
func followEvents(ctx context.Context, e env) error {
	c := e.daemon()
	var last uint64
	var pid int
	tick := time.NewTicker(followInterval)
	defer tick.Stop()
	for first := true; ; first = false {
		events, err := newEvents(ctx, c, &pid, &last)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && (first || !errors.Is(err, control.ErrNoDaemon)):
			return err
		}
		for _, event := range events {
			show := func() error { return e.show(event, func(p *page) { p.events([]control.Event{event}) }) }
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

// newEvents is what the daemon logged after *last, or from its start when it is another
// one than *pid. It updates both.
func newEvents(ctx context.Context, c *control.Client, pid *int, last *uint64) ([]control.Event, error) {
	s, err := c.Status(ctx)
	if err != nil {
		return nil, err
	}
	if s.PID != *pid {
		*pid, *last = s.PID, 0
	}
	events, err := c.Events(ctx, *last)
	if n := len(events); n > 0 {
		*last = events[n-1].ID
	}
	return events, err
}
