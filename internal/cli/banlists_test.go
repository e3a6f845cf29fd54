package cli

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
)

// bannedAt returns a daemon, and an environment in which other programs call it as shaperd.
func bannedAt(t *testing.T) (s *controlledDaemon, environ []string) {
	t.Helper()
	s = startControlled(t, writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s")))
	bin := t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\n%s=1 %s SHAPERD_CONTROL='%s' exec '%s' \"$@\"\n", asShaperd, noRaceSleep, s.socket, os.Args[0])
	if err := os.WriteFile(filepath.Join(bin, "shaperd"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return s, append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"))
}

// waitBlocked waits until a prefix is blocked, or is not any more.
func (s *controlledDaemon) waitBlocked(prefix string, want bool) {
	s.t.Helper()
	testutil.WaitFor(s.t, fmt.Sprintf("block of %s: %v", prefix, want), func() bool {
		out, err := s.verb("blocks")
		return err == nil && strings.Contains(out, prefix) == want
	})
}

// background runs a program until the test ends.
func background(t *testing.T, environ []string, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	out := new(bytes.Buffer)
	cmd.Env, cmd.Stdout, cmd.Stderr = environ, out, out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("%s:\n%s", name, out)
		}
	})
}

// TestFail2ban has a source blocked of which a log has three failed logins, by fail2ban with the action in configs.
func TestFail2ban(t *testing.T) {
	t.Parallel()
	s, environ := bannedAt(t)
	folder := t.TempDir()
	at := func(name string) string { return filepath.Join(folder, name) }
	action, err := os.ReadFile("../../configs/fail2ban/shaperd.conf")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"auth.log":              "",
		"fail2ban.conf":         "[Definition]\nloglevel = INFO\nlogtarget = " + at("log") + "\nsyslogsocket = auto\nsocket = " + at("socket") + "\npidfile = " + at("pid") + "\ndbfile = None\ndbpurgeage = 1d\ndbmaxmatches = 10\n",
		"filter.d/app.conf":     "[Definition]\nfailregex = ^ login failed from <HOST>$\n",
		"action.d/shaperd.conf": string(action),
		"jail.conf":             "[app]\nenabled = true\nbackend = polling\nfilter = app\nlogpath = " + at("auth.log") + "\nmaxretry = 3\nfindtime = 10m\nbantime = 1h\naction = shaperd\n",
	} {
		if err := os.MkdirAll(filepath.Dir(at(name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at(name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	background(t, environ, "fail2ban-server", "-f", "-c", folder, "-s", at("socket"), "-p", at("pid"), "start")
	client := func(args ...string) error {
		return exec.Command("fail2ban-client", append([]string{"-c", folder, "-s", at("socket")}, args...)...).Run()
	}
	testutil.WaitFor(t, "fail2ban", func() bool { return client("status", "app") == nil })
	f, err := os.OpenFile(at("auth.log"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, source := range []string{"192.0.2.7", "2001:db8::7", "192.0.2.8", "192.0.2.7", "2001:db8::7", "192.0.2.8", "192.0.2.7", "2001:db8::7"} {
		fmt.Fprintf(f, "%s login failed from %s\n", time.Now().Format("2006-01-02 15:04:05"), source)
	}
	s.waitBlocked("192.0.2.7/32", true)
	s.waitBlocked("2001:db8::7/128", true)
	if out, _ := s.verb("blocks"); strings.Contains(out, "192.0.2.8") || strings.Contains(out, "unblock") {
		t.Errorf("two failed logins block, or a block does not end by itself:\n%s", out)
	}
	if err := client("set", "app", "unbanip", "192.0.2.7"); err != nil {
		t.Fatal(err)
	}
	s.waitBlocked("192.0.2.7/32", false)
	s.must("block 2001:db8::7") // for good, by an operator
	if err := client("set", "app", "unbanip", "2001:db8::7"); err != nil {
		t.Fatal(err)
	}
	s.waitLog(`unblock=2001:db8::7/128`)
	s.must("blocks", "2001:db8::7/128")
}

// TestCrowdSec has sources blocked that CrowdSec bans, by its bouncer with the script in configs, and all of them at once by the line
// of the documentation.
func TestCrowdSec(t *testing.T) {
	t.Parallel()
	s, environ := bannedAt(t)
	folder, port := t.TempDir(), testutil.FreeAddr(t, "tcp")
	at := func(name string) string { return filepath.Join(folder, name) }
	bouncer, err := filepath.Abs("../../configs/crowdsec/shaperd-bouncer")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"config.yaml": strings.NewReplacer("@", folder, "PORT", port).Replace(`
common: {daemonize: false, log_media: stdout, log_level: info, working_dir: "@"}
config_paths: {config_dir: "@", data_dir: "@", hub_dir: "@", index_path: "@/index.json", simulation_path: "@/simulation.yaml", notification_dir: "@", plugin_dir: "@"}
db_config: {type: sqlite, db_path: "@/crowdsec.db", log_level: info, use_wal: false}
api:
  client: {credentials_path: "@/client.yaml"}
  server: {listen_uri: "PORT", profiles_path: "@/profiles.yaml", log_level: info}
prometheus: {enabled: false}
`),
		"index.json": "{}", "simulation.yaml": "",
		"profiles.yaml": "name: ban\nfilters: [\"true\"]\ndecisions: [{type: ban, duration: 4h}]\non_success: break\n",
		"bouncer.yaml": strings.NewReplacer("@", folder, "PORT", port, "SCRIPT", bouncer).Replace(`
bin_path: SCRIPT
piddir: "@"
update_frequency: 100ms
cache_retention_duration: 10s
daemonize: false
log_mode: stdout
log_level: info
api_url: http://PORT/
api_key: test-key
prometheus: {enabled: false}
`),
	} {
		if err := os.WriteFile(at(name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	cscli := func(args ...string) error {
		out, err := exec.Command("cscli", append([]string{"-c", at("config.yaml")}, args...)...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("cscli %q: %w: %s", args, err, out)
		}
		return nil
	}
	must := func(args ...string) {
		t.Helper()
		if err := cscli(args...); err != nil {
			t.Fatal(err)
		}
	}
	must("machines", "add", "test", "--password", "secret", "-f", at("client.yaml"), "-u", "http://"+port)
	must("bouncers", "add", "shaperd", "-k", "test-key")
	background(t, os.Environ(), "crowdsec", "-c", at("config.yaml"), "-no-cs")
	testutil.WaitFor(t, "the local API", func() bool { return cscli("decisions", "list") == nil })
	must("decisions", "add", "--ip", "192.0.2.7", "--duration", "1h")
	must("decisions", "add", "--range", "198.51.100.0/24", "--duration", "1h")
	background(t, environ, "crowdsec-custom-bouncer", "-c", at("bouncer.yaml"))
	s.waitBlocked("192.0.2.7/32", true)
	s.waitBlocked("198.51.100.0/24", true)
	must("decisions", "add", "--ip", "2001:db8::7", "--duration", "1h")
	s.waitBlocked("2001:db8::7/128", true)
	must("decisions", "delete", "--ip", "192.0.2.7")
	s.waitBlocked("192.0.2.7/32", false)
	s.must("blocks", "198.51.100.0/24", "2001:db8::7/128")

	s, environ = bannedAt(t)
	cmd := exec.Command("sh", "-c", strings.Replace(crowdSecImport, "cscli", "cscli -c "+at("config.yaml"), 1))
	cmd.Env = environ
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "2 of 2 blocked") {
		t.Errorf("%v: %s", err, out)
	}
	s.must("blocks", "198.51.100.0/24", "2001:db8::7/128")
}

// crowdSecImport is the line in docs/operation.md that blocks all that CrowdSec bans.
const crowdSecImport = `cscli decisions list -a --no-simu -t ban -l 0 -o raw | awk -F, 'tolower($3) ~ /^(ip|range):/ { sub(/^[^:]*:/, "", $3); print $3 }' | shaperd block --file - --for 10m`
