package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"github.com/BurntSushi/toml"
	"github.com/spf13/cobra"

	"shaperd/control"
	"shaperd/shaper/config"
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
	var save bool
	cmd := &cobra.Command{
		Use:   "limit LIMIT KEY=VALUE...",
		Short: "Change keys of a limit",
		Long: `Change keys of a limit, with values as the configuration has them, and print what the
limit was and is held to. It lasts for the time of --for, or until the next reload;
with --save it is written to a file in conf.d, and lasts. What buckets owe stays: a
higher rate hands out no burst. "shaperd unset limit" takes it back.`,
		Example: `  shaperd set limit per-source rate=20Mbit/s --for 10m
  shaperd set limit database connections=50 max_wait=5s --save`,
		Annotations:       withJSON,
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
			if save && forTime != 0 {
				return usageError{errors.New("--for and --save: one of them")}
			}
			return setLimit(cmd.Context(), e, args[0], control.SetLimit{Set: set, For: forTime.seconds()}, save)
		},
	}
	forFlag(cmd, &forTime, "until the next reload")
	cmd.Flags().BoolVar(&save, "save", false, "write it to a file in conf.d beside the configuration")
	return cmd
}

// setLimit sets keys of a limit, and tells what came of it.
func setLimit(ctx context.Context, e env, name string, s control.SetLimit, save bool) error {
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
	saved := ""
	if save {
		if saved, err = saveOverride(status.Config, name, s.Set); err != nil {
			return fmt.Errorf("it is in force until the next reload, and not saved: %w", err)
		}
	}
	return e.show(is, func(p *page) {
		p.change(was, is)
		if why := allObserve(status); why != "" && s.Set["mode"] == mode(false) {
			p.line("%s", p.red("NO EFFECT NOW: "+why))
		}
		if saved != "" {
			p.line("set  %s, saved in %s", settings(s.Set), saved)
			return
		}
		for _, o := range status.Overrides {
			if o.Limit == name {
				p.line("set  %s, %s", settings(o.Set), until(o.Until, status.Now, "until the next reload"))
			}
		}
	})
}

// saveOverride writes what is set in a limit to a file of its own in conf.d beside the
// daemon's configuration, beside what was saved there before, and returns its name.
func saveOverride(configuration, limit string, set map[string]string) (string, error) {
	folder := filepath.Join(filepath.Dir(configuration), "conf.d")
	if err := os.Mkdir(folder, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	path := filepath.Join(folder, "90-set-"+limit+".toml")
	all := map[string]string{}
	var before struct{ Override []map[string]any }
	if _, err := toml.DecodeFile(path, &before); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	for _, o := range before.Override {
		for key, value := range o {
			all[key] = fmt.Sprint(value)
		}
	}
	delete(all, "limit")
	maps.Copy(all, set)
	text, err := config.FormatOverride(limit, all)
	if err != nil {
		return "", err
	}
	text = "# Written by \"shaperd set limit --save\". Remove the file to take it back.\n" + text
	return path, writeWhole(path, []byte(text), 0o644)
}

// allObserve returns why no limit is enforced, whatever its own mode; "" when that counts.
func allObserve(s control.Status) string {
	switch {
	case s.Mode == mode(true):
		return `the daemon observes: [daemon] mode = "observe" goes before the mode of a limit`
	case s.Bypass != nil:
		return `limits are bypassed until "shaperd bypass off"`
	}
	return ""
}

// change tells what a limit was and is.
func (p *page) change(was, is control.Limit) {
	p.line("limit %s", is.Name)
	p.line("was  %s, mode %s", was.HeldTo, was.Mode)
	p.line("now  %s, mode %s", is.HeldTo, is.Mode)
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
	cmd.AddCommand(&cobra.Command{
		Use:               "limit LIMIT",
		Short:             "Put a limit back to what the configuration says",
		Long:              `Put a limit back to what the configuration says.`,
		Example:           `  shaperd unset limit per-source`,
		Annotations:       withJSON,
		Args:              args("LIMIT"),
		ValidArgsFunction: e.completeLimits,
		RunE: func(cmd *cobra.Command, args []string) error {
			c := e.daemon()
			was, err := c.Limit(cmd.Context(), args[0])
			if err != nil {
				return ofLimit(cmd.Context(), c, args[0], err)
			}
			is, err := c.UnsetLimit(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return e.show(is, func(p *page) { p.change(was, is) })
		},
	})
	return cmd
}

// modeCommand is the verbs observe and enforce.
func modeCommand(e env, verb string) *cobra.Command {
	short, long := "Let a limit count only", `Let a limit count what it would do, and do nothing`
	if verb == "enforce" {
		short, long = "Let a limit that observes hold traffic back", `Let a limit that observes hold traffic back again`
	}
	var forTime span
	cmd := &cobra.Command{
		Use:   verb + " LIMIT",
		Short: short,
		Long:  long + fmt.Sprintf(`: as "shaperd set limit LIMIT mode=%s".`, verb),
		Example: fmt.Sprintf(`  shaperd %s per-source
  shaperd %[1]s per-source --for 10m`, verb),
		Annotations:       withJSON,
		Args:              args("LIMIT"),
		ValidArgsFunction: e.completeLimits,
		RunE: func(cmd *cobra.Command, args []string) error {
			return setLimit(cmd.Context(), e, args[0], control.SetLimit{Set: map[string]string{"mode": verb}, For: forTime.seconds()}, false)
		},
	}
	forFlag(cmd, &forTime, "until the next reload")
	return cmd
}
