package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/conn/tproxy"
	"shaperd.dev/shaperd/internal/daemon"
	"shaperd.dev/shaperd/internal/plan"
)

func rulesCommand(e env) *cobra.Command {
	var file string
	var install, remove bool
	var mark uint32
	cmd := &cobra.Command{
		Use:   "rules",
		Short: "Print, install or remove the rules of transparent listeners",
		Long: `Print the nft and ip commands that redirect packets to the transparent listeners of a
configuration, and as comments the commands that remove these rules. With --install or
--remove, execute them. The daemon installs the rules itself unless [transparent] rules is
"manual". The rules stay when the daemon stops, so that no traffic bypasses it meanwhile.`,
		Example: `  shaperd rules --config shaperd.toml
  shaperd rules --remove`,
		Args: noArgs("; use --config to name the configuration"),
		RunE: func(*cobra.Command, []string) error {
			if install && remove {
				return usageError{errors.New("--install and --remove cannot be combined")}
			}
			if mark != 0 {
				if !remove {
					return usageError{errors.New("--mark requires --remove")}
				}
				return removeRules(e, mark)
			}
			l, err := plan.Load(file)
			if err != nil {
				return err
			}
			r := l.TransparentRules()
			switch {
			case remove:
				return removeRules(e, r.Mark)
			case r.Empty():
				return fmt.Errorf("%s: no listener is transparent, so there are no rules", file)
			case install:
				return daemon.PermissionHint(r.Install())
			}
			_, err = fmt.Fprint(e.stdout, r.Commands(), commentOut(r.RemovalCommands()))
			return err
		},
	}
	cmd.Flags().StringVar(&file, "config", defaultConfig, "configuration `file`")
	cmd.Flags().Uint32Var(&mark, "mark", 0, "with --remove, remove the rules with this `mark`")
	cmd.Flags().BoolVar(&install, "install", false, "install the rules, replacing earlier ones")
	cmd.Flags().BoolVar(&remove, "remove", false, "remove the installed rules")
	return cmd
}

func removeRules(e env, mark uint32) error {
	there, err := tproxy.Installed(mark)
	if err == nil {
		err = tproxy.Remove(mark)
	}
	if err == nil && !there {
		fmt.Fprintf(e.stdout, "there are no rules with mark %d\n", mark)
	}
	return daemon.PermissionHint(err)
}

// commentOut comments out the lines of a script.
func commentOut(script string) string {
	out := ""
	for line := range strings.Lines(script) {
		out += "# " + line
	}
	return out
}
