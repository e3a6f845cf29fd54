package cli

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestState_NoFreshBurstAfterRestart checks that a restart does not refill bursts, also with the
// state of an earlier version.
func TestState_NoFreshBurstAfterRestart(t *testing.T) {
	t.Parallel()
	listen, metrics, downstream := testutil.FreeAddr(t, "tcp"), testutil.FreeAddr(t, "tcp"), testutil.ServeTCP(t, testutil.Echo)
	config := writeConfig(t, "", strings.Replace(configText(listen, metrics, downstream, "10kB/s"), "max_connections = 5", `burst = "50kB"`, 1))
	state := filepath.Join(t.TempDir(), "state")
	send := func() {
		t.Helper()
		c, err := net.Dial("tcp4", listen)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(20 * time.Second))
		b := make([]byte, 40_000)
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
	}
	first := startDaemon(t, config, "--state", state)
	begun := time.Now()
	send()
	first.stop()
	first.done <- <-first.done
	if _, err := os.Stat(state); err != nil {
		t.Fatal(err)
	}
	// A start that fails because the port is in use keeps the state.
	taken, err := net.Listen("tcp4", listen)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := command(t, "run", "--config", config, "--control", "", "--state", state); err == nil || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("a start without its port: %v", err)
	}
	taken.Close()
	second := startDaemon(t, config, "--state", state)
	second.waitLog("bucket state restored")
	send()
	// The burst covers 50 of the 80 kB.
	if took := time.Since(begun); took < 2800*time.Millisecond {
		t.Errorf("80 kB took %v with a restart in between, want 3 s", took)
	}
	second.stop()
	second.done <- <-second.done

	text, err := os.ReadFile(state)
	if err != nil {
		t.Fatal(err)
	}
	earlier := strings.Replace(string(text), `"Backlogs":[{`, `"Debts":[{`, 1)
	if err := os.WriteFile(state, []byte(earlier), 0o600); err != nil || earlier == string(text) {
		t.Fatalf("%v: the state is %s", err, text)
	}
	third := startDaemon(t, config, "--state", state)
	third.waitLog(`"bucket state restored" buckets=1 `)
	third.stop()
	third.done <- <-third.done

	if err := os.WriteFile(state, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	fourth := startDaemon(t, config, "--state", state)
	fourth.waitLog("bucket state not restored")
}

// TestState_OfTwoDaemons checks that a daemon does not take the state file of one that runs.
func TestState_OfTwoDaemons(t *testing.T) {
	t.Parallel()
	config := func() string {
		return writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s"))
	}
	state := filepath.Join(t.TempDir(), "state")
	first := startDaemon(t, config(), "--state", state)
	if _, _, err := command(t, "run", "--config", config(), "--control", "", "--state", state); err == nil || !strings.Contains(err.Error(), "--state "+state+": another daemon uses this file") {
		t.Errorf("a second daemon: %v", err)
	}
	first.stop()
	first.done <- <-first.done
	startDaemon(t, config(), "--state", state)
}

// TestState_RejectsIrregularFiles checks that a start does not block on state files which are not
// regular.
func TestState_RejectsIrregularFiles(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"pipe":   func(path string) error { return unix.Mkfifo(path, 0o600) },
		"device": func(path string) error { return os.Symlink("/dev/zero", path) },
		"folder": func(path string) error { return os.Mkdir(path, 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			state := filepath.Join(t.TempDir(), "state")
			if err := errors.Join(make(state), make(state+".overrides")); err != nil {
				t.Fatal(err)
			}
			d := startDaemon(t, writeConfig(t, "", configText(testutil.FreeAddr(t, "tcp"), "", "127.0.0.1:9", "1MB/s")), "--state", state)
			for _, text := range []string{"override not restored", "bucket state not restored"} {
				d.waitLog(text)
			}
			if n := strings.Count(d.log.String(), "is not a regular file"); n != 2 {
				t.Errorf("%d of 2 files were refused:\n%s", n, d.log)
			}
		})
	}
}
