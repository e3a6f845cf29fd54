// Package doctor checks a host and a configuration for what keeps a daemon from running as intended,
// and says how to fix it. [Run] runs in the goroutine of its caller; only the checks of downstreams
// have one each.
package doctor

import (
	"context"
	"time"

	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/shaper"
)

// State is the severity of a finding.
type State string

// The states of a finding.
const (
	OK   State = "ok"
	Warn State = "warn" // works, but probably not as intended
	Fail State = "fail" // "run" fails, or does not work as configured
	Skip State = "skip" // not applicable, or cannot be determined
)

// Finding is a result of a check.
type Finding struct {
	Name  string `json:"name"` // of the check
	State State  `json:"state"`
	Text  string `json:"text"`
	Fix   string `json:"fix,omitempty"` // a command, or what to change
}

// checks are the checks of doctor, in order. Those with config set are skipped when the
// configuration does not load.
var checks = []struct {
	name   string
	config bool
	look   func(*doctor) []Finding
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
	{"shared", true, (*doctor).shared},
}

// doctor checks a host and a configuration.
type doctor struct {
	host
	file    string // absolute path of the configuration
	socket  string // absolute path of the control socket; "" means none
	probe   bool   // whether to connect to downstreams
	plan    *plan.Plan
	loadErr error
	unit    unit
	dialErr error // result of a connection to the socket
	running bool  // whether a daemon runs
	runner  runner
}

// Run checks this host and the configuration at path. It connects to the control socket, unless
// that is "", and, with probe, to each TCP downstream once. Both paths are absolute.
func Run(ctx context.Context, path, socket string, probe bool) []Finding {
	d := &doctor{host: thisHost(ctx), file: path, socket: socket, probe: probe}
	return d.run()
}

// run runs all checks.
func (d *doctor) run() (all []Finding) {
	d.plan, d.loadErr = plan.Load(d.file)
	if d.loadErr == nil { // as a daemon has it now
		d.plan, d.loadErr = d.plan.At(time.Now())
	}
	if d.loadErr == nil {
		_, d.loadErr = d.plan.Compile(shaper.New(1))
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
func oneFinding(s State, text, fix string) []Finding {
	return []Finding{{State: s, Text: text, Fix: fix}}
}

// orOK returns found, or, when it is empty, a finding that all is well.
func orOK(found []Finding, text string) []Finding {
	if found == nil {
		return oneFinding(OK, text, "")
	}
	return found
}
