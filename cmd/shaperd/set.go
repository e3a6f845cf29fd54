package main

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

	"shaperd/control"
)

func setCommand(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "set",
		Short:   "Change a limit of the running daemon",
		Long:    `Change a limit of the running daemon: see "shaperd set limit".`,
		Example: `  shaperd set limit per-source rate=20Mbit/s --for 10m`,
		RunE: func(*cobra.Command, []string) error {
			return usageError{errors.New("set needs limit LIMIT KEY=VALUE..., such as: shaperd set limit per-source rate=20Mbit/s")}
		},
	}
	cmd.AddCommand(setLimitCommand(e))
	return cmd
}

func setLimitCommand(e env) *cobra.Command {
	var forTime span
	var untilReload bool
	var save bool
	var file string
	cmd := &cobra.Command{
		Use:   "limit LIMIT KEY=VALUE...",
		Short: "Change keys of a limit",
		Long: `Change keys of a limit, with values as the configuration has them, and print what the
limit was and is held to. It lasts for the time of --for, until the next reload with
--until-reload, or else until "shaperd unset limit": reloads do not end it, nor does a
restart where "run" has --state. When the time of --for is over, what was set before is
effective again. With --save it is written to a file in conf.d beside the configuration, which takes root,
and the daemon reloads. What buckets owe stays: a higher rate hands out no burst.
"shaperd unset limit" takes it back, with --saved what was saved.`,
		Example: `  shaperd set limit per-source rate=20Mbit/s --for 10m
  shaperd set limit database max_connections=50 queue_timeout=5s --save`,
		Annotations:       asOrder,
		Args:              args("LIMIT", "KEY=VALUE..."),
		ValidArgsFunction: e.completeLimits,
		RunE: func(cmd *cobra.Command, args []string) error {
			set := map[string]string{}
			for _, arg := range args[1:] {
				key, value, ok := strings.Cut(arg, "=")
				if !ok || key == "" || value == "" {
					return usageError{fmt.Errorf("%q: write KEY=VALUE, such as rate=20Mbit/s", arg)}
				}
				if _, twice := set[key]; twice {
					return usageError{fmt.Errorf("%s is given twice", key)}
				}
				set[key] = value
			}
			if save && (forTime != 0 || untilReload) {
				return usageError{errors.New("--save lasts: it takes neither --for nor --until-reload")}
			}
			if save {
				return saveLimit(cmd.Context(), e, file, args[0], set)
			}
			return setLimit(cmd.Context(), e, args[0], control.SetLimit{Set: set, For: forTime.seconds(), UntilReload: untilReload})
		},
	}
	setFlags(cmd, &forTime, &untilReload)
	cmd.Flags().BoolVar(&save, "save", false, "write it to a file in conf.d, and reload")
	configFlag(cmd, &file)
	return cmd
}

// setLimit sets keys of a limit, and tells what came of it.
func setLimit(ctx context.Context, e env, name string, s control.SetLimit) error {
	c := e.daemon()
	was, err := c.Limit(ctx, name)
	if err != nil {
		return ofLimit(ctx, c, name, err)
	}
	is, err := c.SetLimit(ctx, name, s)
	if err != nil {
		return ofLimit(ctx, c, name, err)
	}
	status, err := c.Status(ctx)
	if err != nil {
		return err
	}
	return e.show(is, func(p *page) {
		p.change(was, is)
		if why := cmp.Or(allObserve(status), attachmentsObserve(status, is)); why != "" && s.Set["observe"] == "false" {
			p.line("%s", p.red("NO EFFECT NOW: "+why))
		}
		for _, o := range status.Overrides {
			if o.Limit == name {
				p.line("set  %s, %s", settings(o.Set), untilOf(o, status.Now))
			}
		}
	})
}

// setFlags adds --for and --until-reload to a verb that sets keys of a limit.
func setFlags(cmd *cobra.Command, forTime *span, untilReload *bool) {
	forFlag(cmd, forTime, `until "shaperd unset limit"`)
	cmd.Flags().BoolVar(untilReload, "until-reload", false, "until the next reload")
	cmd.MarkFlagsMutuallyExclusive("for", "until-reload")
}

// untilOf tells how long something is set.
func untilOf(o control.Override, now time.Time) string {
	if o.UntilReload {
		return "until the next reload"
	}
	return until(o.Until, now, `until "shaperd unset limit"`)
}

// allObserve returns why no limit is enforced, though it does not observe itself; "" when that counts.
func allObserve(s control.Status) string {
	switch {
	case s.Mode == mode(true):
		return `the daemon observes: [daemon] observe = true is for all limits`
	case s.Bypass != nil:
		return `limits are bypassed until "shaperd bypass off"`
	}
	return ""
}

// attachmentsObserve says at which of its attachments l only observes, though it does not observe itself;
// "" at none.
func attachmentsObserve(s control.Status, l control.Limit) string {
	var names []string
	for _, a := range s.Attachments {
		if a.Mode == mode(true) && slices.Contains(l.Attachments, a.Name) && !slices.Contains(names, strconv.Quote(a.Name)) {
			names = append(names, strconv.Quote(a.Name))
		}
	}
	switch {
	case len(names) == 0:
		return ""
	case len(names) == len(l.Attachments):
		return fmt.Sprintf(`attachment %s observes: its observe = true is for all limits there`, strings.Join(names, ", "))
	}
	return fmt.Sprintf(`at attachment %s, which observes: its observe = true is for all limits there`, strings.Join(names, ", "))
}

// change tells what a limit was and is.
func (p *page) change(was, is control.Limit) {
	p.line("limit %s", is.Name)
	p.line("was  %s, mode %s", printable(was.HeldTo), printable(was.Mode))
	p.line("now  %s, mode %s", printable(is.HeldTo), printable(is.Mode))
}

func unsetCommand(e env) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "unset",
		Short:   "Take back what was set in a limit",
		Long:    `Take back what was set in a limit: see "shaperd unset limit".`,
		Example: `  shaperd unset limit per-source`,
		RunE: func(*cobra.Command, []string) error {
			return usageError{errors.New("unset needs limit LIMIT, such as: shaperd unset limit per-source")}
		},
	}
	cmd.AddCommand(unsetLimitCommand(e))
	return cmd
}

func unsetLimitCommand(e env) *cobra.Command {
	var saved bool
	var file string
	cmd := &cobra.Command{
		Use:   "limit LIMIT [KEY...]",
		Short: "Put a limit back to what the configuration says",
		Long: `Put a limit back to what the configuration says, or keys of it. With --saved the file
goes in which "shaperd set limit --save" has written, and the daemon reloads.`,
		Example: `  shaperd unset limit per-source
  shaperd unset limit per-source rate burst
  shaperd unset limit per-source --saved`,
		Annotations:       asOrder,
		Args:              args("LIMIT", "[KEY...]"),
		ValidArgsFunction: e.completeLimits,
		RunE: func(cmd *cobra.Command, args []string) error {
			if saved {
				if len(args) > 1 {
					return usageError{errors.New("--saved is for all keys of a limit")}
				}
				return unsaveLimit(cmd.Context(), e, file, args[0])
			}
			c := e.daemon()
			was, err := c.Limit(cmd.Context(), args[0])
			if err != nil {
				return ofLimit(cmd.Context(), c, args[0], err)
			}
			is, err := c.UnsetLimit(cmd.Context(), args[0], args[1:]...)
			if err != nil {
				return err
			}
			return e.show(is, func(p *page) {
				p.change(was, is)
				p.overrides(is)
			})
		},
	}
	cmd.Flags().BoolVar(&saved, "saved", false, "remove what was saved")
	configFlag(cmd, &file)
	return cmd
}

// overrides tells what is still set in a limit, here and in files.
func (p *page) overrides(l control.Limit) {
	if len(l.Override) > 0 {
		p.line("set  %s", settings(l.Override))
	}
	for _, key := range slices.Sorted(maps.Keys(l.FileOverride)) {
		p.line("%s is still set by %s", key, printable(l.FileOverride[key]))
	}
}

// configFlag adds --config to a verb that saves.
func configFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, "config", defaultConfig, "configuration `file` of the daemon, for what is saved")
}

// modeCommand is the verbs observe and enforce.
func modeCommand(e env, verb string) *cobra.Command {
	short, long := "Let a limit count only", `Let a limit count what it would do, and do nothing`
	if verb == "enforce" {
		short, long = "Let a limit that observes hold traffic back", `Let a limit that observes hold traffic back again`
	}
	var forTime span
	var untilReload bool
	cmd := &cobra.Command{
		Use:   verb + " LIMIT",
		Short: short,
		Long:  long + fmt.Sprintf(`: as "shaperd set limit LIMIT observe=%t".`, verb == "observe"),
		Example: fmt.Sprintf(`  shaperd %s per-source
  shaperd %[1]s per-source --for 10m`, verb),
		Annotations:       asOrder,
		Args:              args("LIMIT"),
		ValidArgsFunction: e.completeLimits,
		RunE: func(cmd *cobra.Command, args []string) error {
			return setLimit(cmd.Context(), e, args[0], control.SetLimit{Set: map[string]string{"observe": strconv.FormatBool(verb == "observe")}, For: forTime.seconds(), UntilReload: untilReload})
		},
	}
	setFlags(cmd, &forTime, &untilReload)
	return cmd
}
