package main

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
)

// A daemon that is started again hands out no fresh burst.
func TestRestartIsNoFreshBurst(t *testing.T) {
	t.Parallel()
	listen, metrics, downstream := freePort(t), freePort(t), echoServer(t)
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
	first.ended <- <-first.ended
	if _, err := os.Stat(state); err != nil {
		t.Fatal(err)
	}
	// A start that fails, as somebody else has the port, takes nothing away.
	taken, err := net.Listen("tcp4", listen)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := command(t, "run", "--config", config, "--control", "", "--state", state); err == nil || !strings.Contains(err.Error(), "the port is in use") {
		t.Errorf("a start without its port: %v", err)
	}
	taken.Close()
	second := startDaemon(t, config, "--state", state)
	second.waitLog("buckets go on where they ended")
	send()
	// The burst is 50 of the 80 kB.
	if took := time.Since(begun); took < 2800*time.Millisecond {
		t.Errorf("80 kB took %v with a restart amid them, want 3 s", took)
	}
	second.stop()
	second.ended <- <-second.ended

	if err := os.WriteFile(state, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	third := startDaemon(t, config, "--state", state)
	third.waitLog("what buckets owe is forgotten")
}

// What is no regular file may have no end, or wait for somebody: the start does not.
func TestIrregularState(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"pipe":   func(path string) error { return unix.Mkfifo(path, 0o600) },
		"device": func(path string) error { return os.Symlink("/dev/zero", path) },
		"folder": func(path string) error { return os.Mkdir(path, 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			state := filepath.Join(t.TempDir(), "state")
			if err := errors.Join(make(state), make(state+".orders")); err != nil {
				t.Fatal(err)
			}
			d := startDaemon(t, writeConfig(t, "", configText(freePort(t), "", "127.0.0.1:9", "1MB/s")), "--state", state)
			for _, text := range []string{"is not restored", "is forgotten"} {
				d.waitLog(text)
			}
			if n := strings.Count(d.log.String(), "is no regular file"); n != 2 {
				t.Errorf("%d of 2 files were refused:\n%s", n, d.log)
			}
		})
	}
}
