// Package cli is the command line: a file per verb, which parses its flags, calls the daemon's API or
// the package that does the work, and prints the result. Everything runs in the goroutine of [Run].
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// env is the environment of one run of the command. Tests replace parts of it.
type env struct {
	stdin          io.Reader // nil is none
	stdout, stderr io.Writer
	reload         <-chan os.Signal // triggers a reload; nil means SIGHUP
	force          <-chan os.Signal // ends a drain at once; nil means a second SIGTERM or SIGINT
	loadTimeout    time.Duration    // for reading configuration files; 0 means the default
	version        string           // of this program
	flags          *rootFlags
}

// rootFlags are the flags of all verbs.
type rootFlags struct {
	control string // control socket of the daemon; "" means none
	json    bool   // print JSON instead of text
}

// Exit codes.
const (
	exitFailure  = 1
	exitUsage    = 2
	exitNoDaemon = 3
)

// Run executes the command line args of this process, and returns its exit code. version is that of
// the program.
func Run(args []string, version string) int {
	// One more than usual: the first pacing thread keeps one for itself, see package pacer.
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + 1)
	err := run(context.Background(), env{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, version: version}, args)
	if err != nil && err.Error() != "" {
		fmt.Fprintf(os.Stderr, "shaperd: %v\n", err)
	}
	return exitCode(err)
}

// untilSignal returns a context that the first SIGTERM or SIGINT cancels. Verbs that shut down
// in an orderly way use it. All others keep the default action of signals, so that one that
// waits for a file or a pipe can be interrupted.
func untilSignal(ctx context.Context) (_ context.Context, stop func()) {
	return signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT)
}

func exitCode(err error) int {
	var usage usageError
	var code exitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &code):
		return int(code)
	case errors.As(err, &usage):
		return exitUsage
	case errors.Is(err, api.ErrNoDaemon):
		return exitNoDaemon
	}
	return exitFailure
}

// exitError is an exit code, of a verb that has printed what is wrong.
type exitError int

func (exitError) Error() string { return "" }

// usageError reports an invalid command line.
type usageError struct{ error }

// Annotations of verbs.
const (
	jsonAnnotation    = "json"    // supports --json
	persistAnnotation = "persist" // makes a change that survives a restart
)

// supportsJSON reports whether cmd or one of its subcommands can print JSON.
func supportsJSON(cmd *cobra.Command) bool {
	return cmd.Annotations[jsonAnnotation] != "" || slices.ContainsFunc(cmd.Commands(), supportsJSON)
}

// rootCommand returns the command with all verbs.
func rootCommand(e env) *cobra.Command {
	root := &cobra.Command{
		Use:     "shaperd",
		Version: e.version,
		Short:   "Limit traffic to a fragile server to what it can handle",
		Long: `Limit traffic to a fragile server to what it can handle. "run" runs the daemon,
"status" shows its health, "explain" shows why a source is throttled, and "set limit"
and "bypass" change limits without a restart.

Exit codes: 0 on success, 1 on a failure or when "status" finds a problem, 2 on an
invalid command line, 3 when no daemon answers. "status --check" exits with the codes of
monitoring plugins.`,
		Example: `  shaperd status
  shaperd explain --source 192.0.2.7 --to tcp/5432
  shaperd set limit per-source rate=20Mbit/s --for 10m`,
		SilenceUsage:       true,
		SilenceErrors:      true,
		DisableSuggestions: true, // see suggestVerb
	}
	if path, ok := os.LookupEnv("SHAPERD_CONTROL"); ok {
		e.flags.control = path
	}
	root.PersistentFlags().StringVar(&e.flags.control, "control", e.flags.control, "control `socket` of the daemon; SHAPERD_CONTROL sets it too")
	root.PersistentFlags().BoolVar(&e.flags.json, "json", false, "print the response of the API as JSON")
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddGroup(&cobra.Group{ID: groupObserve, Title: "Observe:"}, &cobra.Group{ID: groupControl, Title: "Control:"}, &cobra.Group{ID: groupHost, Title: "On this host:"})
	root.SetHelpCommandGroupID(groupHost)
	for group, verbs := range map[string][]*cobra.Command{
		groupObserve: {
			statusCommand(e), topCommand(e), limitsCommand(e), keysCommand(e), talkersCommand(e), connectionsCommand(e),
			downstreamsCommand(e), sharedCommand(e), explainCommand(e), quotaCommand(e), blocksCommand(e), penaltiesCommand(e), eventsCommand(e), revisionsCommand(e), planCommand(e),
		},
		groupControl: {
			setCommand(e), unsetCommand(e), resetCommand(e), rollbackCommand(e), modeCommand(e, shaper.Observe), modeCommand(e, shaper.Enforce), blockCommand(e), unblockCommand(e),
			holdCommand(e), resumeCommand(e), bypassCommand(e), reloadCommand(e), stopCommand(e),
		},
		groupHost: {
			runCommand(e), checkCommand(e), convertCommand(e), tryCommand(e), detachCommand(e), rulesCommand(e), doctorCommand(e), versionCommand(e), completionCommand(e), manCommand(e),
		},
	} {
		for _, verb := range verbs {
			verb.GroupID = group
			root.AddCommand(verb)
		}
	}
	root.InitDefaultHelpCmd()
	if help, _, err := root.Find([]string{"help"}); err == nil {
		help.Use = "help [COMMAND]"
		help.Short = "Show the help of a command"
		help.Long = "Show the help of a command, as COMMAND --help does. Without COMMAND, list all commands."
		help.Example = "  shaperd help set limit"
	}
	return root
}

// Groups of verbs in the help.
const (
	groupObserve = "observe"
	groupControl = "control"
	groupHost    = "host"
)

// run executes the command line args. When they are invalid, the error is a usageError that
// names the command that prints help.
func run(ctx context.Context, e env, args []string) error {
	parsed := false
	e.flags = &rootFlags{control: api.DefaultSocket}
	root := rootCommand(e)
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if e.flags.json && !supportsJSON(cmd) {
			return fmt.Errorf("%s does not support --json", strings.TrimPrefix(cmd.CommandPath(), "shaperd "))
		}
		parsed = true
		return nil
	}
	help := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		root.PersistentFlags().Lookup("json").Hidden = cmd.HasParent() && !supportsJSON(cmd)
		help(cmd, args)
	})
	root.PersistentPostRun = func(cmd *cobra.Command, _ []string) {
		if cmd.Annotations[persistAnnotation] != "" {
			e.warnUnsaved(cmd.Context())
		}
	}
	root.SetArgs(args)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	cmd, err := root.ExecuteContextC(ctx)
	var usage usageError
	if err != nil && !parsed || errors.As(err, &usage) {
		return usageError{fmt.Errorf("%w%s\nSee %q", err, suggestVerb(cmd, err), cmd.CommandPath()+" --help")}
	}
	return err
}

// otherVerbs are verbs that other programs have, and what to use instead.
var otherVerbs = map[string]string{
	"drain": `use "shaperd stop", or "shaperd downstreams drain"`,
	"show":  `use "shaperd status"`,
	"who":   `use "shaperd talkers"`,
}

// suggestVerb returns the end of an error: which verb of cmd was probably meant. It returns ""
// when err does not report an unknown verb, or none is similar.
func suggestVerb(cmd *cobra.Command, err error) string {
	var typed string
	if _, err := fmt.Sscanf(err.Error(), "unknown command %q", &typed); err != nil {
		return ""
	}
	if use, ok := otherVerbs[typed]; ok && !cmd.HasParent() {
		return "; " + use
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
