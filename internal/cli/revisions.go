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
		Long: `List the last ten configurations that were effective, newest first. "run" keeps them if it
has --state. "shaperd rollback" returns to one of them.`,
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
		Short: "Return to an earlier configuration",
		Long: `Apply a configuration that was effective before. Without REVISION, it is the last one that
differs from the effective configuration. REVISION is in "shaperd revisions"; its first
letters are enough. The state of the configuration files does not matter. However, files
that the configuration names, such as lists of a group, are read in their present state.

The configuration is effective until the next reload or restart, which read the files
again. Until then, "shaperd status" shows the rollback. Buckets keep their backlog.`,
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
