package page

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// A daemon is the built binary, with a limit that its client exceeds.
type daemon struct {
	URL     string `json:"url"` // of the dashboard
	Binary  string `json:"binary"`
	Control string `json:"control"` // control socket
}

func startDaemon(t *testing.T) daemon {
	t.Helper()
	binary := os.Getenv("SHAPERD_BIN")
	if binary == "" {
		binary = "../../bin/shaperd"
	}
	binary, err := filepath.Abs(binary)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(binary); err != nil {
		t.Fatalf("no daemon binary: %v\nrun \"make build\" first, or set SHAPERD_BIN to the binary", err)
	}
	dir := t.TempDir()
	d := daemon{Binary: binary, Control: filepath.Join(dir, "control.sock")}
	page, address, downstream := freePort(t), freePort(t), sink(t)
	d.URL = "http://" + page
	config := filepath.Join(dir, "shaperd.toml")
	if err := os.WriteFile(config, fmt.Appendf(nil, `
[daemon]
dashboard = %q
metrics   = ""
pin_path  = "/nowhere/pins"

[[listen]]
name       = "db"
address    = ["tcp://%s"]
downstream = [%q]

[[limit]]
name            = "database"
rate            = "8Mbit/s"
max_connections = 10
`, page, address, downstream), 0o600); err != nil {
		t.Fatal(err)
	}

	var log bytes.Buffer
	cmd := exec.Command(binary, "run", "--config", config, "--control", d.Control, "--drain-timeout", "100ms")
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		defer close(exited)
		_ = cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-exited:
		case <-time.After(10 * time.Second):
			t.Error("the daemon does not stop")
			_ = cmd.Process.Kill()
			<-exited
		}
		if t.Failed() {
			t.Logf("log of the daemon:\n%s", &log)
		}
	})

	// The dashboard is served a little before the listeners are open.
	var client net.Conn
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		client, err = net.Dial("tcp", address)
		if err == nil {
			break
		}
		select {
		case <-exited:
			t.Fatalf("the daemon exited:\n%s", &log)
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("the listener is not open: %v", err)
		}
	}
	send(t, client)
	return d
}

func freePort(t *testing.T) string {
	t.Helper()
	addr, err := lab.FreeAddr("tcp")
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

// sink starts a downstream that reads and discards, and returns its address.
func sink(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var done sync.WaitGroup
	done.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			done.Go(func() {
				defer c.Close()
				_, _ = io.Copy(io.Discard, c)
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		done.Wait() // the daemon, stopped before, has closed the connections
	})
	return l.Addr().String()
}

// send writes to c as fast as it may until the test ends.
func send(t *testing.T, c net.Conn) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 64<<10)
		for {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		c.Close()
		<-done
	})
}
