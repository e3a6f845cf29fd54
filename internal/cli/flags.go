package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/shaper/config"
)

// defaultConfig is the default of --config.
const defaultConfig = "/etc/shaperd/shaperd.toml"

// noArgs rejects all arguments. The error ends with hint.
func noArgs(hint string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			return fmt.Errorf("%s takes no arguments: unexpected %q%s", cmd.Name(), args[0], hint)
		}
		return nil
	}
}

// wantArgs requires one argument for each name, such as "LIMIT". "[LIMIT]" is optional. A last
// name "ID..." stands for one or more, "[KEY...]" for any number.
func wantArgs(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		maxArgs := len(names)
		for i, name := range names {
			if strings.HasSuffix(strings.Trim(name, "[]"), "...") {
				maxArgs = max(maxArgs, len(args))
			}
			if i >= len(args) && !strings.HasPrefix(name, "[") {
				return fmt.Errorf("%s requires %s", strings.TrimPrefix(cmd.CommandPath(), "shaperd "), strings.Join(names, " "))
			}
		}
		if len(args) > maxArgs {
			return fmt.Errorf("%s takes %s: unexpected %q", strings.TrimPrefix(cmd.CommandPath(), "shaperd "), strings.Join(names, " "), args[maxArgs])
		}
		return nil
	}
}

// durationFlag is the value of the flag --for.
type durationFlag time.Duration

func (s *durationFlag) String() string {
	if *s == 0 {
		return ""
	}
	return config.FormatDuration(time.Duration(*s))
}
func (s *durationFlag) Type() string { return "duration" }

func (s *durationFlag) Set(text string) error {
	days, rest, inDays := strings.Cut(text, "d")
	if !inDays {
		days, rest = "0", text
	}
	n, err := strconv.ParseUint(days, 10, 16)
	var d time.Duration
	switch {
	case err != nil:
		err = fmt.Errorf("%q is not a duration such as \"90s\", \"10m\", \"1h30m\" or \"2d\"", text)
	case rest != "":
		d, err = config.ParseDuration(rest)
	}
	const maxDays = 366
	d += time.Duration(n) * 24 * time.Hour
	switch {
	case text == "0" || err == nil && d == 0:
		err = errors.New("must be more than 0; omit --for to set no end")
	case err == nil && (n > maxDays || d > maxDays*24*time.Hour):
		err = fmt.Errorf("%s: must be at most %dd", text, maxDays)
	}
	*s = durationFlag(d)
	return err
}

func (s *durationFlag) seconds() float64 { return time.Duration(*s).Seconds() }

// addForFlag adds --for to cmd, the duration of its effect.
func addForFlag(cmd *cobra.Command, s *durationFlag, effect, byDefault string) {
	cmd.Flags().Var(s, "for", "length of the "+effect+", such as 10m (default: "+byDefault+")")
	cmd.RegisterFlagCompletionFunc("for", cobra.FixedCompletions([]string{"10m", "1h"}, cobra.ShellCompDirectiveNoFileComp))
}

// enumFlag is the value of a flag that takes one of some words.
type enumFlag struct {
	value string
	words []string
}

func (o *enumFlag) String() string { return o.value }
func (o *enumFlag) Type() string   { return "word" }

func (o *enumFlag) Set(s string) error {
	if !slices.Contains(o.words, s) {
		last := len(o.words) - 1
		return fmt.Errorf("use %s or %s", strings.Join(o.words[:last], ", "), o.words[last])
	}
	o.value = s
	return nil
}

// addEnumFlag adds a flag to cmd that takes one of words. The first one is the default.
func addEnumFlag(cmd *cobra.Command, name, usage string, words ...string) *enumFlag {
	o := &enumFlag{value: words[0], words: words}
	cmd.Flags().Var(o, name, usage+": "+strings.Join(words, ", "))
	cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
	return o
}

// addTopFlag adds --top to cmd.
func addTopFlag(cmd *cobra.Command) *int {
	top := 20
	cmd.Flags().Var((*countFlag)(&top), "top", "show at most this `number` of rows")
	return &top
}

// countFlag is the value of a flag that takes a number above 0.
type countFlag int

func (c *countFlag) String() string { return strconv.Itoa(int(*c)) }
func (c *countFlag) Type() string   { return "number" }

func (c *countFlag) Set(s string) error {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		return errors.New("must be a number above 0")
	}
	*c = countFlag(n)
	return nil
}

// completeLimits completes the first argument with the limits of the daemon.
func (e env) completeLimits(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return e.completeLimitNames(cmd)
}

// completeLimitNames returns the limits of the daemon, or none when it does not answer within a second.
func (e env) completeLimitNames(cmd *cobra.Command) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), time.Second)
	defer cancel()
	names, err := limitNames(ctx, e.client())
	if err != nil {
		names = nil
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// addLimitFlag adds --limit to cmd.
func (e env) addLimitFlag(cmd *cobra.Command, usage string) *string {
	limit := cmd.Flags().String("limit", "", "`name` "+usage)
	cmd.RegisterFlagCompletionFunc("limit", func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return e.completeLimitNames(cmd)
	})
	return limit
}
