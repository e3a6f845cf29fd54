package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// run runs a verb against d.
func (d *fakeDaemon) run(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	return command(t, append([]string{"--control", d.path}, args...)...)
}

func TestVerbs(t *testing.T) {
	d := newFakeDaemon()
	d.serve(t)
	for _, tt := range []struct {
		args string
		code int
		want []string
	}{
		{"status", 0, []string{
			"conformance: ok\nTHROTTLING  HOW\nper-source  84% of 10Mbit/s delayed by 35ms (p99 180ms); 7 connections waiting, 20 in flight; 7.3/s refused (wait-timeout, queue-full)",
			"\nWOULD THROTTLE  HOW\nwatch           50% of 250pps delayed\n", "Most delayed: 192.0.2.7 Example, 840ms per second\n",
			"pid 99, up 2h3m, mode enforce, /etc/shaperd/shaperd.toml", "memory 23.5MB, CPU 3% of one core, descriptors 40 of 20000, pacing latency p99 100µs",
			"configuration loaded at 10:00:00 in 2.1ms", "\nLISTENER  ADDRESS             OPEN  FLOWS",
			"\ndb        tcp://0.0.0.0:5432    12      3  9.68Mbit/s  3.2Mbit/s       400            1\n",
			"\n10.0.0.6:5432  db        down           0    -        -          0           -     -       8       1\n", "\nplant       eth1       egress     shape  up     ",
		}},
		{"limits", 0, []string{
			"LIMIT       MODE         PASSES  DELAYED   P50    P99  IN FLIGHT  WAITING  REFUSED  CONFORMANCE  LIMITS\n",
			"\nper-source  enforce    10Mbit/s      84%  35ms  180ms         20        7    7.3/s  ok           10Mbit/s, queue 200ms, 20 connections\n",
			"\nwatch       observe      250pps      50%     0      0          0        0        0  -            100pps",
		}},
		{"limits per-source", 0, []string{
			"10.4Mbit/s over 1s, 10Mbit/s over 10s, 9.6Mbit/s over 60s; 5GB in total", "one bucket per source",
			"100 queue-full (3.2/s now), 4 wait-timeout (4.1/s now)", "ok: largest excess 14kB, allowed 15kB; monitors one bucket at a time",
		}},
		{"limits watch", 0, []string{"conformance  not monitored"}},
		{"limits per-sourc", exitUsage, []string{`unknown limit "per-sourc"; limits of this daemon: database, per-source, watch; did you mean "per-source"?`}},
		{"limits a b", exitUsage, []string{`limits takes [LIMIT]: unexpected "b"`}},
		{"keys", exitUsage, []string{"keys requires --limit LIMIT"}},
		{"keys --limit x", exitUsage, []string{`unknown limit "x"; limits of this daemon`}},
		{"keys --limit per-source", 0, []string{"\nsource 192.0.2.7/32     9.6Mbit/s     840ms    <=3/s    123kB       3   35.1ms          5        7  AS64500 Example\n"}},
		{"keys --limit per-source --sort size", exitUsage, []string{`invalid argument "size" for "--sort" flag: use delayed, dropped or rate`}},
		{"keys --limit per-source --top 0", exitUsage, []string{"must be a number above 0"}},
		{"talkers --by prefix", 0, []string{"PREFIX ", "192.0.2.7 ", `"evil\x1b]0;x\a"`}},
		{"talkers me", exitUsage, []string{`talkers takes no arguments: unexpected "me"`}},
		{"connections", 0, []string{"4711  192.0.2.7:40000  db tcp/5432  10.0.0.5:5432  open   1m1s  20ms  1.23MB   99B   12.3s  per-source", `AS64500 "Example \x1b[31mLtd"`, "and 11 more; use --top"}},
		{"connections --limit watch --listener db --source 192.0.2.0/24 --sort waited", 0, []string{"4711"}},
		{"connections --limit wath", exitUsage, []string{`did you mean "watch"?`}},
		{"connections --listener bd", exitUsage, []string{`unknown listener "bd"; listeners of this daemon: db`}},
		{"connections kill 4711", 0, []string{"connection 4711 was reset"}},
		{"connections kill 12", exitFailure, []string{"reset connection 12: unknown connection 12"}},
		{"connections kill 12 4711", exitFailure, []string{"connection 4711 was reset", "reset connection 12: unknown connection 12"}},
		{"connections kill all", exitUsage, []string{`"all" is not an ID`}},
		{"connections kill", exitUsage, []string{"connections kill requires ID..."}},
		{"downstreams", 0, []string{"10.0.0.5:5432  db        up            12   50    210µs       1220       4.2ms  61ms       0       0\n"}},
		{"downstreams drain 10.0.0.5:5432", 0, []string{"10.0.0.5:5432  db        drained "}},
		{"downstreams enable 10.0.0.5:5432 --listener db", 0, []string{"10.0.0.5:5432  db        up "}},
		{"downstreams drain 10.0.0.9:1", exitUsage, []string{`unknown downstream "10.0.0.9:1"; downstreams of this daemon: 10.0.0.5:5432`}},
		{"downstreams drain 10.0.0.5:5432 --listener bd", exitUsage, []string{`unknown listener "bd"; listeners of this daemon: db`}},
		{"downstreams stop", exitUsage, []string{`unexpected "stop": use "downstreams drain DOWNSTREAM"`}},
		{"explain --source 192.0.2.7 --to tcp/5432", 0, []string{
			"192.0.2.7 to tcp/5432: listener \"db\"\nAS64500 Example\nNew traffic would be delayed by 35.1ms: limit \"per-source\", rate.\n",
			"enforce    123kB       3   35.1ms          5        7\n", `Bytes to the downstream: bottleneck is "per-source".`, "4711  192.0.2.7:40000",
		}},
		{"explain --source here --to tcp/5432", exitUsage, []string{`--source "here"`}},
		{"set limit per-source rate=20Mbit/s --for 10m", 0, []string{
			"limit per-source\nwas  10Mbit/s, queue 200ms, 20 connections, mode enforce\nnow  20Mbit/s, queue 200ms, 20 connections, mode enforce\nset  rate=20Mbit/s, until ",
		}},
		{"unset limit per-source", 0, []string{"was  20Mbit/s, queue 200ms, 20 connections, mode enforce\nnow  10Mbit/s"}},
		{"set limit per-source rate=10mbps", exitUsage, []string{"is in bytes to tc"}},
		{"set limit per-source rate", exitUsage, []string{`"rate": write KEY=VALUE`}},
		{"set limit per-source rate=1B/s rate=2B/s", exitUsage, []string{"duplicate key rate"}},
		{"set limit per-source", exitUsage, []string{"set limit requires LIMIT KEY=VALUE..."}},
		{"set limit databse rate=1B/s", exitUsage, []string{`did you mean "database"?`}},
		{"set limit per-source rate=1MB/s --for 10", exitUsage, []string{`"10" has no unit`}},
		{"set limit per-source rate=1MB/s --for 0", exitUsage, []string{"must be more than 0", "omit --for to set no end"}},
		{"set limit per-source rate=1MB/s --for 1m --save", exitUsage, []string{"--save is permanent"}},
		{"set lmit x", exitUsage, []string{"set requires limit LIMIT KEY=VALUE..."}},
		{"unset", exitUsage, []string{"unset requires limit LIMIT"}},
		{"observe database", 0, []string{"was  80Mbit/s, queue 200ms, mode enforce\nnow  80Mbit/s, queue 200ms, mode observe\nset  observe=true, until \"shaperd unset limit\""}},
		{"enforce database --for 1h", 0, []string{"mode observe\nnow  80Mbit/s, queue 200ms, mode enforce"}},
		{"blocks", 0, []string{"No prefix is blocked."}},
		{"block 192.0.2.0/24", 0, []string{"192.0.2.0/24  ", `"shaperd unblock"`}},
		{"block ::ffff:198.51.100.7 --for 10m", 0, []string{"198.51.100.7/32  "}},
		{"block ::ffff:198.51.100.0/120", 0, []string{"198.51.100.0/24  "}},
		{"unblock 198.51.100.0/24", 0, []string{"198.51.100.7/32  "}},
		{"block 192.0.2.7/24", exitUsage, []string{`"192.0.2.7/24" has host bits set: write "192.0.2.0/24"`}},
		{"block fe80::1%eth0", exitUsage, []string{`"fe80::1%eth0" has an unsupported IPv6 zone`}},
		{"block 192.0.2.7 --for 9000h", exitUsage, []string{"9000h: must be at most 366d"}},
		{"block 192.0.2.7 --for 367d", exitUsage, []string{"367d: must be at most 366d"}},
		{"block 192.0.2.7 --for 1x", exitUsage, []string{"is not a time"}},
		{"block here", exitUsage, []string{`"here" is not an address, or a prefix such as "192.0.2.0/24"`}},
		{"unblock 192.0.2.0/24", 0, []string{"198.51.100.7/32  "}},
		{"unblock 192.0.2.0/24", exitFailure, []string{"192.0.2.0/24 is not blocked"}},
		{"bypass", exitUsage, []string{"bypass requires on|off"}},
		{"bypass of", exitUsage, []string{"bypass takes on or off"}},
		{"bypass off --for 1m", exitUsage, []string{"--for requires bypass on"}},
		{"bypass on", 0, []string{"BYPASS IS ON since ", `until "shaperd bypass off"`}},
		{"status", 0, []string{"BYPASS IS ON since 12:03:00", "OVERRIDE OF  VALUES         SINCE     UNTIL\ndatabase     observe=false  12:03:00  13:03:00\n", "BLOCKED          SINCE"}},
		{"bypass off", 0, []string{"Bypass is off: limits are enforced again."}},
		{"bypass off", 0, []string{"Bypass was already off"}},
		{"show", exitUsage, []string{"unknown command \"show\" for \"shaperd\"; use \"shaperd status\"\nSee \"shaperd --help\""}},
		{"stauts", exitUsage, []string{`; did you mean "status"?`}},
		{"lmits", exitUsage, []string{`; did you mean "limits"?`}},
		{"reload", 0, []string{"reloaded in 2.1ms"}},
		{"events", 0, []string{"2026-03-01 10:00:00 info  ready limits=3\n", `2026-03-01 12:03:00 error reload err="a b\x1b" n=""`}},
		{"top", 0, []string{
			"shaperd: conformance ok, refusing 7.3/s, mode enforce, 2026-03-01 12:03:00\n12 connections, 3 flows, to downstreams 9.68Mbit/s, from downstreams 3.2Mbit/s, CPU 3%, memory 23.5MB\n",
			"\nper-source    10Mbit/s      84%  180ms  20     7    7.3/s  ok", "\nkeys of per-source, by delayed\nKEY ", "\nsource 198.51.100.1/32 ",
		}},
		{"set limit per-source rate=2MB/s --for 1m --until-reload", exitUsage, []string{"--for and --until-reload cannot be combined"}},
		{"top --json", exitUsage, []string{"top does not support --json"}},
		{"run --json", exitUsage, []string{"run does not support --json"}},
		{"explain --json --config /nowhere --source ::1 --to tcp/1", exitUsage, []string{"explain does not support --json with --config"}},
		{"completion elvish", exitUsage, []string{`unsupported shell "elvish"`}},
		{"completion bash", 0, []string{"bash completion V2 for shaperd"}},
		{"completion zsh", 0, []string{"#compdef shaperd"}},
		{"completion fish", 0, []string{"fish completion for shaperd"}},
		{"__complete convert ", 0, []string{"haproxy\nnginx\niptables\n:4"}},
		{"__complete limits wat", 0, []string{"per-source\nwatch\ndatabase\n:4"}},
		{"__complete keys --limit ", 0, []string{"per-source\nwatch\ndatabase\n:4"}},
		{"__complete talkers --by ", 0, []string{"source\nprefix\nasn\n:4"}},
	} {
		t.Run(tt.args, func(t *testing.T) {
			stdout, stderr, err := d.run(t, strings.Split(tt.args, " ")...)
			if code := exitCode(err); code != tt.code {
				t.Errorf("exit code %d, want %d: %v", code, tt.code, err)
			}
			all := stdout + stderr + fmt.Sprint(err)
			for _, want := range tt.want {
				if !strings.Contains(all, want) {
					t.Errorf("%q is not in:\n%s", want, all)
				}
			}
			if strings.ContainsRune(all, '\x1b') {
				t.Errorf("an escape got through: %q", all)
			}
		})
	}
}

func TestVerbs_NoDaemon(t *testing.T) {
	t.Setenv("SHAPERD_CONTROL", "/nowhere/control.sock")
	for _, args := range []string{
		"status", "limits", "limits x", "keys --limit x", "talkers", "connections", "connections kill 1", "downstreams", "downstreams drain x",
		"explain --source ::1 --to tcp/1", "set limit x rate=1MB/s", "unset limit x", "observe x", "enforce x", "block ::1", "unblock ::1", "blocks",
		"bypass on", "reload", "stop", "events", "events --follow", "top", "status --json", "shared status", "shared forget x --yes",
	} {
		stdout, stderr, err := command(t, strings.Split(args, " ")...)
		if exitCode(err) != exitNoDaemon || !strings.Contains(err.Error(), "no daemon answers at /nowhere/control.sock") || stdout+stderr != "" {
			t.Errorf("%s: %v\n%s%s", args, err, stdout, stderr)
		}
		if strings.HasPrefix(args, "explain") && !strings.Contains(err.Error(), "--config") {
			t.Errorf("%s: %v", args, err)
		}
	}
	if stdout, _, err := command(t, "__complete", "limits", ""); err != nil || stdout != ":4\n" {
		t.Errorf("completion without a daemon: %q, %v", stdout, err)
	}
}

func TestVerbs_JSON(t *testing.T) {
	d := newFakeDaemon()
	d.serve(t)
	for _, args := range []string{
		"status", "limits", "limits watch", "keys --limit watch", "talkers", "connections", "connections kill 4711", "downstreams",
		"downstreams drain 10.0.0.5:5432", "explain --source 192.0.2.7 --to tcp/5432", "set limit watch packets=1pps", "unset limit watch",
		"observe watch", "enforce watch", "block ::1", "blocks", "unblock ::1", "bypass on", "bypass off", "reload", "events",
		"shared status", "shared forget gw3 --yes",
	} {
		stdout, _, err := d.run(t, append(strings.Split(args, " "), "--json")...)
		var v any
		if parse := json.Unmarshal([]byte(stdout), &v); err != nil || parse != nil {
			t.Errorf("%s: %v, %v\n%s", args, err, parse, stdout)
		}
	}
}

func TestStatus_ConformanceViolated(t *testing.T) {
	d := newFakeDaemon()
	d.serve(t)
	d.change(func() {
		d.status.Conformance = "violated"
		d.limits[0].Conformance = api.Conformance{Sigma: 99000, Allowed: 15000, Violations: 3}
		d.status.Reload = api.ReloadStatus{At: fakeNow, Loaded: fakeStart, Errors: []string{"shaperd.toml:3:1: unknown key"}}
	})
	stdout, _, err := d.run(t, "status")
	for _, want := range []string{
		"conformance: VIOLATED in the last minute\n  per-source: largest excess 99kB, allowed 15kB; 3 violations since the start\n",
		"RELOAD FAILED at 12:03:00; the configuration loaded at 10:00:00 stays effective:\n  shaperd.toml:3:1: unknown key\n",
	} {
		if !strings.Contains(stdout, want) {
			t.Errorf("%q is not in:\n%s", want, stdout)
		}
	}
	if err == nil || err.Error() != "conformance was violated in the last minute" || exitCode(err) != exitFailure {
		t.Errorf("status fails with %v", err)
	}
}

func TestReload_InvalidFile(t *testing.T) {
	d := newFakeDaemon()
	d.serve(t)
	d.change(func() { d.reload = api.ReloadStatus{Errors: []string{"shaperd.toml:3:1: unknown key"}} })
	stdout, stderr, err := d.run(t, "reload")
	if !errors.Is(err, errReloadFailed) || stderr != "shaperd.toml:3:1: unknown key\n" || stdout != "" {
		t.Errorf("%v\n%s%s", err, stdout, stderr)
	}
}

func TestStop_ShowsProgress(t *testing.T) {
	t.Parallel()
	d := newFakeDaemon()
	stop := d.serve(t)
	out := new(testutil.Buffer)
	ended := make(chan error)
	go func() {
		ended <- run(t.Context(), env{stdout: out, stderr: out}, []string{"--control", d.path, "stop"})
	}()
	out.WaitFor(t, "stopping: 12 connections and 3 flows left\n")
	d.change(func() { d.status.Listeners[0].Connections = 1 })
	out.WaitFor(t, "stopping: 1 connection and 3 flows left\n")
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	out.WaitFor(t, "the daemon has stopped\n")
}

func TestEvents_Follow(t *testing.T) {
	t.Parallel()
	d := newFakeDaemon()
	stop := d.serve(t)
	out := new(testutil.Buffer)
	ended := make(chan error)
	e := env{stdout: out, stderr: out}
	ctx, cancel := context.WithCancel(t.Context())
	go func() { ended <- run(ctx, e, []string{"--control", d.path, "events", "--follow", "--json"}) }()
	out.WaitFor(t, `"message":"reload"`)
	stop()
	d.change(func() {
		d.status.PID = 100
		d.events = []api.Event{{ID: 1, Time: fakeNow, Level: "info", Message: "ready again"}}
	})
	d.serve(t)
	out.WaitFor(t, `"message":"ready again"`)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if n := strings.Count(out.String(), "\n"); n != 3 {
		t.Errorf("%d lines for 3 events:\n%s", n, out)
	}
}

func TestVerdictText(t *testing.T) {
	limits := []api.LimitBucket{
		{Limit: "a", Mode: "enforce", Bucket: &api.Bucket{NextDeparture: 0.2, InFlight: 5, Waiting: 7}},
		{Limit: "b", Mode: "observe", Bucket: &api.Bucket{NextDeparture: 9}},
		{Limit: "c", Mode: "enforce"},
	}
	for _, tt := range []struct{ verdict, reason, want string }{
		{"pass", "", "New traffic passes without delay."},
		{"delay", "rate", `New traffic would be delayed by 200ms: limit "a", rate.`},
		{"delay", "connections", `A new connection would wait for a slot of limit "a": 5 in use, 7 waiting. Open connections may send again in 200ms.`},
		{"refuse", "queue-full", `New traffic would be refused: limit "a", queue-full.`},
	} {
		if got := verdictText(api.Explanation{Limits: limits, Verdict: tt.verdict, Reason: tt.reason, By: "a"}); got != tt.want {
			t.Errorf("%s, %s: %s", tt.verdict, tt.reason, got)
		}
	}
	limits[0].Bucket.Reserved = true
	want := `5 in use, the free one is reserved for a waiter that needs other limits too, 7 waiting.`
	if got := verdictText(api.Explanation{Limits: limits, Verdict: "delay", Reason: "connections", By: "a"}); !strings.Contains(got, want) {
		t.Errorf("%s, want %s in it", got, want)
	}
}
