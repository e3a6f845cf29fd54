//go:build vmguest

package installed

import (
	"os"
	"os/exec"
	"os/user"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestRpm installs, upgrades and removes the rpm package with rpm, whose database does not know the packages of Debian.
func TestRpm(t *testing.T) {
	serve(t)
	steps(
		t,
		step{"install", func(t *testing.T) {
			run(t, "rpm", "--install", "--nodeps", "/mnt/guest/old.rpm")
			if _, err := user.Lookup("shaperd"); err != nil {
				t.Error(err)
			}
			run(t, "systemd-analyze", "verify", "--man=no", "shaperd.service")
			expect(t, "UnitFileState", "enabled")
			expect(t, "ActiveState", "inactive")
		}},
		step{"upgrade before it runs", func(t *testing.T) {
			run(t, "rpm", "--upgrade", "--nodeps", "/mnt/guest/new.rpm")
			expect(t, "ActiveState", "inactive")
			run(t, "rpm", "--upgrade", "--oldpackage", "--nodeps", "/mnt/guest/old.rpm")
		}},
		step{"start", func(t *testing.T) {
			configure(t, proxyConfig)
			run(t, "systemctl", "start", "shaperd")
			traffic(t)
		}},
		step{"upgrade", func(t *testing.T) {
			upgrade(t, exec.Command("rpm", "--upgrade", "--nodeps", "/mnt/guest/new.rpm"))
			if text, err := os.ReadFile(configFile); err != nil || string(text) != proxyConfig {
				t.Errorf("the configuration changed: %v\n%s", err, text)
			}
			expect(t, "UnitFileState", "enabled")
		}},
		step{"remove", testRemoveRpm},
	)
}

// testRemoveRpm removes the package while an attachment and rules would outlive the daemon.
func testRemoveRpm(t *testing.T) {
	installDropIn(t, "packet-plane.conf")
	installDropIn(t, "network-admin.conf")
	configure(t, transparentConfig)
	run(t, "systemctl", "restart", "shaperd")
	testutil.WaitFor(t, "the attachment", attached(t))
	for line := range strings.Lines(run(t, "rpm", "--erase", "shaperd")) {
		if !strings.HasPrefix(line, "Removed ") { // of systemctl
			t.Errorf("rpm: %s", line)
		}
	}
	if rules := run(t, "nft", "list", "ruleset"); rules != "" {
		t.Errorf("rules are left:\n%s", rules)
	}
	if _, err := os.Stat(configFile); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat("/sys/fs/bpf/shaperd"); err == nil {
		t.Errorf("pins are left:\n%s", try("find", "/sys/fs/bpf/shaperd"))
	}
	if left := try("pidof", "shaperd"); left != "" {
		t.Errorf("the daemon %s is left", left)
	}
	if failed := run(t, "systemctl", "--failed", "--no-legend"); failed != "" {
		t.Errorf("units failed:\n%s", failed)
	}
}
