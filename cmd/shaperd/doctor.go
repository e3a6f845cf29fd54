package main

import (
	"shaperd.dev/shaperd/internal/plan"
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
	loaded  *plan.Plan
	loadErr error
	unit    unit
	dialErr error // result of a connection to the socket
	running bool  // whether a daemon runs
	runner  runner
}

// run runs all checks.
func (d *doctor) run() (all []finding) {
	d.loaded, d.loadErr = plan.Load(d.file)
	if d.loadErr == nil {
		_, d.loadErr = d.loaded.Compile(shaper.New(1))
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
