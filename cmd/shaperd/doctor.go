package main

import (
	"cmp"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/internal/term"
	"shaperd.dev/shaperd/shaper"
)

// health is the severity of a finding.
type health string

const (
	healthOK   health = "ok"
	healthWarn health = "warn" // works, but probably not as intended
	healthFail health = "fail" // "run" fails, or does not work as configured
	healthSkip health = "skip" // not applicable, or cannot be determined
)

// finding is a result of a check.
type finding struct {
	Name  string `json:"name"` // of the check
	State health `json:"state"`
	Text  string `json:"text"`
	Fix   string `json:"fix,omitempty"` // a command, or what to change
}

// checks are the checks of doctor, in order. Those with config set are skipped when the
// configuration does not load.
var checks = []struct {
	name   string
	config bool
	look   func(*doctor) []finding
}{
	{"configuration", false, (*doctor).configuration},
	{"files", true, (*doctor).configFiles},
	{"asn files", true, (*doctor).asnFiles},
	{"unit", false, (*doctor).unitState},
	{"daemon", false, (*doctor).daemon},
	{"kernel", true, (*doctor).kernel},
	{"modules", true, (*doctor).modules},
	{"queue", true, (*doctor).queue},
	{"pins", true, (*doctor).pins},
	{"capabilities", true, (*doctor).capabilities},
	{"descriptors", true, (*doctor).descriptors},
	{"buffers", true, (*doctor).buffers},
	{"local ports", true, (*doctor).localPorts},
	{"routing", true, (*doctor).routing},
	{"conntrack", false, (*doctor).conntrack},
	{"clock", false, (*doctor).clock},
	{"interfaces", true, (*doctor).interfaces},
	{"programs", true, (*doctor).checkForeign},
	{"ports", true, (*doctor).ports},
	{"downstreams", true, (*doctor).downstreams},
}

// doctor checks a host and a configuration.
type doctor struct {
	host
	file    string // absolute path of the configuration
	socket  string // absolute path of the control socket; "" means none
	probe   bool   // whether to connect to downstreams
	loaded  *loadedConfig
	loadErr error
	unit    unit
	dialErr error // result of a connection to the socket
	running bool  // whether a daemon runs
	runner  runner
}

// run runs all checks.
func (d *doctor) run() (all []finding) {
	d.loaded, d.loadErr = load(d.file)
	if d.loadErr == nil {
		_, d.loadErr = d.loaded.compile(shaper.New(1))
	}
	d.unit = d.readUnit()
	d.dialErr = d.dial("unix", d.socket)
	d.running = d.unit.active() || d.dialErr == nil
	d.runner = d.findRunner()
	for _, c := range checks {
		if c.config && d.loadErr != nil {
			continue
		}
		for _, f := range c.look(d) {
			f.Name = c.name
			all = append(all, f)
		}
	}
	return all
}

// oneFinding returns a list of one finding.
func oneFinding(s health, text, fix string) []finding {
	return []finding{{State: s, Text: text, Fix: fix}}
}

// orOK returns found, or, when it is empty, a finding that all is well.
func orOK(found []finding, text string) []finding {
	if found == nil {
		return oneFinding(healthOK, text, "")
	}
	return found
}

func doctorCommand(e env) *cobra.Command {
	d := &doctor{}
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Diagnose the host and the configuration, and suggest fixes",
		Long: `Diagnose this host and the configuration: kernel, privileges, system limits, ports, files
and the systemd unit. Prints each problem with a command that fixes it. Works with or
without a running daemon; root sees more. Exits with 1 when a check fails; a warning is
not a failure.`,
		Example: `  shaperd doctor --config shaperd.toml
  shaperd doctor --probe --json | jq '.checks[] | select(.state == "fail")'`,
		Args:        noArgs("; use --config to name the configuration"),
		Annotations: jsonAnnotations,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if d.file, err = filepath.Abs(d.file); err != nil {
				return fmt.Errorf("--config %s: %w", d.file, err)
			}
			if d.socket = e.flags.control; d.socket != "" {
				if d.socket, err = filepath.Abs(d.socket); err != nil {
					return fmt.Errorf("--control %s: %w", e.flags.control, err)
				}
			}
			d.host = thisHost(cmd.Context())
			found := d.run()
			failed := 0
			for _, f := range found {
				if f.State == healthFail {
					failed++
				}
			}
			if e.flags.json {
				err = e.printJSON(map[string]any{"ok": failed == 0, "checks": found})
			} else {
				err = printFindings(e.stdout, found, term.UseColor(e.stdout))
			}
			if err == nil && failed > 0 {
				err = fmt.Errorf("%d of %d checks failed", failed, len(found))
			}
			return err
		},
	}
	cmd.Flags().StringVar(&d.file, "config", "/etc/shaperd/shaperd.toml", "configuration `file`; conf.d/*.toml next to it is read too")
	cmd.Flags().BoolVar(&d.probe, "probe", false, "also connect to each TCP downstream once")
	return cmd
}

// printFindings prints each finding, and its fix on a line of its own.
func printFindings(w io.Writer, all []finding, colors bool) error {
	paint := map[health]string{healthOK: "\x1b[32m", healthWarn: "\x1b[33m", healthFail: "\x1b[31m", healthSkip: "\x1b[2m"}
	width := 0
	for _, f := range all {
		width = max(width, len(f.Name))
	}
	var out strings.Builder
	for _, f := range all {
		word := fmt.Sprintf("%-4s", f.State)
		if colors {
			word = paint[f.State] + word + "\x1b[0m"
		}
		indent := strings.Repeat(" ", 4+2+width+2)
		fmt.Fprintf(&out, "%s  %-*s  %s\n", word, width, f.Name, strings.ReplaceAll(f.Text, "\n", "\n"+indent))
		if f.Fix != "" {
			fmt.Fprintf(&out, "%s%s %s\n", indent, cmp.Or(map[bool]string{true: "\x1b[1m->\x1b[0m"}[colors], "->"), f.Fix)
		}
	}
	_, err := io.WriteString(w, out.String())
	return err
}
