package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"shaperd/shaper"
	"shaperd/shaper/config"
)

// errCheck says that a file is wrong; what is wrong with it was printed.
var errCheck = errors.New("configuration has errors")

func checkCommand(e env) *cobra.Command {
	return &cobra.Command{
		Use:         "check FILE...",
		Annotations: withJSON,
		Short:       "Check configuration files and print what they come to",
		Long: `Check configuration files, and the conf.d folder beside each, as "run" and a
reload would. Prints what they come to, rates in bits and in bytes. Exits with 1
when one of them is wrong.`,
		Example: `  shaperd check /etc/shaperd/shaperd.toml
  shaperd check --json shaperd.toml | jq '.[].errors'`,
		Args: func(_ *cobra.Command, files []string) error {
			if len(files) == 0 {
				return errors.New("check needs a FILE, such as /etc/shaperd/shaperd.toml")
			}
			return nil
		},
		RunE: func(_ *cobra.Command, files []string) error {
			var results []checked
			bad := false
			for _, file := range files {
				r := check(file)
				if r.OK {
					r.Notes = append(r.loaded.notes(), r.loaded.notesHere()...)
				}
				for _, note := range r.Notes {
					fmt.Fprintf(e.stderr, "%s: %s\n", file, note)
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
				return errCheck
			}
			return nil
		},
	}
}

// checked is the result for one file.
type checked struct {
	File   string       `json:"file"`
	OK     bool         `json:"ok"`
	Errors []checkError `json:"errors,omitempty"`
	Notes  []string     `json:"notes,omitempty"` // what is probably not intended, or does not work here
	Config any          `json:"config,omitempty"`

	loaded *loaded
}

type checkError struct {
	File    string `json:"file"`
	Line    int    `json:"line,omitempty"`
	Column  int    `json:"column,omitempty"`
	Message string `json:"message"`
}

func check(file string) checked {
	r := checked{File: file}
	l, err := load(file)
	if err == nil {
		_, err = l.compile(shaper.New(1))
	}
	if err != nil {
		r.Errors = checkErrors(file, err)
		return r
	}
	r.OK, r.loaded, r.Config = true, l, l.config.Canonical()
	return r
}

func checkErrors(file string, err error) []checkError {
	var all config.Errors
	var one *config.Error
	switch {
	case errors.As(err, &all):
	case errors.As(err, &one):
		all = config.Errors{one}
	default:
		return []checkError{{File: file, Message: err.Error()}}
	}
	var out []checkError
	for _, e := range all {
		out = append(out, checkError{File: e.File, Line: e.Line, Column: e.Column, Message: e.Msg})
	}
	return out
}

func (r checked) print(e env) error {
	if r.OK {
		fmt.Fprintf(e.stdout, "%s: ok\n", r.File)
		return r.loaded.config.WriteText(e.stdout)
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
