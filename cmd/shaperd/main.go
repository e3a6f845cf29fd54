// Command shaperd holds traffic on its way to a fragile server to what the
// server can bear.
package main

import (
	"context"
	"errors"
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
	force          <-chan os.Signal // ends a drain at once
}

// Exit codes.
const (
	exitFailure = 1
	exitUsage   = 2
)

func main() {
	// One more than usual: the pacing thread keeps one for itself, see leaky.Pacer.
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + 1)
	ctx, stop := context.WithCancel(context.Background())
	first, force, reload := make(chan os.Signal, 1), make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(first, syscall.SIGTERM, syscall.SIGINT)
	signal.Notify(reload, syscall.SIGHUP)
	go func() {
		<-first
		signal.Notify(force, syscall.SIGTERM, syscall.SIGINT)
		stop()
	}()
	err := run(ctx, env{stdout: os.Stdout, stderr: os.Stderr, reload: reload, force: force}, os.Args[1:])
	var usage usageError
	switch {
	case errors.As(err, &usage):
		fmt.Fprintf(os.Stderr, "shaperd: %v\nSee \"shaperd --help\".\n", err)
		os.Exit(exitUsage)
	case err != nil:
		fmt.Fprintf(os.Stderr, "shaperd: %v\n", err)
		os.Exit(exitFailure)
	}
}

// noArgs refuses arguments, and says what was probably meant.
func noArgs(hint string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			return fmt.Errorf("%s takes no arguments, and not %q%s", cmd.Name(), args[0], hint)
		}
		return nil
	}
}

// usageError is a command line that makes no sense.
type usageError struct{ error }

// run is the whole command. Its error is a usageError when the arguments are
// wrong.
func run(ctx context.Context, e env, args []string) error {
	understood := false
	root := &cobra.Command{
		Use:              "shaperd",
		Version:          version,
		Short:            "Hold traffic to what a fragile server can bear",
		SilenceUsage:     true,
		SilenceErrors:    true,
		PersistentPreRun: func(*cobra.Command, []string) { understood = true },
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(runCommand(e), checkCommand(e), explainCommand(e), detachCommand(e), rulesCommand(e), versionCommand(e))
	root.SetArgs(args)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	err := root.ExecuteContext(ctx)
	if err != nil && !understood {
		return usageError{err}
	}
	return err
}
