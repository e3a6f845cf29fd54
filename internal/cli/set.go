package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper"
)

func setCommand(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "set",
		Short:   "Override a limit of the running daemon",
		Long:    `Override a limit of the running daemon: see "shaperd set limit".`,
		Example: `  shaperd set limit per-source rate=20Mbit/s --for 10m`,
		RunE: func(*cobra.Command, []string) error {
			return usageError{errors.New("set requires limit LIMIT KEY=VALUE..., such as: shaperd set limit per-source rate=20Mbit/s")}
		},
	}
	cmd.AddCommand(setLimitCommand(e))
	return cmd
}

func setLimitCommand(e env) *cobra.Command {
	var forTime durationFlag
	var untilReload bool
	var save bool
	var file, source string
	cmd := &cobra.Command{
		Use:   "limit LIMIT KEY=VALUE...",
		Short: "Override keys of a limit",
		Long: `Override keys of a limit, and print the limit before and after. Write values as in the
configuration. An override ends after --for, at the next reload (--until-reload), or with
"shaperd unset limit". Without --until-reload it survives reloads, and also restarts if
"run" has --state. When the time of --for has passed, the previous override is effective
again. Buckets keep their backlog: a higher rate causes no burst.

With --source, only the buckets of these sources have the values, as with "values" in the
configuration. The key of the limit must have "source".

With --save, which requires root, write the override to a file in the conf.d directory next
to the configuration, and reload. "shaperd unset limit --saved" removes that file.`,
		Example: `  shaperd set limit per-source rate=20Mbit/s --for 10m
  shaperd set limit per-source rate=50Mbit/s --source 192.0.2.7 --for 1h
  shaperd set limit database max_connections=50 queue_timeout=5s --save`,
		Annotations:       changeAnnotations,
		Args:              wantArgs("LIMIT", "KEY=VALUE..."),
		ValidArgsFunction: e.completeLimits,
		RunE: func(cmd *cobra.Command, args []string) error {
			set := map[string]string{}
			for _, arg := range args[1:] {
				key, value, ok := strings.Cut(arg, "=")
				if !ok || key == "" || value == "" {
					return usageError{fmt.Errorf("%q: write KEY=VALUE, such as rate=20Mbit/s", arg)}
				}
				if _, duplicate := set[key]; duplicate {
					return usageError{fmt.Errorf("duplicate key %s", key)}
				}
				set[key] = value
			}
			if save && (forTime != 0 || untilReload) {
				return usageError{errors.New("--save is permanent: it cannot be combined with --for or --until-reload")}
			}
			if save && source != "" {
				return usageError{errors.New("--save cannot be combined with --source: write values of sources into the file that values of the limit names")}
			}
			if save {
				return saveLimit(cmd.Context(), e, file, args[0], set)
			}
			return setLimit(cmd.Context(), e, args[0], api.SetLimit{Source: source, Set: set, Duration: forTime.seconds(), UntilReload: untilReload})
		},
	}
	cmd.Flags().StringVar(&source, "source", "", "override only the buckets of this source `prefix`")
	addSetFlags(cmd, &forTime, &untilReload)
	cmd.Flags().BoolVar(&save, "save", false, "write the override to a file in conf.d, and reload")
	addConfigFlag(cmd, &file)
	return cmd
}

// setLimit overrides keys of a limit, and prints the result.
func setLimit(ctx context.Context, e env, name string, s api.SetLimit) error {
	if s.Duration != 0 && s.UntilReload {
		return usageError{errors.New("--for and --until-reload cannot be combined")}
	}
	c := e.client()
	was, err := c.Limit(ctx, name)
	if err != nil {
		return limitError(ctx, c, name, err)
	}
	is, err := c.SetLimit(ctx, name, s)
	if err != nil {
		return limitError(ctx, c, name, err)
	}
	status, err := c.Status(ctx)
	if err != nil {
		return err
	}
	return e.show(is, func(p *term.Printer) {
		printLimitChange(p, was, is)
		if why := cmp.Or(observeReason(status), attachmentObserveReason(status, is)); why != "" && s.Set["observe"] == "false" {
			p.Line("%s", p.Red("NO EFFECT NOW: "+why))
		}
		for _, o := range status.Overrides {
			if o.Limit == name {
				p.Line("set  %s, %s", overrideText(o), overrideUntil(o, status.Now))
			}
		}
	})
}

// overrideText describes what an override sets.
func overrideText(o api.Override) string {
	if o.Source != "" {
		return formatOverrides(o.Set) + " for " + api.Printable(o.Source)
	}
	return formatOverrides(o.Set)
}

// addSetFlags adds --for and --until-reload to a verb that overrides keys of a limit.
func addSetFlags(cmd *cobra.Command, forTime *durationFlag, untilReload *bool) {
	addForFlag(cmd, forTime, "override", `until "shaperd unset limit"`)
	cmd.Flags().BoolVar(untilReload, "until-reload", false, "end the override with the next reload")
}

// overrideUntil returns when an override ends, in words.
func overrideUntil(o api.Override, now time.Time) string {
	if o.UntilReload {
		return "until the next reload"
	}
	return term.Until(o.Until, now, `until "shaperd unset limit"`)
}

// observeReason returns why no limit is enforced, whatever its own mode. It returns "" when
// limits are enforced.
func observeReason(s api.Status) string {
	switch {
	case s.Mode == shaper.Observe.String():
		return `the daemon observes: [daemon] observe = true applies to all limits`
	case s.Bypass != nil:
		return `bypass is on: end it with "shaperd bypass off"`
	}
	return ""
}

// attachmentObserveReason returns at which of its attachments l only observes, whatever its own
// mode. It returns "" when there are none.
func attachmentObserveReason(s api.Status, l api.Limit) string {
	var names []string
	for _, a := range s.Attachments {
		if a.Mode == shaper.AttachObserve.String() && slices.Contains(l.Attachments, a.Name) && !slices.Contains(names, strconv.Quote(a.Name)) {
			names = append(names, strconv.Quote(a.Name))
		}
	}
	switch {
	case len(names) == 0:
		return ""
	case len(names) == len(l.Attachments):
		return fmt.Sprintf(`attachment %s observes: its observe = true applies to all limits there`, strings.Join(names, ", "))
	}
	return fmt.Sprintf(`at attachment %s, which observes: its observe = true applies to all limits there`, strings.Join(names, ", "))
}

// printLimitChange prints a limit before and after a change.
func printLimitChange(p *term.Printer, was, is api.Limit) {
	p.Line("limit %s", is.Name)
	p.Line("was  %s, mode %s", api.Printable(was.Summary), api.Printable(was.Mode))
	p.Line("now  %s, mode %s", api.Printable(is.Summary), api.Printable(is.Mode))
}

func unsetCommand(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "unset",
		Short:   "Remove overrides of a limit",
		Long:    `Remove overrides of a limit: see "shaperd unset limit".`,
		Example: `  shaperd unset limit per-source`,
		RunE: func(*cobra.Command, []string) error {
			return usageError{errors.New("unset requires limit LIMIT, such as: shaperd unset limit per-source")}
		},
	}
	cmd.AddCommand(unsetLimitCommand(e))
	return cmd
}

func unsetLimitCommand(e env) *cobra.Command {
	var saved bool
	var file, source string
	cmd := &cobra.Command{
		Use:   "limit LIMIT [KEY...]",
		Short: "Remove overrides of a limit",
		Long: `Remove the overrides of a limit, or only those of some keys. The configured values are
effective again. With --source, remove only overrides for these sources. With --saved,
remove the file that "shaperd set limit --save" has written, and reload.`,
		Example: `  shaperd unset limit per-source
  shaperd unset limit per-source rate burst
  shaperd unset limit per-source --source 192.0.2.7
  shaperd unset limit per-source --saved`,
		Annotations:       changeAnnotations,
		Args:              wantArgs("LIMIT", "[KEY...]"),
		ValidArgsFunction: e.completeLimits,
		RunE: func(cmd *cobra.Command, args []string) error {
			if saved {
				if len(args) > 1 {
					return usageError{errors.New("--saved applies to all keys of a limit")}
				}
				return unsaveLimit(cmd.Context(), e, file, args[0])
			}
			c := e.client()
			was, err := c.Limit(cmd.Context(), args[0])
			if err != nil {
				return limitError(cmd.Context(), c, args[0], err)
			}
			is, err := c.UnsetLimit(cmd.Context(), args[0], source, args[1:]...)
			if err != nil {
				return err
			}
			return e.show(is, func(p *term.Printer) {
				printLimitChange(p, was, is)
				printRemainingOverrides(p, is)
			})
		},
	}
	cmd.Flags().StringVar(&source, "source", "", "remove only overrides of this source `prefix`")
	cmd.Flags().BoolVar(&saved, "saved", false, "remove the file of saved overrides, and reload")
	addConfigFlag(cmd, &file)
	return cmd
}

// printRemainingOverrides prints the overrides that a limit still has, at runtime and in files.
func printRemainingOverrides(p *term.Printer, l api.Limit) {
	if len(l.Override) > 0 {
		p.Line("set  %s", formatOverrides(l.Override))
	}
	for _, key := range slices.Sorted(maps.Keys(l.FileOverride)) {
		p.Line("%s is still overridden in %s", key, api.Printable(l.FileOverride[key]))
	}
}

// addConfigFlag adds --config to a verb with --save or --saved.
func addConfigFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, "config", defaultConfig, "configuration `file` of the daemon, with --save or --saved")
}

// modeCommand returns the verb that switches a limit to a mode.
func modeCommand(e env, mode shaper.Mode) *cobra.Command {
	short, long := "Switch a limit to dry run: count, do not enforce", "Switch a limit to dry run: it counts the traffic that it would delay or refuse, and\nenforces nothing"
	if mode == shaper.Enforce {
		short, long = "Enforce a limit that observes", `Enforce a limit that observes`
	}
	var forTime durationFlag
	var untilReload bool
	cmd := &cobra.Command{
		Use:   mode.String() + " LIMIT",
		Short: short,
		Long:  long + fmt.Sprintf(`. Same as "shaperd set limit LIMIT observe=%t".`, mode),
		Example: fmt.Sprintf(`  shaperd %s per-source
  shaperd %[1]s per-source --for 10m`, mode),
		Annotations:       changeAnnotations,
		Args:              wantArgs("LIMIT"),
		ValidArgsFunction: e.completeLimits,
		RunE: func(cmd *cobra.Command, args []string) error {
			return setLimit(cmd.Context(), e, args[0], api.SetLimit{Set: map[string]string{"observe": strconv.FormatBool(bool(mode))}, Duration: forTime.seconds(), UntilReload: untilReload})
		},
	}
	addSetFlags(cmd, &forTime, &untilReload)
	return cmd
}
