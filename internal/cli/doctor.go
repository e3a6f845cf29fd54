package cli

import (
	"cmp"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/internal/doctor"
	"shaperd.dev/shaperd/internal/term"
)

func doctorCommand(e env) *cobra.Command {
	var file string
	var probe bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Diagnose the host and the configuration, and suggest fixes",
		Long: `Diagnose this host and the configuration: kernel, privileges, system limits, ports, files
and the systemd unit. If limits are shared, also check whether the ledger answers in
time, and whether all hosts have the same limits. Prints each problem with a command
that fixes it.

Works with or without a running daemon. Some checks require root. Exits with 1 if a check
fails; a warning is not a failure.`,
		Example: `  shaperd doctor --config shaperd.toml
  shaperd doctor --probe --json | jq '.checks[] | select(.state == "fail")'`,
		Args:        noArgs("; use --config to name the configuration"),
		Annotations: jsonAnnotations,
		RunE: func(cmd *cobra.Command, _ []string) error {
			file, err := filepath.Abs(file)
			if err != nil {
				return fmt.Errorf("--config %s: %w", file, err)
			}
			socket := e.flags.control
			if socket != "" {
				if socket, err = filepath.Abs(socket); err != nil {
					return fmt.Errorf("--control %s: %w", e.flags.control, err)
				}
			}
			found := doctor.Run(cmd.Context(), file, socket, probe)
			failed := 0
			for _, f := range found {
				if f.State == doctor.Fail {
					failed++
				}
			}
			if e.flags.json {
				err = e.printJSON(map[string]any{"ok": failed == 0, "checks": found})
			} else {
				err = printFindings(e.stdout, found, term.UseColor(e.stdout))
			}
			if err == nil && failed > 0 {
				err = fmt.Errorf("%d of %d checks failed", failed, len(found))
			}
			return err
		},
	}
	cmd.Flags().StringVar(&file, "config", defaultConfig, "configuration `file`; conf.d/*.toml next to it is read too")
	cmd.Flags().BoolVar(&probe, "probe", false, "also connect to each TCP downstream once")
	return cmd
}

// printFindings prints each finding, and its fix on a line of its own.
func printFindings(w io.Writer, all []doctor.Finding, colors bool) error {
	paint := map[doctor.State]string{doctor.OK: "\x1b[32m", doctor.Warn: "\x1b[33m", doctor.Fail: "\x1b[31m", doctor.Skip: "\x1b[2m"}
	width := 0
	for _, f := range all {
		width = max(width, len(f.Name))
	}
	var out strings.Builder
	for _, f := range all {
		word := fmt.Sprintf("%-4s", f.State)
		if colors {
			word = paint[f.State] + word + "\x1b[0m"
		}
		indent := strings.Repeat(" ", 4+2+width+2)
		fmt.Fprintf(&out, "%s  %-*s  %s\n", word, width, f.Name, strings.ReplaceAll(f.Text, "\n", "\n"+indent))
		if f.Fix != "" {
			fmt.Fprintf(&out, "%s%s %s\n", indent, cmp.Or(map[bool]string{true: "\x1b[1m->\x1b[0m"}[colors], "->"), f.Fix)
		}
	}
	_, err := io.WriteString(w, out.String())
	return err
}
