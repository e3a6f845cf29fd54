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
	// send returns how long the echo of 40 kB takes.
	send := func() time.Duration {
		t.Helper()
		c, err := net.Dial("tcp4", listen)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(20 * time.Second))
		begun := time.Now()
		b := make([]byte, 40_000)
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, b); err != nil {
			t.Fatal(err)
		}
		return time.Since(begun)
	}
	first := startDaemon(t, config, "--state", state)
	if d := send(); d > 2*time.Second {
		t.Fatalf("the burst took %v", d)
	}
	first.stop()
	first.ended <- <-first.ended
	if _, err := os.Stat(state); err != nil {
		t.Fatal(err)
	}
	second := startDaemon(t, config, "--state", state)
	second.waitLog("buckets go on where they ended")
	// 10 kB of the burst are left, and what has come back meanwhile.
	if d := send(); d < time.Second {
		t.Errorf("after a restart 40 kB took %v, want nearly 3 s", d)
	}
	second.stop()
	second.ended <- <-second.ended

	if err := os.WriteFile(state, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	third := startDaemon(t, config, "--state", state)
	third.waitLog("what buckets owe is forgotten")
}
