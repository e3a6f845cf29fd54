package cli

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
)

func stopCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "stop",
		Short: "Stop the daemon gracefully",
		Long: `Stop the daemon gracefully, as SIGTERM does: it refuses new connections, and open ones may
continue for the --drain-timeout of "run". Shows the number of open connections until the
daemon has exited; with --json, one line per change.`,
		Example:     `  shaperd stop`,
		Annotations: jsonAnnotations,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			return stopDaemon(ctx, e)
		},
	}
}

// stopPollInterval is the time between two status requests during a drain.
const stopPollInterval = 200 * time.Millisecond

func stopDaemon(ctx context.Context, e env) error {
	c := e.client()
	s, err := c.Stop(ctx)
	if err != nil {
		return err
	}
	pid, shown := s.PID, ""
	tick := time.NewTicker(stopPollInterval)
	defer tick.Stop()
	for {
		var open, flows int64
		for _, l := range s.Listeners {
			open, flows = open+l.Connections, flows+l.Flows
		}
		if left := fmt.Sprintf("stopping: %s and %s left", term.Plural(open, "connection"), term.Plural(flows, "flow")); left != shown {
			shown = left
			if err := e.printProgress(s, left); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return errors.New("interrupted; the daemon continues to stop")
		case <-tick.C:
		}
		s, err = c.Status(ctx)
		switch {
		case errors.Is(err, api.ErrNoDaemon), err == nil && s.PID != pid:
			if !e.flags.json {
				fmt.Fprintln(e.stdout, "the daemon has stopped")
			}
			return nil
		case err != nil && ctx.Err() == nil:
			return err
		}
	}
}

func (e env) printProgress(s api.Status, text string) error {
	if e.flags.json {
		return e.printJSONLine(s)
	}
	_, err := fmt.Fprintln(e.stdout, text)
	return err
}
