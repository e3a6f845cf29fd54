package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

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
