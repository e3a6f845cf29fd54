package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
)

// errReloadFailed reports that the new configuration has errors, which have been printed.
var errReloadFailed = errors.New("the new configuration has errors; the old one stays effective")

func reloadCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "reload",
		Short: "Reload the configuration",
		Long: `Reload the configuration and wait for the result. Ports, connections, buckets and queues
stay. If the new configuration has errors, prints them, and the old configuration stays
effective. Overrides stay, except those set with --until-reload.`,
		Example:     `  shaperd check /etc/shaperd/shaperd.toml && shaperd reload`,
		Annotations: jsonAnnotations,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := e.client().Reload(cmd.Context())
			if err != nil {
				return err
			}
			if e.flags.json {
				err = e.printJSON(r)
			} else {
				for _, msg := range r.Errors {
					fmt.Fprintln(e.stderr, api.Printable(msg))
				}
			}
			if err == nil && !r.OK {
				return errReloadFailed
			}
			if !e.flags.json {
				for _, what := range r.DroppedOverrides {
					fmt.Fprintf(e.stderr, "dropped: %s\n", api.Printable(what))
				}
				fmt.Fprintf(e.stdout, "reloaded in %s\n", term.Seconds(r.Duration))
			}
			return err
		},
	}
}
