// Package systemd tests the files that run shaperd as a systemd service, by the tools of systemd and
// with a built binary: the file that SHAPERD_BIN names, or bin/shaperd at the top of the repository.
// No test starts a service manager: those that need one are in test/vm/installed.
package systemd

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"shaperd.dev/shaperd/test/lab"
)

// run runs a tool that must succeed and returns what it printed.
func run(t testing.TB, name string, args ...string) (stdout, stderr string) {
	t.Helper()
	stdout, stderr, err := try(t, name, args...)
	if err != nil {
		t.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, stdout, stderr)
	}
	return stdout, stderr
}

// try runs a tool that may exit with an error. A missing tool fails the test.
func try(t testing.TB, name string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("%v: scripts/install-deps installs it", err)
	}
	var out, errs bytes.Buffer
	cmd := exec.Command(path, args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("run %s: %v", name, err)
	}
	return out.String(), errs.String(), err
}

// daemonPath returns the path of the built binary.
func daemonPath(t testing.TB) string {
	t.Helper()
	path, err := lab.Binary()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func write(t testing.TB, path, text string, mode fs.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

func TestUnit_Verify(t *testing.T) {
	tests := []struct {
		name string
		file string // "" is the unit
		old  string // what to replace in it
		new  string
		want string // part of the output; "" is success
	}{
		{name: "as shipped"},
		{name: "unknown key", old: "WatchdogSec=", new: "WatchdogSecs=", want: "Unknown key 'WatchdogSecs'"},
		{name: "unknown type", old: "Type=notify", new: "Type=notified", want: "Failed to parse service type"},
		{name: "no such program", old: "ExecStart=/usr/bin/", new: "ExecStart=/opt/", want: "/opt/shaperd is not executable"},
		{name: "no such target", old: "Wants=network-online.target", new: "Requires=net.target", want: "net.target not found"},
		{name: "with the drop-in for keepalived", file: drainDropIn},
		{name: "unknown key in the drop-in", file: dropIn, old: "ReadWritePaths=", new: "WritePaths=", want: "Unknown key 'WritePaths'"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			text := map[string]string{unitFile: readFile(t, unitFile), dropIn: readFile(t, dropIn), drainDropIn: readFile(t, drainDropIn)}
			if tt.file == "" {
				tt.file = unitFile
			}
			changed := strings.Replace(text[tt.file], tt.old, tt.new, 1)
			if tt.old != "" && changed == text[tt.file] {
				t.Fatalf("%s does not have %q", tt.file, tt.old)
			}
			text[tt.file] = changed
			root := t.TempDir()
			units := filepath.Join(root, "usr/lib/systemd/system")
			write(t, filepath.Join(units, unitFile), text[unitFile], 0o644)
			write(t, filepath.Join(root, "etc/systemd/system", unitFile+".d", dropIn), text[dropIn], 0o644)
			if tt.file == drainDropIn {
				write(t, filepath.Join(root, "etc/systemd/system", unitFile+".d", "drain.conf"), text[drainDropIn], 0o644)
			}
			for _, name := range []string{"basic", "multi-user", "network-online", "shutdown", "sysinit"} {
				write(t, filepath.Join(units, name+".target"), "[Unit]\nDescription="+name+"\n", 0o644)
			}
			for _, program := range []string{"usr/bin/shaperd", "bin/kill"} {
				write(t, filepath.Join(root, program), "#!/bin/sh\n", 0o755)
			}
			stdout, stderr, err := try(t, "systemd-analyze", "verify", "--man=no", "--root="+root, filepath.Join(units, unitFile))
			got := stdout + stderr
			switch {
			case tt.want == "" && (err != nil || got != ""):
				t.Errorf("verify: %v\n%s", err, got)
			case tt.want != "" && !strings.Contains(got, tt.want):
				t.Errorf("verify: %v\n%swant %q", err, got, tt.want)
			}
		})
	}
}

// TestDropIn_Drain checks that the drop-in for keepalived runs what the unit does, but for the timeout.
func TestDropIn_Drain(t *testing.T) {
	u := readUnit(t, unitFile)
	want := u["Service"]["ExecStart"][0] + " --drain-timeout "
	if text := readFile(t, drainDropIn); !strings.Contains(text, "\nExecStart=\nExecStart="+want) {
		t.Errorf("the drop-in does not run %q...:\n%s", want, text)
	}
}

// TestDropIn_Instances checks that the drop-in for instances runs what the unit does, with files of the instance.
func TestDropIn_Instances(t *testing.T) {
	u, of := readUnit(t, unitFile), strings.NewReplacer("/shaperd.toml", "/%i.toml", "/shaperd/state", "/shaperd/%i/state")
	text := readFile(t, "instances.conf")
	for _, key := range []string{"ExecStartPre", "ExecStart", "ExecReload"} {
		want := "\n" + key + "=\n"
		for _, command := range u["Service"][key] {
			want += key + "=" + of.Replace(command) + "\n"
		}
		if !strings.Contains(text, want) {
			t.Errorf("the drop-in lacks:%s", want)
		}
	}
}

func TestUnit_SecurityScore(t *testing.T) {
	for _, tt := range []struct {
		name    string
		dropIns []string
		most    float64
	}{
		{"alone", nil, 1.8},
		{"with the drop-in", []string{dropIn}, 2.0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, filepath.Join(dir, unitFile), readFile(t, unitFile), 0o644)
			for _, file := range tt.dropIns {
				write(t, filepath.Join(dir, unitFile+".d", file), readFile(t, file), 0o644)
			}
			stdout, _ := run(t, "systemd-analyze", "security", "--offline=true", "--no-pager", filepath.Join(dir, unitFile))
			found := regexp.MustCompile(`Overall exposure level for shaperd\.service: ([0-9.]+) `).FindStringSubmatch(stdout)
			if found == nil {
				t.Fatalf("no score in:\n%s", stdout)
			}
			score, err := strconv.ParseFloat(found[1], 64)
			if err != nil {
				t.Fatal(err)
			}
			if score > tt.most {
				t.Errorf("exposure level %.1f, want at most %.1f\n%s", score, tt.most, stdout)
			}
			t.Logf("exposure level %.1f", score)
		})
	}
}

func TestSysusersFile(t *testing.T) {
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	file, err := filepath.Abs("shaperd.sysusers")
	if err != nil {
		t.Fatal(err)
	}
	if _, stderr := run(t, "systemd-sysusers", "--root="+root, file); strings.Contains(stderr, file) {
		t.Errorf("systemd-sysusers complains:\n%s", stderr)
	}
	u := readUnit(t, unitFile)
	for _, f := range []struct {
		path string
		name string
		want []string // "": any
	}{
		{path: "etc/passwd", name: u.service(t, "User"), want: []string{"shaperd", "x", "", "", "Traffic shaping proxy", "/", "/usr/sbin/nologin"}},
		{path: "etc/group", name: u.service(t, "Group"), want: []string{"shaperd", "x", "", ""}},
	} {
		text, err := os.ReadFile(filepath.Join(root, f.path))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for line := range strings.Lines(string(text)) {
			if name, _, _ := strings.Cut(line, ":"); name == f.name {
				got = strings.Split(strings.TrimSuffix(line, "\n"), ":")
			}
		}
		for i := range min(len(got), len(f.want)) {
			if f.want[i] == "" {
				got[i] = ""
			}
		}
		if diff := cmp.Diff(f.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s\nin:\n%s", f.path, diff, text)
		}
	}
}

// TestUnit_StopTimeoutCoversDrain compares TimeoutStopSec with the default --drain-timeout.
func TestUnit_StopTimeoutCoversDrain(t *testing.T) {
	help, _ := run(t, daemonPath(t), "run", "--help")
	found := regexp.MustCompile(`--drain-timeout .*\(default ([^)]+)\)`).FindStringSubmatch(help)
	if found == nil {
		t.Fatalf("no --drain-timeout in:\n%s", help)
	}
	drain, err := time.ParseDuration(found[1])
	if err != nil {
		t.Fatal(err)
	}
	stop, err := time.ParseDuration(readUnit(t, unitFile).service(t, "TimeoutStopSec"))
	if err != nil {
		t.Fatal(err)
	}
	if stop < drain+5*time.Second {
		t.Errorf("TimeoutStopSec=%v, but a drain can take %v", stop, drain)
	}
}
