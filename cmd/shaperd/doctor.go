package main

import (
	"cmp"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"shaperd/shaper"
)

// health is how grave a finding is.
type health string

const (
	healthOK   health = "ok"
	healthWarn health = "warn" // works, but probably not as intended
	healthFail health = "fail" // "run" fails, or does not do what the configuration says
	healthSkip health = "skip" // does not matter here, or cannot be seen
)

// finding is what a check has found.
type finding struct {
	Name  string `json:"name"` // of the check
	State health `json:"state"`
	Text  string `json:"text"`
	Fix   string `json:"fix,omitempty"` // the command that fixes it, or what to change
}

// checks are what doctor looks at, in this order. Those of a configuration are left out
// when it does not load.
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
	{"programs", true, (*doctor).foreign},
	{"ports", true, (*doctor).ports},
	{"downstreams", true, (*doctor).downstreams},
}

// doctor looks at a host and a configuration.
type doctor struct {
	host
	file    string // of the configuration, an absolute path
	socket  string // of control, an absolute path; "" means none
	probe   bool   // whether to connect to downstreams
	loaded  *loaded
	loadErr error
	unit    unit
	asked   error // what came of a connection to the socket
	running bool  // whether a daemon is
	runner  runner
}

// examine has all checks made.
func (d *doctor) examine() (all []finding) {
	d.loaded, d.loadErr = load(d.file)
	if d.loadErr == nil {
		_, d.loadErr = d.loaded.compile(shaper.New(1))
	}
	d.unit = d.readUnit()
	d.asked = d.dial("unix", d.socket)
	d.running = d.unit.active() || d.asked == nil
	d.runner = d.whoRuns()
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

// find returns one finding.
func find(s health, text, fix string) []finding {
	return []finding{{State: s, Text: text, Fix: fix}}
}

// orOK returns what was found, or that all is well.
func orOK(found []finding, text string) []finding {
	if found == nil {
		return find(healthOK, text, "")
	}
	return found
}

func doctorCommand(e env) *cobra.Command {
	d := &doctor{}
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what is wrong with this host or the configuration, and what fixes it",
		Long: `Look at this host and the configuration: kernel, privileges, limits of the system,
ports, files and the systemd unit. What is wrong is printed with the command that
fixes it. Works with a daemon or without; as root it sees more. Exits with 1 when
something fails; what is only to be warned of is no failure.`,
		Example: `  shaperd doctor --config shaperd.toml
  shaperd doctor --probe --json | jq '.checks[] | select(.state == "fail")'`,
		Args:        noArgs("; the configuration is named by --config"),
		Annotations: withJSON,
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
			found := d.examine()
			failed := 0
			for _, f := range found {
				if f.State == healthFail {
					failed++
				}
			}
			if e.flags.json {
				err = e.printJSON(map[string]any{"ok": failed == 0, "checks": found})
			} else {
				err = printFindings(e.stdout, found, inColour(e.stdout))
			}
			if err == nil && failed > 0 {
				err = fmt.Errorf("%d of %d checks failed", failed, len(found))
			}
			return err
		},
	}
	cmd.Flags().StringVar(&d.file, "config", "/etc/shaperd/shaperd.toml", "configuration `file`; conf.d/*.toml beside it is read too")
	cmd.Flags().BoolVar(&d.probe, "probe", false, "connect to each TCP downstream once, too")
	return cmd
}

// printFindings writes a line for each finding, and one for what fixes it.
func printFindings(w io.Writer, all []finding, colours bool) error {
	paint := map[health]string{healthOK: "\x1b[32m", healthWarn: "\x1b[33m", healthFail: "\x1b[31m", healthSkip: "\x1b[2m"}
	width := 0
	for _, f := range all {
		width = max(width, len(f.Name))
	}
	var out strings.Builder
	for _, f := range all {
		word := fmt.Sprintf("%-4s", f.State)
		if colours {
			word = paint[f.State] + word + "\x1b[0m"
		}
		indent := strings.Repeat(" ", 4+2+width+2)
		fmt.Fprintf(&out, "%s  %-*s  %s\n", word, width, f.Name, strings.ReplaceAll(f.Text, "\n", "\n"+indent))
		if f.Fix != "" {
			fmt.Fprintf(&out, "%s%s %s\n", indent, cmp.Or(map[bool]string{true: "\x1b[1m->\x1b[0m"}[colours], "->"), f.Fix)
		}
	}
	_, err := io.WriteString(w, out.String())
	return err
}
