package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"shaperd/control"
)

// errReload says that the new configuration is wrong; what is wrong with it was printed.
var errReload = errors.New("the new configuration has errors: the old one stays in force")

func reloadCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "reload",
		Short: "Put the configuration file in force as it is now",
		Long: `Let the daemon read its configuration again, and wait for what comes of it. Ports,
connections, buckets and queues stay. When the file is wrong, its mistakes are printed
and the old configuration stays in force. What was set in limits stays, but with --until-reload.`,
		Example:     `  shaperd check /etc/shaperd/shaperd.toml && shaperd reload`,
		Annotations: withJSON,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := e.daemon().Reload(cmd.Context())
			if err != nil {
				return err
			}
			if e.flags.json {
				err = e.printJSON(r)
			} else {
				for _, mistake := range r.Errors {
					fmt.Fprintln(e.stderr, printable(mistake))
				}
			}
			if err == nil && !r.OK {
				return errReload
			}
			if !e.flags.json {
				for _, what := range r.Dropped {
					fmt.Fprintf(e.stderr, "dropped: %s\n", printable(what))
				}
				fmt.Fprintf(e.stdout, "reloaded in %s\n", seconds(r.Took))
			}
			return err
		},
	}
}

func drainCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "drain",
		Short: "Let the daemon end, without new connections",
		Long: `Let the daemon end as SIGTERM does: it takes no new connections, and those that are
there go on for its --drain-timeout. Shows what is left until the daemon has gone.
With --json, a line each time that changes.`,
		Example:     `  shaperd drain`,
		Annotations: withJSON,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			return drain(ctx, e)
		},
	}
}

// drainInterval is how often a drain is looked after.
const drainInterval = 200 * time.Millisecond

func drain(ctx context.Context, e env) error {
	c := e.daemon()
	s, err := c.Drain(ctx)
	if err != nil {
		return err
	}
	pid, shown := s.PID, ""
	tick := time.NewTicker(drainInterval)
	defer tick.Stop()
	for {
		var open, flows int64
		for _, l := range s.Listeners {
			open, flows = open+l.Open, flows+l.Flows
		}
		if left := fmt.Sprintf("draining: %s and %s left", plural(open, "connection"), plural(flows, "flow")); left != shown {
			shown = left
			if err := e.showDrain(s, left); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return errors.New("the drain goes on without being watched")
		case <-tick.C:
		}
		s, err = c.Status(ctx)
		switch {
		case errors.Is(err, control.ErrNoDaemon), err == nil && s.PID != pid:
			if !e.flags.json {
				fmt.Fprintln(e.stdout, "the daemon has gone")
			}
			return nil
		case err != nil && ctx.Err() == nil:
			return err
		}
	}
}

func (e env) showDrain(s control.Status, text string) error {
	if e.flags.json {
		return e.printJSONLine(s)
	}
	_, err := fmt.Fprintln(e.stdout, text)
	return err
}
