package main

import (
	"fmt"

	"github.com/spf13/cobra"
)

func completionCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:   "completion bash|zsh|fish",
		Short: "Print what completes command lines in a shell",
		Long: `Print a script that completes command lines of shaperd in a shell, with the limits of
the running daemon. "make install" puts it where shells look for it.`,
		Example: `  source <(shaperd completion bash)
  shaperd completion fish > ~/.config/fish/completions/shaperd.fish`,
		Args:      args("bash|zsh|fish"),
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
			return usageError{fmt.Errorf("completion knows bash, zsh and fish, and not %q", args[0])}
		},
	}
}
