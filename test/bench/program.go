package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/test/lab"
)

// A task describes what a program must do between the client and the downstream.
type task struct {
	net   *lab.Row
	bins  binaries
	udp   bool
	rate  int64 // payload bytes a second per source; 0 is no limit
	flows int   // connections per source; a program that limits single connections gives each an equal part of the rate
	keys  int   // number of sources, starting with source(0)
	slots int   // maximum number of connections at the downstream; 0 is no limit
	conns int   // maximum number of client connections

	reloads    bool   // whether the program is reloaded during the measurement
	idleLimits int    // additional limits, or tables, that match nothing
	limits     string // additional configuration of shaperd
}

// binaries are the paths of the programs.
type binaries struct {
	shaperd   string
	naive     string
	asn       string // the directory of the table of autonomous systems
	haproxy3  []string
	toxiproxy string
}

// A program can run some or all tasks.
type program struct {
	name        string
	description string
	// cannot returns why the program cannot run a task, or "".
	cannot func(task) string
	start  func(context.Context, task) (*running, error)
}

// running is a started program.
type running struct {
	to      netip.AddrPort // where clients connect
	setting string         // how its configuration differs from the obvious one
	process *process       // nil for kernel shapers
	reload  func() error   // nil if the program has no reload
	done    string         // what the program logs when a reload is complete
	cleanup func() error   // nil if nothing must be removed

	profiles bool // whether it supports Go profiles
	profiler *profiler
}

func (r *running) pid() int {
	if r.process == nil {
		return 0
	}
	return r.process.PID()
}

// begin starts a measurement and returns the usage so far.
func (r *running) begin() (usage, error) {
	if err := r.profiler.begin(r); err != nil {
		return usage{}, err
	}
	return readUsage(r.pid())
}

// end ends a measurement and returns the usage since begin.
func (r *running) end(before usage) (usage, error) {
	after, err := readUsage(r.pid())
	return after.sub(before), errors.Join(err, r.profiler.end(r))
}

// peakMemory returns the peak resident memory of the program's processes in bytes, or 0 without a process.
func (r *running) peakMemory() float64 {
	if r.process == nil {
		return 0
	}
	return peakMemory(r.pid())
}

func (r *running) stop() (err error) {
	if r.process != nil {
		err = r.process.stop()
	}
	if r.cleanup != nil {
		err = errors.Join(err, r.cleanup())
	}
	return err
}

// writeConfig writes a program's configuration to a new directory.
func writeConfig(name, text string) (dir, path string, err error) {
	if dir, err = lab.TempDir(); err != nil {
		return "", "", err
	}
	path = filepath.Join(dir, name)
	return dir, path, os.WriteFile(path, []byte(text), 0o644)
}

// startProxy starts a proxy and waits until it listens.
func startProxy(ctx context.Context, t task, dir, name string, args ...string) (*running, error) {
	p, err := startProcess(t.net.Middle, dir, name, args...)
	if err != nil {
		return nil, err
	}
	if err := p.AwaitListening(ctx, p.host, atProxy, t.udp); err != nil {
		_ = p.stop()
		return nil, err
	}
	return &running{to: atProxy, process: p}, nil
}

// programs are all programs. The first is the subject.
var programs = []program{
	{subject, "the program under test", anyTask, startShaperd},
	{"direct", "the downstream directly, over a router: the machine's maximum", cannotLimit, startDirect},
	{"haproxy", "HAProxy 3, with splice-auto or a shared bandwidth limit", tcpOnly, startHAProxy},
	{"nginx", "nginx, stream module", anyTask, startNginx},
	{"toxiproxy", "toxiproxy, with the bandwidth toxic", tcpNoSlots, startToxiproxy},
	{"redir", "redir, with -m", fewConnections, startRedir},
	{"naive", "a 150-line proxy in Go with golang.org/x/time/rate", noReload, startNaive},
	{"tbf", "the kernel's token bucket filter on the router", oneBucket, startTBF},
	{"htb", "the kernel's hierarchical token bucket on the router", kernelOnly, startHTB},
}

func cannotLimit(t task) string {
	if t.rate > 0 || t.slots > 0 {
		return "has no limits"
	}
	return ""
}

func tcpOnly(t task) string {
	if t.udp {
		return "TCP only"
	}
	return ""
}

func tcpNoSlots(t task) string {
	if t.slots > 0 {
		return "has no cap on connections"
	}
	return tcpOnly(t)
}

func anyTask(task) string { return "" }

func fewConnections(t task) string {
	if t.conns > 1000 {
		return "forks a process for each connection"
	}
	return tcpNoSlots(t)
}

func noReload(t task) string {
	if t.reloads {
		return "has no reload"
	}
	return ""
}

func kernelOnly(t task) string {
	if t.slots > 0 || t.rate == 0 {
		return "limits bytes only"
	}
	return ""
}

func oneBucket(t task) string {
	if t.keys > 1 {
		return "has only one bucket"
	}
	return kernelOnly(t)
}

func startDirect(context.Context, task) (*running, error) {
	return &running{to: atDownstream}, nil
}

// startShaperd starts the daemon with the configuration that an operator would write.
func startShaperd(ctx context.Context, t task) (*running, error) {
	protocol := "tcp"
	if t.udp {
		protocol = "udp"
	}
	text := fmt.Sprintf("[daemon]\nmetrics = \"\"\npin_path = \"/nowhere/pins\"\n\n[[listen]]\nname = \"in\"\naddress = [\"%s://%s\"]\ndownstream = [%q]\n",
		protocol, atProxy, atDownstream)
	if t.rate > 0 {
		text += fmt.Sprintf("\n[[limit]]\nname = \"rate\"\nkey = [\"source\"]\nrate = \"%dB/s\"\n", t.rate)
	}
	if t.slots > 0 {
		text += fmt.Sprintf("\n[[limit]]\nname = \"slots\"\nmax_connections = %d\nqueue_timeout = \"60s\"\nmax_queue = 10000\n", t.slots)
	}
	for i := range t.idleLimits {
		text += fmt.Sprintf("\n[[limit]]\nname = \"idle%d\"\nmatch = { source = [\"10.9.%d.0/24\"] }\nkey = [\"source\"]\nrate = \"1MB/s\"\n", i, i)
	}
	text += t.limits
	dir, path, err := writeConfig("shaperd.toml", text)
	if err != nil {
		return nil, err
	}
	r, err := startProxy(ctx, t, dir, t.bins.shaperd, "run", "--config", path, "--drain-timeout", "0s")
	if err == nil {
		r.profiles = true
		r.done = "msg=reloaded"
		r.reload = func() error { return r.process.Signal(unix.SIGHUP) }
	}
	return r, err
}
