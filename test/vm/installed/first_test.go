//go:build vmguest

package installed

import (
	"os"
	"os/user"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestFirst installs the package, and runs the service through its life.
func TestFirst(t *testing.T) {
	serve(t)
	steps(
		t,
		step{"install", testInstall},
		step{"start", testStart},
		step{"reload", testReload},
		step{"reload of an invalid configuration", testInvalidReload},
		step{"crash", testCrash},
		step{"watchdog", testWatchdog},
		step{"security", func(t *testing.T) { testSecurity(t, 1.8) }},
		step{"packet plane", testPacketPlane},
		step{"security with the packet plane", func(t *testing.T) { testSecurity(t, 2.0) }},
		step{"transparent listener", testTransparent},
		step{"block", func(t *testing.T) { run(t, "shaperd", "block", "192.0.2.0/24") }},
	)
}

func testInstall(t *testing.T) {
	install(t, "old.deb")
	if _, err := user.Lookup("shaperd"); err != nil {
		t.Error(err)
	}
	run(t, "systemd-analyze", "verify", "--man=no", "shaperd.service")
	// There is no configuration yet: that is not a failure.
	expect(t, "UnitFileState", "enabled")
	expect(t, "ActiveState", "inactive")
	run(t, "systemctl", "start", "shaperd")
	expect(t, "ConditionResult", "no")
	for _, file := range []string{
		"/usr/share/man/man8/shaperd.8.gz", "/usr/share/bash-completion/completions/shaperd", "/usr/share/doc/shaperd/copyright",
		"/usr/share/doc/shaperd/examples/shaperd.toml", "/etc/shaperd/conf.d",
	} {
		if _, err := os.Stat(file); err != nil {
			t.Error(err)
		}
	}
}

func testStart(t *testing.T) {
	configure(t, proxyConfig)
	run(t, "systemctl", "start", "shaperd")
	expect(t, "ActiveState", "active")
	status := run(t, "cat", "/proc/"+property(t, "MainPID")+"/status")
	owner, err := user.Lookup("shaperd")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"Uid:\t" + owner.Uid + "\t",
		"CapEff:\t0000000000000400\n", // CAP_NET_BIND_SERVICE
		"CapBnd:\t0000000000000400\n",
		"NoNewPrivs:\t1\n",
		"Seccomp:\t2\n",
	} {
		if !strings.Contains(status, want) {
			t.Errorf("no %q in the status of the process:\n%s", want, status)
		}
	}
	traffic(t)
	if text := testutil.MustScrape(t, "127.0.0.1:9464"); !strings.Contains(text, "\nprocess_start_time_seconds ") {
		t.Errorf("no start time in the metrics:\n%s", text)
	}
	run(t, "shaperd", "status")
}

// testReload keeps a connection, and opens another port.
func testReload(t *testing.T) {
	c, pid := dial(t, "tcp", "127.0.0.1:80"), property(t, "MainPID")
	exchange(t, c)
	configure(t, strings.Replace(proxyConfig, `"tcp://[::1]:80"`, `"tcp://[::1]:80", "tcp://127.0.0.1:81"`, 1))
	run(t, "systemctl", "reload", "shaperd")
	exchange(t, c)
	exchange(t, dial(t, "tcp", "127.0.0.1:81"))
	expect(t, "MainPID", pid)
}

func testInvalidReload(t *testing.T) {
	c := dial(t, "tcp", "127.0.0.1:81")
	exchange(t, c)
	configure(t, strings.Replace(proxyConfig, "2MB/s", "2mbps", 1))
	if out := try("systemctl", "reload", "shaperd"); !strings.Contains(out, "failed") {
		t.Errorf("the reload did not fail: %s", out)
	}
	exchange(t, c)
	exchange(t, dial(t, "tcp", "127.0.0.1:81"))
	configure(t, proxyConfig)
	run(t, "systemctl", "reload", "shaperd")
	traffic(t)
}

// testCrash connects while no daemon runs: systemd keeps the listening socket.
func testCrash(t *testing.T) {
	kill(t, syscall.SIGKILL)
	for !strings.Contains("failed activating", property(t, "ActiveState")) {
		t.Log("the daemon is still being reaped")
	}
	c := dial(t, "tcp", "127.0.0.1:80")
	exchange(t, c)
	awaitRestarts(t, 1)
	traffic(t)
}

// testWatchdog stops the process, which then tells systemd nothing.
func testWatchdog(t *testing.T) {
	const dropIn = "/run/systemd/system/shaperd.service.d/watchdog.conf"
	run(t, "mkdir", "-p", "/run/systemd/system/shaperd.service.d")
	if err := os.WriteFile(dropIn, []byte("[Service]\nWatchdogSec=5s\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	expect(t, "WatchdogUSec", "30s")
	run(t, "systemctl", "daemon-reload")
	run(t, "systemctl", "restart", "shaperd")
	kill(t, syscall.SIGSTOP)
	awaitRestarts(t, 1)
	traffic(t)
	if log := run(t, "journalctl", "-u", "shaperd", "-o", "cat", "--no-pager"); !strings.Contains(log, "Watchdog timeout") {
		t.Errorf("no watchdog in the journal:\n%s", log)
	}
	if err := os.Remove(dropIn); err != nil {
		t.Fatal(err)
	}
	run(t, "systemctl", "daemon-reload")
	run(t, "systemctl", "restart", "shaperd")
}

func kill(t *testing.T, s syscall.Signal) {
	t.Helper()
	pid, err := strconv.Atoi(property(t, "MainPID"))
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, s); err != nil {
		t.Fatal(err)
	}
}

// testSecurity bounds the exposure of the service that runs.
func testSecurity(t *testing.T, most float64) {
	out := run(t, "systemd-analyze", "security", "--no-pager", "shaperd.service")
	found := regexp.MustCompile(`Overall exposure level for shaperd\.service: ([0-9.]+) `).FindStringSubmatch(out)
	if found == nil {
		t.Fatalf("no score in:\n%s", out)
	}
	score, err := strconv.ParseFloat(found[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	if score > most {
		t.Errorf("exposure level %.1f, want at most %.1f\n%s", score, most, out)
	}
	t.Logf("exposure level %.1f", score)
}
