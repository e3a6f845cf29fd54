package cli

import (
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
)

func revisionsCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "revisions",
		Short: "List the configurations that were effective",
		Long: `List the last ten configurations that were effective, the newest first, as "run" with
--state keeps them. "shaperd rollback" goes back to one of them.`,
		Example: `  shaperd revisions
  shaperd revisions --json`,
		Annotations: jsonAnnotations,
		Args:        noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			all, err := e.client().Revisions(cmd.Context())
			if err != nil {
				return err
			}
			return e.show(all, func(p *term.Printer) {
				t := term.NewTable("REVISION", "SINCE", "")
				for _, r := range all {
					now := ""
					if r.Effective {
						now = "effective"
					}
					t.Add(api.Printable(r.Revision), r.At.Local().Format(time.DateTime), now)
				}
				p.Table(t)
			})
		},
	}
}

func rollbackCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "rollback [REVISION]",
		Short: "Go back to a configuration that was effective",
		Long: `Apply a configuration that was effective before, whatever its files are now: the last other
one, or the one with a revision that "shaperd revisions" lists, of which the first letters
are enough. It is effective until the next reload or restart, which read the files again;
"shaperd status" says so until then. Buckets keep their backlog. Files that a configuration
names, such as lists of a group, are read as they are now.`,
		Example: `  shaperd rollback
  shaperd rollback 5f0c61`,
		Annotations: changeAnnotations,
		Args:        wantArgs("[REVISION]"),
		RunE: func(cmd *cobra.Command, args []string) error {
			var r api.SetRevision
			if len(args) > 0 {
				r.Revision = args[0]
			}
			status, err := e.client().Rollback(cmd.Context(), r)
			if err != nil {
				return err
			}
			return e.show(status, func(p *term.Printer) { p.Line("Revision %s is effective.", api.Printable(status.Revision)) })
		},
	}
}
