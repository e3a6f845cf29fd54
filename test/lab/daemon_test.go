package lab

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestNotifySocket(t *testing.T) {
	s, err := ListenNotify(filepath.Join(t.TempDir(), "notify"))
	must(t, err)
	defer s.Close()
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: s.Path, Net: "unixgram"})
	must(t, err)
	defer c.Close()
	send := func(text string) {
		_, err := c.Write([]byte(text))
		must(t, err)
	}
	exited := make(chan struct{})
	send("STATUS=starting")
	send("READY=1\nSTATUS=ready")
	must(t, s.Await(t.Context(), "READY=1", exited))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := s.Await(ctx, "READY=1", exited); err == nil || !strings.Contains(err.Error(), "deadline exceeded") {
		t.Errorf("without a notification: %v", err)
	}
	send("STOPPING=1")
	close(exited)
	must(t, s.Await(t.Context(), "STOPPING=1", exited)) // sent before the exit
	if err := s.Await(t.Context(), "READY=1", exited); err == nil || !strings.Contains(err.Error(), "exited before it sent READY=1") {
		t.Errorf("after the exit: %v", err)
	}
}

// TestStartDaemon_Fails checks that the errors of a daemon that does not start have its output.
func TestStartDaemon_Fails(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "daemon")
	must(t, os.WriteFile(binary, []byte("#!/bin/sh\nsleep 1000 &\necho panic: no\nexit 3\n"), 0o755))
	h, err := NewHost("daemon")
	must(t, err)
	defer h.Remove()
	d, err := StartDaemon(t.Context(), DaemonOptions{Binary: binary, Host: h})
	if err == nil {
		d.Kill()
		t.Fatal("it is ready")
	}
	for _, want := range []string{"exit status 3", "exited before it sent READY=1", `it wrote "panic:"`, "it left a process"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in: %v", want, err)
		}
	}
}
