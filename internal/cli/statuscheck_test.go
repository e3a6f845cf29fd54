package cli

import (
	"fmt"
	"net"
	"regexp"
	"strings"
	"testing"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// perfdata is the format of performance data that monitoring-plugins.org documents.
var perfdata = regexp.MustCompile(`^[a-z]+=[0-9.]+(B|);[0-9.]*;[0-9.]*;[0-9.]*(;[0-9.]+)?$`)

func TestStatusCheck(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*fakeDaemon)
		code   int
		want   string // up to the performance data
	}{
		{"ok", func(*fakeDaemon) {}, 0, "SHAPERD OK - limits are enforced"},
		{"silent", func(d *fakeDaemon) { d.health = api.Health{State: api.Silent, Detail: "no answer for 7s"} }, 2, "SHAPERD CRITICAL - silent: no answer for 7s"},
		{"starting", func(d *fakeDaemon) { d.health.State = api.Starting }, 1, "SHAPERD WARNING - starting"},
		{"stopping", func(d *fakeDaemon) { d.health.State, d.status.State = api.Stopping, "stopping" }, 1, "SHAPERD WARNING - stopping"},
		{
			"not attached", func(d *fakeDaemon) { d.health = api.Health{State: api.NotAttached, Detail: "plant at eth1"} },
			2, "SHAPERD CRITICAL - not attached: plant at eth1",
		},
		{
			"no downstream", func(d *fakeDaemon) { d.status.Listeners[0].Unavailable = "10.0.0.5:5432 is down | x" },
			2, "SHAPERD CRITICAL - no downstream is up at db: 10.0.0.5:5432 is down / x",
		},
		{"conformance", func(d *fakeDaemon) { d.status.Conformance = "violated" }, 2, "SHAPERD CRITICAL - conformance was violated in the last minute"},
		{"quotas", func(d *fakeDaemon) { d.status.QuotaError = "disk full" }, 2, "SHAPERD CRITICAL - quotas wait: disk full"},
		{"worst first", func(d *fakeDaemon) {
			d.status.Shared = &api.Shared{Problems: []api.Problem{{Severity: "warning", Title: "Hosts away"}, {Severity: "critical", Title: "Hosts disagree"}}}
			d.status.Bypass = &api.Bypass{}
		}, 2, "SHAPERD CRITICAL - hosts disagree; hosts away; bypass is on"},
		{"warnings", func(d *fakeDaemon) {
			s := &d.status
			s.Reload.OK, s.RolledBack = false, &api.Revision{Revision: "5f0c61"}
			s.Listeners[0].Hold, s.Listeners[0].Waiting = &api.Hold{State: "held"}, 7
			s.SourceErrors, s.ScheduleError, s.StateError, s.EndpointErrors = []string{"gold.txt:3"}, "a", "b", []string{"c\n"}
			d.limits[0].Shed = &api.Shed{Signals: []api.ShedSignal{{Name: "cpu", Error: "none"}}}
		}, 1, "SHAPERD WARNING - " + `"the last reload failed; rolled back to revision 5f0c61; new connections are held at db, 7 wait; old sources are in use: gold.txt:3; ` +
			`old values are in use: a; overrides are not saved: b; c\n; limit \"per-source\" cannot read cpu"`},
		{"ramp", func(d *fakeDaemon) { d.status.Listeners[0].Hold = &api.Hold{State: "ramp"} }, 0, "SHAPERD OK - limits are enforced"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := newFakeDaemon()
			tt.change(d)
			d.serve(t)
			stdout, stderr, err := d.run(t, "status", "--check")
			text, data, _ := strings.Cut(stdout, " | ")
			if strings.TrimSuffix(text, "\n") != tt.want || exitCode(err) != tt.code || stderr != "" || err != nil && err.Error() != "" {
				t.Errorf("exit code %d, %v\n%s%s\nwant %d\n%s", exitCode(err), err, stdout, stderr, tt.code, tt.want)
			}
			if strings.Count(stdout, "\n") != 1 || strings.Count(stdout, "|") > 1 {
				t.Errorf("not one line with one |: %q", stdout)
			}
			for _, label := range strings.Fields(data) {
				if !perfdata.MatchString(label) {
					t.Errorf("performance data %q", label)
				}
			}
			if data == "" && d.health.State != api.Silent && d.health.State != api.Starting {
				t.Error("no performance data")
			}
			ready := 0
			if d.health.State != api.Ready {
				ready = exitFailure
			}
			if stdout, _, err := d.run(t, "status", "--ready"); exitCode(err) != ready || stdout != d.health.String()+"\n" {
				t.Errorf("status --ready: %d, %q", exitCode(err), stdout)
			}
		})
	}
}

func TestStatusCheck_NoAnswer(t *testing.T) {
	stdout, _, err := command(t, "status", "--check", "--control", "/nowhere/control.sock")
	if exitCode(err) != 2 || stdout != "SHAPERD CRITICAL - no daemon answers at /nowhere/control.sock: the socket does not exist\n" {
		t.Errorf("no daemon: %d, %s", exitCode(err), stdout)
	}
	stdout, _, err = command(t, "status", "--ready", "--control", "/nowhere/control.sock")
	if exitCode(err) != exitFailure || !strings.HasPrefix(stdout, "no daemon answers") {
		t.Errorf("no daemon: %d, %s", exitCode(err), stdout)
	}
	d := newFakeDaemon()
	d.serve(t)
	for _, args := range []string{"--check --ready", "--check --json", "--ready --json"} {
		if _, _, err := d.run(t, strings.Fields("status "+args)...); exitCode(err) != exitUsage {
			t.Errorf("%s: %v", args, err)
		}
	}
	r := checkFailure(&api.APIError{Code: 403, Message: "permission denied"})
	if state, _ := r.state(); state != stateUnknown {
		t.Errorf("without permission: %v", state)
	}
}

// TestHealth_Drain checks what probers and scripts are told before and while a daemon stops.
func TestHealth_Drain(t *testing.T) {
	t.Parallel()
	listen, metrics := testutil.FreeAddr(t, "tcp"), testutil.FreeAddr(t, "tcp")
	s := startControlled(t, writeConfig(t, "", configText(listen, metrics, testutil.ServeTCP(t, testutil.Echo), "1MB/s")))
	c, err := net.Dial("tcp", listen)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := ping(c); err != nil {
		t.Fatal(err)
	}
	get := func(path string) string {
		code, body, err := testutil.Get(metrics, path)
		if err != nil {
			t.Error(err)
		}
		return fmt.Sprintf("%d %s", code, strings.TrimSpace(body))
	}
	s.must("status --ready", "ready")
	s.must("status --check", "SHAPERD OK", "connections=1;")
	if got := get("/ready") + ", " + get("/healthz"); got != "200 ready, 200 ok" {
		t.Error(got)
	}
	s.stop()
	s.waitLog("msg=stopping")
	if got := get("/ready") + ", " + get("/healthz"); got != "503 stopping, 200 ok" {
		t.Error(got)
	}
	if out, err := s.verb("status", "--ready"); exitCode(err) != exitFailure || out != "stopping\n" {
		t.Errorf("status --ready: %v\n%s", err, out)
	}
	if out, err := s.verb("status", "--check"); exitCode(err) != 1 || !strings.HasPrefix(out, "SHAPERD WARNING - stopping | ") {
		t.Errorf("status --check: %v\n%s", err, out)
	}
	c.Close()
	s.waitLog("msg=stopped")
}
