package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"shaperd/test/lab"
)

// A task is what a program is to do between the client and the downstream.
type task struct {
	net   *network
	bins  binaries
	udp   bool
	rate  int64 // bytes of payload a second for each source; 0 is no limit
	flows int   // connections of a source: what can only limit each by itself gets an equal part
	keys  int   // sources, from source(0) on
	slots int   // connections at the downstream at once; 0 is no limit
	conns int   // connections that there may be in all

	reloads bool   // it is reloaded meanwhile
	idle    int    // limits, or tables, that nothing meets, beside those that do
	limits  string // more of shaperd's configuration
}

// binaries are where the programs are.
type binaries struct {
	shaperd   string
	naive     string
	asn       string // the folder of the table of autonomous systems
	haproxy3  []string
	toxiproxy string
}

// A program is one that does a task, or some tasks.
type program struct {
	name  string
	about string
	// cannot says why it has no part in a task, and is "" when it has one.
	cannot func(task) string
	start  func(context.Context, task) (*running, error)
}

// running is a program at work.
type running struct {
	to      netip.AddrPort // where clients connect
	setting string         // how its configuration differs from what one would expect
	process *process       // nil for what the kernel does
	reload  func() error   // nil when it cannot
	done    string         // what it writes once for each reload, when it is done
	undo    func() error   // nil when nothing stays behind

	profiles bool // it makes profiles of itself
	profiler *profiler
}

func (r *running) pid() int {
	if r.process == nil {
		return 0
	}
	return r.process.cmd.Process.Pid
}

// begin begins what is measured: it returns what has been used so far.
func (r *running) begin() (usage, error) {
	if err := r.profiler.begin(r); err != nil {
		return usage{}, err
	}
	return used(r.pid())
}

// end ends it, and returns what was used since.
func (r *running) end(before usage) (usage, error) {
	after, err := used(r.pid())
	return after.sub(before), errors.Join(err, r.profiler.end(r))
}

// peak is the most resident memory that the program's processes have had, in bytes; 0
// where there are none.
func (r *running) peak() float64 {
	if r.process == nil {
		return 0
	}
	return peak(r.pid())
}

func (r *running) stop() (err error) {
	if r.process != nil {
		err = r.process.stop()
	}
	if r.undo != nil {
		err = errors.Join(err, r.undo())
	}
	return err
}

// configured writes a program's configuration into a folder of its own.
func configured(name, text string) (dir, path string, err error) {
	if dir, err = lab.TempDir(); err != nil {
		return "", "", err
	}
	path = filepath.Join(dir, name)
	return dir, path, os.WriteFile(path, []byte(text), 0o644)
}

// proxied starts a proxy and waits until it listens.
func proxied(ctx context.Context, t task, dir, name string, args ...string) (*running, error) {
	p, err := startProcess(t.net.middle, dir, name, args...)
	if err != nil {
		return nil, err
	}
	if err := p.listening(ctx, atProxy, t.udp); err != nil {
		_ = p.stop()
		return nil, err
	}
	return &running{to: atProxy, process: p}, nil
}

// programs are all there are. The first is the subject.
var programs = []program{
	{subject, "this program", anything, startShaperd},
	{"direct", "the downstream itself, over a router: what the machine can do", cannotLimit, startDirect},
	{"haproxy", "HAProxy 3, with option splice-auto or a shared bandwidth limit", tcpOnly, startHAProxy},
	{"nginx", "nginx, stream module", anything, startNginx},
	{"toxiproxy", "toxiproxy, with the toxic bandwidth", tcpNoSlots, startToxiproxy},
	{"redir", "redir, with -m", fewConnections, startRedir},
	{"naive", "a proxy in Go of 150 lines, with golang.org/x/time/rate", noReload, startNaive},
	{"tbf", "the kernel's token bucket filter at the router", oneBucket, startTBF},
	{"htb", "the kernel's hierarchical token bucket at the router", kernelOnly, startHTB},
}

func cannotLimit(t task) string {
	if t.rate > 0 || t.slots > 0 {
		return "limits nothing"
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

func anything(task) string { return "" }

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
		return "has one bucket"
	}
	return kernelOnly(t)
}

func startDirect(context.Context, task) (*running, error) {
	return &running{to: atDownstream}, nil
}

// startShaperd starts the daemon as an operator would configure it.
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
	for i := range t.idle {
		text += fmt.Sprintf("\n[[limit]]\nname = \"idle%d\"\nmatch = { source = [\"10.9.%d.0/24\"] }\nkey = [\"source\"]\nrate = \"1MB/s\"\n", i, i)
	}
	text += t.limits
	dir, path, err := configured("shaperd.toml", text)
	if err != nil {
		return nil, err
	}
	r, err := proxied(ctx, t, dir, t.bins.shaperd, "run", "--config", path, "--drain-timeout", "0s")
	if err == nil {
		r.profiles = true
		r.done = "msg=reloaded"
		r.reload = func() error { return r.process.cmd.Process.Signal(unix.SIGHUP) }
	}
	return r, err
}
