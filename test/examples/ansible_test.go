package examples

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/test/lab"
)

// A playbook runs the example for Ansible against a daemon.
type playbook struct {
	t      *testing.T
	dir    string
	daemon *lab.Daemon
	vars   map[string]any
}

func newPlaybook(t *testing.T) *playbook {
	t.Helper()
	p := &playbook{t: t, dir: t.TempDir()}
	listener := map[string]any{"name": "db", "address": "tcp://" + testutil.FreeAddr(t, "tcp"), "downstream": "127.0.0.1:9"}
	daemon := map[string]any{"metrics": "", "dashboard": "", "pin_path": "/nowhere/pins"}
	config := fmt.Sprintf("[daemon]\nmetrics = \"\"\ndashboard = \"\"\npin_path = \"/nowhere/pins\"\n[[listen]]\nname = \"db\"\naddress = %q\ndownstream = %q\n"+
		"[[limit]]\nname = \"database\"\nrate = \"10Mbit/s\"\n", listener["address"], listener["downstream"])
	var err error
	if p.daemon, err = lab.StartDaemon(t.Context(), lab.DaemonOptions{Config: config}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.daemon.Close(); err != nil {
			t.Error(err)
		}
	})
	p.vars = map[string]any{
		"shaperd_program": binary(t), "shaperd_config": p.daemon.Config, "shaperd_group": "root",
		"shaperd_daemon": daemon, "shaperd_listeners": []any{listener},
	}
	return p
}

// run runs the example with a rate of the limit, without the tasks that install and start what the
// test has started.
func (p *playbook) run(rate string, args ...string) (string, error) {
	all := maps.Clone(p.vars)
	all["shaperd_limits"] = []any{map[string]any{"name": "database", "rate": rate}}
	vars, err := json.Marshal(all)
	if err != nil {
		return "", err
	}
	c := exec.Command("ansible-playbook", append([]string{
		"-i", "localhost,", "--diff", "--skip-tags", "package,service", "-e", string(vars),
		"-e", "ansible_connection=local ansible_become=false ansible_python_interpreter=/usr/bin/python3", "playbook.yml",
	}, args...)...)
	c.Dir = p.dir
	for _, v := range []string{"ANSIBLE_HOME", "ANSIBLE_LOCAL_TEMP", "ANSIBLE_REMOTE_TEMP"} {
		c.Env = append(c.Env, v+"="+p.dir)
	}
	c.Env = append(c.Env, "PATH="+os.Getenv("PATH"), "HOME="+p.dir, "LC_ALL=C.UTF-8", "ANSIBLE_PIPELINING=1", "ANSIBLE_NOCOLOR=1", "SHAPERD_CONTROL="+p.daemon.Control)
	out, err := c.CombinedOutput()
	return string(out), err
}

// rate returns the rate of the limit that is effective, in bit/s.
func (p *playbook) rate() float64 {
	p.t.Helper()
	l, err := api.NewClient(p.daemon.Control).Limit(p.t.Context(), "database")
	if err != nil {
		p.t.Fatal(err)
	}
	return l.Rate * 8
}

// recap is the last line that ansible-playbook prints.
var recap = regexp.MustCompile(`localhost +: ok=\d+ +changed=(\d+) +unreachable=0 +failed=(\d+)`)

func (p *playbook) check(name, out, changed, failed string, rate float64, texts ...string) {
	p.t.Helper()
	if m := recap.FindStringSubmatch(out); m == nil || m[1] != changed || m[2] != failed {
		p.t.Errorf("%s: not changed=%s, failed=%s:\n%s", name, changed, failed, out)
	}
	if got := p.rate(); got != rate {
		p.t.Errorf("%s: the rate is %v, want %v", name, got, rate)
	}
	for _, text := range texts {
		if !strings.Contains(out, text) {
			p.t.Errorf("%s: no %q in\n%s", name, text, out)
		}
	}
}

// TestAnsible checks that the example changes nothing with --check, and says what it would change;
// that it makes a change effective, and the second time none; and that it refuses mistakes.
func TestAnsible(t *testing.T) {
	t.Parallel()
	p := newPlaybook(t)
	text := strings.Replace(readFile(t, "../../configs/ansible/shaperd.yml"), "hosts: shaperd", "hosts: localhost", 1)
	if err := os.WriteFile(filepath.Join(p.dir, "playbook.yml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(filepath.Join(p.dir, "templates"), os.DirFS("../../configs/ansible/templates")); err != nil {
		t.Fatal(err)
	}
	before := readFile(t, p.daemon.Config)
	var mistake string
	var refused error
	var checks sync.WaitGroup
	checks.Go(func() { mistake, refused = p.run("20mbps", "--check") })
	out, _ := p.run("20Mbit/s", "--check")
	checks.Wait()
	p.check("--check", out, "1", "0", 10e6, "+rate = \"20Mbit/s\"", "limit database", "10Mbit/s = 1.25MB/s  ->  20Mbit/s = 2.5MB/s")
	p.check("a mistake", mistake, "0", "1", 10e6, "is in bytes to tc")
	if refused == nil || readFile(t, p.daemon.Config) != before {
		t.Errorf("a check has changed the configuration, or not failed: %v", refused)
	}
	out, err := p.run("20Mbit/s")
	p.check("a change", out, "2", "0", 20e6)
	if err != nil {
		t.Error(err)
	}
	out, _ = p.run("20Mbit/s")
	p.check("no change", out, "0", "0", 20e6)
}
