//go:build vmguest

package installed

import (
	"os"
	"os/exec"
	"os/user"
	"slices"
	"strings"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestSecond finds the service as it was before the reboot, upgrades and removes it.
func TestSecond(t *testing.T) {
	serve(t)
	steps(
		t,
		step{"reboot", testReboot},
		step{"upgrade", testUpgrade},
		step{"remove in a chroot", testRemoveInChroot},
		step{"remove", testRemove},
		step{"install again", func(t *testing.T) {
			install(t, "new.deb")
			traffic(t)
		}},
		step{"purge", testPurge},
	)
}

func testReboot(t *testing.T) {
	expect(t, "ActiveState", "active")
	expect(t, "NRestarts", "0")
	traffic(t)
	testutil.WaitFor(t, "the attachment", attached(t))
	if out := run(t, "shaperd", "blocks"); !strings.Contains(out, "192.0.2.0/24") {
		t.Errorf("the block is missing:\n%s", out)
	}
}

func testUpgrade(t *testing.T) {
	upgrade(t, exec.Command("dpkg", "-i", "/mnt/guest/new.deb"))
	if text, err := os.ReadFile(configFile); err != nil || string(text) != transparentConfig {
		t.Errorf("the configuration changed: %v\n%s", err, text)
	}
	if out := run(t, "shaperd", "blocks"); !strings.Contains(out, "192.0.2.0/24") {
		t.Errorf("the block is missing:\n%s", out)
	}
}

// upgrade runs a command that upgrades the package. A connection is kept while the old daemon drains, and another one
// begins meanwhile.
func upgrade(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	old, pid := run(t, "shaperd", "version"), property(t, "MainPID")
	established := dial(t, "tcp", "127.0.0.1:80")
	exchange(t, established)

	var out testutil.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for property(t, "ActiveState") == "active" {
		if exited := try("ps", "-o", "stat=", "-p", pid); exited == "" {
			break
		}
	}
	exchange(t, established)
	waiting := dial(t, "tcp", "127.0.0.1:80")
	established.Close()
	exchange(t, waiting)
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	if now := run(t, "shaperd", "version"); now == old {
		t.Errorf("the version is still %s", now)
	}
	if now := property(t, "MainPID"); now == pid {
		t.Error("the old daemon still runs")
	}
	expect(t, "ActiveState", "active")
	exchange(t, waiting)
	traffic(t)
}

// testRemoveInChroot checks that the script of a removal in a chroot leaves what a stopped service left in the kernel.
func testRemoveInChroot(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"/", "/proc", "/sys", "/sys/fs/bpf"} {
		run(t, "mount", "--bind", dir, root+dir)
		defer run(t, "umount", root+dir)
	}
	run(t, "systemctl", "stop", "shaperd")
	before := []string{run(t, "find", "/sys/fs/bpf/shaperd"), run(t, "nft", "list", "ruleset"), run(t, "ip", "rule")}
	run(t, "chroot", root, "/var/lib/dpkg/info/shaperd.prerm", "remove")
	after := []string{try("find", "/sys/fs/bpf/shaperd"), run(t, "nft", "list", "ruleset"), run(t, "ip", "rule")}
	if !strings.Contains(before[0], "\n") || before[1] == "" || !slices.Equal(before, after) {
		t.Errorf("before\n%s\nafter\n%s", strings.Join(before, "\n"), strings.Join(after, "\n"))
	}
	run(t, "systemctl", "start", "shaperd")
	traffic(t)
}

// testRemove checks that a removal leaves the configuration, and nothing in the kernel.
func testRemove(t *testing.T) {
	run(t, "apt-get", "-q", "-y", "remove", "shaperd")
	if _, err := os.Stat(configFile); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat("/sys/fs/bpf/shaperd"); err == nil {
		t.Errorf("pins are left:\n%s", try("find", "/sys/fs/bpf/shaperd"))
	}
	if rules := run(t, "nft", "list", "ruleset"); rules != "" {
		t.Errorf("rules are left:\n%s", rules)
	}
	if rules := run(t, "ip", "rule"); strings.Contains(rules, "fwmark") {
		t.Errorf("routing rules are left:\n%s", rules)
	}
}

func testPurge(t *testing.T) {
	run(t, "apt-get", "-q", "-y", "purge", "shaperd")
	left := run(t, "find", "/", "-name", "*shaperd*", "-not", "-path", "/proc/*", "-not", "-path", "/mnt/guest/*")
	if left != "" {
		t.Errorf("these are left:\n%s", left)
	}
	if _, err := user.Lookup("shaperd"); err == nil {
		t.Error("the user is left")
	}
	if failed := run(t, "systemctl", "--failed", "--no-legend"); failed != "" {
		t.Errorf("units failed:\n%s", failed)
	}
}
