package cli

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/shaper"
)

// errInvalidConfig reports that a file has errors, which have been printed.
var errInvalidConfig = errors.New("the configuration has errors")

func checkCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:         "check FILE...",
		Annotations: jsonAnnotations,
		Short:       "Validate configuration files and print the effective configuration",
		Long: `Validate configuration files, and the conf.d directory next to each, in the same way as
"run" and a reload. Prints the effective configuration, with rates in bits and in bytes.
Exits with 1 if a file has errors.`,
		Example: `  shaperd check /etc/shaperd/shaperd.toml
  shaperd check --json shaperd.toml | jq '.[].errors'`,
		Args: func(_ *cobra.Command, files []string) error {
			if len(files) == 0 {
				return errors.New("check requires a FILE, such as /etc/shaperd/shaperd.toml")
			}
			return nil
		},
		RunE: func(_ *cobra.Command, files []string) error {
			var results []checkResult
			bad := false
			for _, file := range files {
				r := check(file)
				if r.OK {
					r.Warnings = append(r.loaded.Warnings(), r.loaded.HostWarnings()...)
				}
				for _, warning := range r.Warnings {
					fmt.Fprintf(e.stderr, "%s: warning: %s\n", file, warning)
				}
				bad = bad || len(r.Errors) > 0
				results = append(results, r)
			}
			if e.flags.json {
				if err := e.printJSON(results); err != nil {
					return err
				}
			} else {
				for _, r := range results {
					if err := r.print(e); err != nil {
						return err
					}
				}
			}
			if bad {
				return errInvalidConfig
			}
			return nil
		},
	}
}

// checkResult is the result of "check" for one file.
type checkResult struct {
	File     string       `json:"file"`
	OK       bool         `json:"ok"`
	Errors   []checkError `json:"errors,omitempty"`
	Warnings []string     `json:"warnings,omitempty"` // settings that are probably not intended, or do not work on this host
	Config   any          `json:"config,omitempty"`

	loaded *plan.Plan
}

type checkError struct {
	File    string `json:"file"`
	Line    int    `json:"line,omitempty"`
	Column  int    `json:"column,omitempty"`
	Message string `json:"message"`
}

func check(file string) checkResult {
	r := checkResult{File: file}
	l, err := plan.Load(file)
	if err == nil {
		_, err = l.Compile(shaper.New(1))
	}
	if err != nil {
		for _, e := range plan.Errors(file, err) {
			r.Errors = append(r.Errors, checkError{File: e.File, Line: e.Line, Column: e.Column, Message: e.Msg})
		}
		return r
	}
	r.OK, r.loaded, r.Config = true, l, l.Config.Canonical()
	return r
}

func (r checkResult) print(e env) error {
	if r.OK {
		fmt.Fprintf(e.stdout, "%s: ok, revision %s\n", r.File, r.loaded.Revision())
		return r.loaded.Config.WriteText(e.stdout)
	}
	for _, c := range r.Errors {
		if c.Line == 0 {
			fmt.Fprintln(e.stderr, c.Message)
			continue
		}
		fmt.Fprintf(e.stderr, "%s:%d:%d: %s\n", c.File, c.Line, c.Column, c.Message)
	}
	return nil
}
