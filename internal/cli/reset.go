package cli

import (
	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/internal/term"
)

func resetCommand(e env) *cobra.Command {
	var source string
	cmd := &cobra.Command{
		Use:   "reset LIMIT",
		Short: "Reset the bucket of a limit",
		Long: `Reset a bucket of a limit: its backlog, or its count of new connections. Later traffic is
treated as that of a new source, so the server may get more than the limit for a moment.
Units in queues continue to wait. If the key of the limit has "source", name a source with
--source. The log records the author.`,
		Example: `  shaperd reset logins --source 192.0.2.7
  shaperd reset database`,
		Annotations:       changeAnnotations,
		Args:              wantArgs("LIMIT"),
		ValidArgsFunction: e.completeLimits,
		RunE: func(cmd *cobra.Command, args []string) error {
			c := e.client()
			if err := c.ResetBucket(cmd.Context(), args[0], source); err != nil {
				return limitError(cmd.Context(), c, args[0], err)
			}
			return e.show(struct{}{}, func(p *term.Printer) {
				if source == "" {
					p.Line("The bucket of limit %s is reset.", args[0])
				} else {
					p.Line("The bucket of %s under limit %s is reset.", source, args[0])
				}
			})
		},
	}
	cmd.Flags().StringVar(&source, "source", "", "`address` of the source")
	return cmd
}
