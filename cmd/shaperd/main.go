// Command shaperd holds traffic on its way to a fragile server to what the
// server can bear.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"github.com/spf13/cobra"
)

// env is what a run of the command has from the outside.
type env struct {
	stdout, stderr io.Writer
	reload         <-chan os.Signal
}

func main() {
	// One more than usual: the pacing thread keeps one for itself, see leaky.Pacer.
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + 1)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	reload := make(chan os.Signal, 1)
	signal.Notify(reload, syscall.SIGHUP)
	if err := run(ctx, env{stdout: os.Stdout, stderr: os.Stderr, reload: reload}, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run is the whole command.
func run(ctx context.Context, e env, args []string) error {
	root := &cobra.Command{
		Use:           "shaperd",
		Short:         "Hold traffic to what a fragile server can bear",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(runCommand(e), checkCommand(e), explainCommand(e), versionCommand(e))
	root.SetArgs(args)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	return root.ExecuteContext(ctx)
}
