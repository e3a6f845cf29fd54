package cli

import (
	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/internal/term"
)

func resetCommand(e env) *cobra.Command {
	var source string
	cmd := &cobra.Command{
		Use:   "reset LIMIT",
		Short: "Forget what the bucket of a limit owes",
		Long: `Forget what the bucket of a limit owes: a backlog, or the new connections that have passed.
What comes next is treated as that of a source which has just come, so the server may get more
than the limit for that moment. With "source" in the key of the limit, name a source. What
waits in queues goes on waiting there. The log says who did it.`,
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
					p.Line("What the bucket of limit %s owed is forgotten.", args[0])
				} else {
					p.Line("What the bucket of %s under limit %s owed is forgotten.", source, args[0])
				}
			})
		},
	}
	cmd.Flags().StringVar(&source, "source", "", "`address` of the source")
	return cmd
}
