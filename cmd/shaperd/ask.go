package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"shaperd/control"
	"shaperd/shaper/config"
)

// withJSON is the Annotations of verbs that know --json.
var withJSON = map[string]string{printsJSON: "yes"}

// asOrder is the Annotations of verbs whose orders a restart is not to forget. They know
// --json.
var asOrder = map[string]string{printsJSON: "yes", orders: "yes"}

// tellUnsaved says so when the daemon could not write down what was ordered.
func (e env) tellUnsaved(ctx context.Context) {
	if s, err := e.daemon().Status(ctx); err == nil && s.Unsaved != "" {
		fmt.Fprintln(e.stderr, unsavedText(s))
	}
}

// afterOrder returns an error of asking the daemon how things are after an order. One that has
// ended since, as a drain does with its last connection, did what was ordered.
func (e env) afterOrder(err error) error {
	if errors.Is(err, control.ErrNoDaemon) {
		fmt.Fprintln(e.stderr, "done; the daemon has ended since")
		return nil
	}
	return err
}

// daemon is who verbs ask.
func (e env) daemon() *control.Client { return control.NewClient(e.flags.control) }

// show prints answer as JSON, or as what write makes of it.
func (e env) show(answer any, write func(p *page)) error {
	if e.flags.json {
		return e.printJSON(answer)
	}
	p := &page{colour: inColour(e.stdout)}
	write(p)
	_, err := io.WriteString(e.stdout, p.String())
	return err
}

func (e env) printJSON(answer any) error {
	out := json.NewEncoder(e.stdout)
	out.SetEscapeHTML(false)
	out.SetIndent("", "  ")
	return out.Encode(answer)
}

// printJSONLine is for what has no end.
func (e env) printJSONLine(answer any) error {
	out := json.NewEncoder(e.stdout)
	out.SetEscapeHTML(false)
	return out.Encode(answer)
}

// asUsage makes a usage error of what the daemon says when arguments make no sense to it.
func asUsage(err error) error {
	var said *control.APIError
	if errors.As(err, &said) && slices.Contains([]int{http.StatusBadRequest, http.StatusNotFound, http.StatusUnprocessableEntity}, said.Code) {
		return usageError{err}
	}
	return err
}

// ofLimit is asUsage for what was asked of a limit: it tells which limits there are when
// there is no such limit.
func ofLimit(ctx context.Context, c *control.Client, limit string, err error) error {
	var said *control.APIError
	if !errors.As(err, &said) || said.Code != http.StatusNotFound {
		return asUsage(err)
	}
	names, lack := limitNames(ctx, c)
	if lack != nil || slices.Contains(names, limit) {
		return asUsage(err)
	}
	return unknown("limit", limit, names)
}

// unknown tells which names there are.
func unknown(what, name string, names []string) error {
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	if len(names) == 0 {
		return usageError{fmt.Errorf("there is no %s %q; this daemon has none", what, name)}
	}
	msg := fmt.Sprintf("there is no %s %q; %ss of this daemon: %s", what, name, what, strings.Join(names, ", "))
	if near := config.Nearest(name, names); near != "" {
		msg += fmt.Sprintf("; did you mean %q?", near)
	}
	return usageError{errors.New(msg)}
}

func limitNames(ctx context.Context, c *control.Client) ([]string, error) {
	limits, err := c.Limits(ctx)
	var names []string
	for _, l := range limits {
		names = append(names, l.Name)
	}
	return names, err
}

// args wants as many arguments as it has names, such as "LIMIT" or "[LIMIT]"; a last one
// "ID..." is one or more, "[KEY...]" any number.
func args(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		most := len(names)
		for i, name := range names {
			if strings.HasSuffix(strings.Trim(name, "[]"), "...") {
				most = max(most, len(args))
			}
			if i >= len(args) && !strings.HasPrefix(name, "[") {
				return fmt.Errorf("%s needs %s", strings.TrimPrefix(cmd.CommandPath(), "shaperd "), strings.Join(names, " "))
			}
		}
		if len(args) > most {
			return fmt.Errorf("%s takes %s, and not %q too", strings.TrimPrefix(cmd.CommandPath(), "shaperd "), strings.Join(names, " "), args[most])
		}
		return nil
	}
}

// span is the flag --for.
type span time.Duration

func (s *span) String() string {
	if *s == 0 {
		return ""
	}
	return config.FormatDuration(time.Duration(*s))
}
func (s *span) Type() string { return "time" }

func (s *span) Set(text string) error {
	days, rest, inDays := strings.Cut(text, "d")
	if !inDays {
		days, rest = "0", text
	}
	n, err := strconv.ParseUint(days, 10, 16)
	var d time.Duration
	switch {
	case err != nil:
		err = fmt.Errorf("%q is not a time such as \"90s\", \"10m\", \"1h30m\" or \"2d\"", text)
	case rest != "":
		d, err = config.ParseDuration(rest)
	}
	const longest = 366
	d += time.Duration(n) * 24 * time.Hour
	switch {
	case text == "0" || err == nil && d == 0:
		err = errors.New("it ends before it begins; to have no end leave --for out")
	case err == nil && (n > longest || d > longest*24*time.Hour):
		err = fmt.Errorf("%s: at most %dd", text, longest)
	}
	*s = span(d)
	return err
}

func (s *span) seconds() float64 { return time.Duration(*s).Seconds() }

// forFlag adds --for to cmd.
func forFlag(cmd *cobra.Command, s *span, otherwise string) {
	cmd.Flags().Var(s, "for", "for how long, such as 10m; "+otherwise+" without")
	cmd.RegisterFlagCompletionFunc("for", cobra.FixedCompletions([]string{"10m", "1h"}, cobra.ShellCompDirectiveNoFileComp))
}

// oneOf is a flag that takes one of some words.
type oneOf struct {
	value string
	words []string
}

func (o *oneOf) String() string { return o.value }
func (o *oneOf) Type() string   { return "word" }

func (o *oneOf) Set(s string) error {
	if !slices.Contains(o.words, s) {
		last := len(o.words) - 1
		return fmt.Errorf("use %s or %s", strings.Join(o.words[:last], ", "), o.words[last])
	}
	o.value = s
	return nil
}

// choice adds a flag to cmd that takes one of words; the first is the default.
func choice(cmd *cobra.Command, name, usage string, words ...string) *oneOf {
	o := &oneOf{value: words[0], words: words}
	cmd.Flags().Var(o, name, usage+": "+strings.Join(words, ", "))
	cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
	return o
}

// topFlag adds --top to cmd.
func topFlag(cmd *cobra.Command) *int {
	top := 20
	cmd.Flags().Var((*count)(&top), "top", "at most so many")
	return &top
}

// count is a flag that takes a number above 0.
type count int

func (c *count) String() string { return strconv.Itoa(int(*c)) }
func (c *count) Type() string   { return "number" }

func (c *count) Set(s string) error {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		return errors.New("a number from 1 is needed")
	}
	*c = count(n)
	return nil
}

// completeLimits offers the limits of the daemon for the first argument.
func (e env) completeLimits(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return e.offerLimits(cmd)
}

// offerLimits is the limits of the daemon, or none when none answers soon.
func (e env) offerLimits(cmd *cobra.Command) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(cmd.Context(), time.Second)
	defer cancel()
	names, err := limitNames(ctx, e.daemon())
	if err != nil {
		names = nil
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// limitFlag adds --limit to cmd.
func (e env) limitFlag(cmd *cobra.Command, usage string) *string {
	limit := cmd.Flags().String("limit", "", "`name` "+usage)
	cmd.RegisterFlagCompletionFunc("limit", func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return e.offerLimits(cmd)
	})
	return limit
}
