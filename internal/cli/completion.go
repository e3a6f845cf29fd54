package cli

import (
	"fmt"

	"github.com/spf13/cobra"
)

func completionCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "completion bash|zsh|fish",
		Short: "Print a completion script for a shell",
		Long: `Print a completion script for a shell. The script completes commands, flags, and limits
of the running daemon. Packages and "make install" install it.`,
		Example: `  source <(shaperd completion bash)
  shaperd completion fish > ~/.config/fish/completions/shaperd.fish`,
		Args:      wantArgs("bash|zsh|fish"),
		ValidArgs: []string{"bash", "zsh", "fish"},
		RunE: func(cmd *cobra.Command, args []string) error {
			switch root := cmd.Root(); args[0] {
			case "bash":
				return root.GenBashCompletionV2(e.stdout, true)
			case "zsh":
				return root.GenZshCompletion(e.stdout)
			case "fish":
				return root.GenFishCompletion(e.stdout, true)
			}
			return usageError{fmt.Errorf("unsupported shell %q: use bash, zsh or fish", args[0])}
		},
	}
}
