package main

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A daemon that is started again hands out no fresh burst.
func TestRestartIsNoFreshBurst(t *testing.T) {
	listen, metrics, downstream := freePort(t), freePort(t), echoServer(t)
	config := writeConfig(t, "", strings.Replace(configText(listen, metrics, downstream, "10kB/s"), "connections = 5", `burst = "50kB"`, 1))
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
