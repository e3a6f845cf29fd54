package cli

import (
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/internal/daemon"
)

func runCommand(e env) *cobra.Command {
	o := daemon.Options{Log: e.stderr, Reload: e.reload, Force: e.force, LoadTimeout: e.loadTimeout, Version: e.version}
	var logFormat, logLevel string
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the daemon",
		Long: `Run the daemon in the foreground. SIGHUP reloads the configuration; a configuration with
errors changes nothing. SIGTERM stops the daemon gracefully: it refuses new connections,
and open ones may continue for --drain-timeout. A second SIGTERM resets them.`,
		Example: `  shaperd run --config shaperd.toml`,
		Args:    noArgs("; use --config to name the configuration"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.DrainTimeout < 0 {
				return usageError{fmt.Errorf("--drain-timeout %v: must not be negative", o.DrainTimeout)}
			}
			var err error
			if o.LogLevel, o.LogJSON, err = parseLog(logLevel, logFormat); err != nil {
				return err
			}
			o.Control = e.flags.control
			o.ControlRequired = cmd.Flags().Changed("control") || os.Getenv("SHAPERD_CONTROL") != ""
			return daemon.Run(cmd.Context(), o)
		},
	}
	cmd.Flags().StringVar(&o.Config, "config", defaultConfig, "configuration `file`; conf.d/*.toml next to it is read too")
	cmd.Flags().StringVar(&logFormat, "log-format", "text", "log `format`: text or json")
	cmd.Flags().StringVar(&logLevel, "log-level", "info", "minimum `level` to log: debug, info, warn or error")
	cmd.Flags().StringVar(&o.State, "state", "", "save bucket state in `file`, and runtime overrides in file.overrides, for the next start (default: not saved)")
	cmd.Flags().DurationVar(&o.DrainTimeout, "drain-timeout", 30*time.Second, "reset connections that are open this `duration` after SIGTERM")
	return cmd
}

// parseLog parses the flags of the log.
func parseLog(levelName, format string) (level slog.Level, asJSON bool, err error) {
	if level.UnmarshalText([]byte(levelName)) != nil {
		return 0, false, usageError{fmt.Errorf("--log-level %q: must be debug, info, warn or error", levelName)}
	}
	if format != "text" && format != "json" {
		return 0, false, usageError{fmt.Errorf("--log-format %q: must be text or json", format)}
	}
	return level, format == "json", nil
}
