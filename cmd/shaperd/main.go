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
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"shaperd/control"
	"shaperd/shaper/config"
)

// env is what a run of the command has from the outside.
type env struct {
	stdout, stderr io.Writer
	reload         <-chan os.Signal // what has the daemon reload; nil is SIGHUP
	force          <-chan os.Signal // ends a drain at once; nil is a second SIGTERM or SIGINT
	loadTimeout    time.Duration    // of files; 0 is the usual one
	flags          *rootFlags
}

// rootFlags are for all verbs.
type rootFlags struct {
	control string // where the daemon listens, and verbs ask it; "" is nowhere
	json    bool   // print what the daemon answers
}

// Exit codes.
const (
	exitFailure  = 1
	exitUsage    = 2
	exitNoDaemon = 3
)

func main() {
	// One more than usual: the pacing thread keeps one for itself, see leaky.Pacer.
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + 1)
	err := run(context.Background(), env{stdout: os.Stdout, stderr: os.Stderr}, os.Args[1:])
	if err != nil {
		fmt.Fprintf(os.Stderr, "shaperd: %v\n", err)
	}
	os.Exit(exitCode(err))
}

// untilSignal is ctx until the first SIGTERM or SIGINT. Verbs that end in an orderly way use
// it; all others, which may wait for a file or a pipe, end as the signal has it.
func untilSignal(ctx context.Context) (_ context.Context, stop func()) {
	return signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
}

func exitCode(err error) int {
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		return exitUsage
	case errors.Is(err, control.ErrNoDaemon):
		return exitNoDaemon
	}
	return exitFailure
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

// Annotations of verbs.
const (
	printsJSON = "json"   // it knows --json
	orders     = "orders" // what it changes outlives a restart
)

// knowsJSON reports whether cmd, or a verb below it, prints JSON.
func knowsJSON(cmd *cobra.Command) bool {
	return cmd.Annotations[printsJSON] != "" || slices.ContainsFunc(cmd.Commands(), knowsJSON)
}

// rootCommand is all verbs.
func rootCommand(e env) *cobra.Command {
	root := &cobra.Command{
		Use:     "shaperd",
		Version: version,
		Short:   "Hold traffic to what a fragile server can bear",
		Long: `Hold traffic on its way to a fragile server to what the server can bear. "run" is the
daemon; "status" says how it is doing, "explain" why somebody is slowed, "set limit"
and "bypass" change that without a restart.

Exits with 0 when all is well, with 1 on a failure, or when "status" finds one, with 2 when the command line is
wrong, and with 3 when no daemon answers.`,
		Example: `  shaperd status
  shaperd explain --source 192.0.2.7 --to tcp/5432
  shaperd set limit per-source rate=20Mbit/s --for 10m`,
		SilenceUsage:       true,
		SilenceErrors:      true,
		DisableSuggestions: true, // see meant
	}
	if path, ok := os.LookupEnv("SHAPERD_CONTROL"); ok {
		e.flags.control = path
	}
	root.PersistentFlags().StringVar(&e.flags.control, "control", e.flags.control, "`socket` of the daemon; also in SHAPERD_CONTROL")
	root.PersistentFlags().BoolVar(&e.flags.json, "json", false, "print JSON, as the API of the socket has it")
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddGroup(&cobra.Group{ID: groupSee, Title: "See:"}, &cobra.Group{ID: groupSteer, Title: "Steer:"}, &cobra.Group{ID: groupHost, Title: "On this host:"})
	root.SetHelpCommandGroupID(groupHost)
	for group, verbs := range map[string][]*cobra.Command{
		groupSee: {
			statusCommand(e), topCommand(e), limitsCommand(e), keysCommand(e), whoCommand(e), connectionsCommand(e),
			downstreamsCommand(e), explainCommand(e), blocksCommand(e), eventsCommand(e),
		},
		groupSteer: {
			setCommand(e), unsetCommand(e), modeCommand(e, "observe"), modeCommand(e, "enforce"), blockCommand(e), unblockCommand(e),
			bypassCommand(e), reloadCommand(e), drainCommand(e),
		},
		groupHost: {
			runCommand(e), checkCommand(e), detachCommand(e), rulesCommand(e), doctorCommand(e), versionCommand(e), completionCommand(e), manCommand(e),
		},
	} {
		for _, verb := range verbs {
			verb.GroupID = group
			root.AddCommand(verb)
		}
	}
	return root
}

// The groups of verbs in the help.
const (
	groupSee   = "see"
	groupSteer = "steer"
	groupHost  = "host"
)

// run is the whole command. Its error is a usageError when the arguments are
// wrong, and says where help is.
func run(ctx context.Context, e env, args []string) error {
	understood := false
	e.flags = &rootFlags{control: control.DefaultSocket}
	root := rootCommand(e)
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if e.flags.json && !knowsJSON(cmd) {
			return fmt.Errorf("--json: %s prints no JSON", cmd.CommandPath())
		}
		understood = true
		return nil
	}
	help := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		root.PersistentFlags().Lookup("json").Hidden = cmd.HasParent() && !knowsJSON(cmd)
		help(cmd, args)
	})
	root.PersistentPostRun = func(cmd *cobra.Command, _ []string) {
		if cmd.Annotations[orders] != "" {
			e.tellUnsaved(cmd.Context())
		}
	}
	root.SetArgs(args)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	cmd, err := root.ExecuteContextC(ctx)
	var usage usageError
	if err != nil && !understood || errors.As(err, &usage) {
		return usageError{fmt.Errorf("%w%s\nSee %q", err, meant(cmd, err), cmd.CommandPath()+" --help")}
	}
	return err
}

// meant says which verb of cmd was probably meant, where err is that it has no such one.
func meant(cmd *cobra.Command, err error) string {
	var typed string
	if _, err := fmt.Sscanf(err.Error(), "unknown command %q", &typed); err != nil {
		return ""
	}
	var verbs []string
	for _, verb := range cmd.Commands() {
		verbs = append(verbs, verb.Name())
	}
	if near := config.Nearest(typed, verbs); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	return ""
}
