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

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper/config"
)

// jsonAnnotations are the annotations of verbs that support --json.
var jsonAnnotations = map[string]string{jsonAnnotation: "yes"}

// changeAnnotations are the annotations of verbs that make a change which survives a restart.
// They support --json.
var changeAnnotations = map[string]string{jsonAnnotation: "yes", persistAnnotation: "yes"}

// warnUnsaved prints a warning when the daemon could not save its overrides.
func (e env) warnUnsaved(ctx context.Context) {
	if s, err := e.client().Status(ctx); err == nil && s.StateError != "" {
		fmt.Fprintln(e.stderr, unsavedText(s))
	}
}

// afterChange returns the error of a status request that follows a change. When the daemon has
// exited in between, as it does when its last connection has drained, the change was made.
func (e env) afterChange(err error) error {
	if errors.Is(err, api.ErrNoDaemon) {
		fmt.Fprintln(e.stderr, "done; the daemon has exited since")
		return nil
	}
	return err
}

// client returns a client of the daemon.
func (e env) client() *api.Client { return api.NewClient(e.flags.control) }

// show prints answer as JSON, or as the text that write makes of it.
func (e env) show(answer any, write func(p *term.Printer)) error {
	if e.flags.json {
		return e.printJSON(answer)
	}
	p := &term.Printer{Color: term.UseColor(e.stdout)}
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

// printJSONLine prints answer on one line, for streams.
func (e env) printJSONLine(answer any) error {
	out := json.NewEncoder(e.stdout)
	out.SetEscapeHTML(false)
	return out.Encode(answer)
}

// usageFromAPI turns an error by which the daemon rejects arguments into a usageError.
func usageFromAPI(err error) error {
	var said *api.APIError
	if errors.As(err, &said) && slices.Contains([]int{http.StatusBadRequest, http.StatusNotFound, http.StatusUnprocessableEntity}, said.Code) {
		return usageError{err}
	}
	return err
}

// limitError is usageFromAPI for a request about a limit. The error for an unknown limit lists
// the limits of the daemon.
func limitError(ctx context.Context, c *api.Client, limit string, err error) error {
	var said *api.APIError
	if !errors.As(err, &said) || said.Code != http.StatusNotFound {
		return usageFromAPI(err)
	}
	names, listErr := limitNames(ctx, c)
	if listErr != nil || slices.Contains(names, limit) {
		return usageFromAPI(err)
	}
	return unknownName("limit", limit, names)
}

// unknownName returns the error for an unknown name. It lists names.
func unknownName(what, name string, names []string) error {
	names = slices.Compact(slices.Sorted(slices.Values(names)))
	if len(names) == 0 {
		return usageError{fmt.Errorf("unknown %s %q: this daemon has none", what, name)}
	}
	msg := fmt.Sprintf("unknown %s %q; %ss of this daemon: %s", what, name, what, strings.Join(names, ", "))
	if near := config.Nearest(name, names); near != "" {
		msg += fmt.Sprintf("; did you mean %q?", near)
	}
	return usageError{errors.New(msg)}
}

func limitNames(ctx context.Context, c *api.Client) ([]string, error) {
	limits, err := c.Limits(ctx)
	var names []string
	for _, l := range limits {
		names = append(names, l.Name)
	}
	return names, err
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

// addForFlag adds --for to cmd.
func addForFlag(cmd *cobra.Command, s *durationFlag, byDefault string) {
	cmd.Flags().Var(s, "for", "duration, such as 10m (default: "+byDefault+")")
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
	cmd.Flags().Var((*countFlag)(&top), "top", "show at most N rows")
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
