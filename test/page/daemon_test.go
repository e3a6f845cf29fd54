package page

import (
	"fmt"
	"net"
	"testing"
	"time"

	"shaperd.dev/shaperd/internal/testutil"
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
	binary, err := lab.Binary()
	if err != nil {
		t.Fatal(err)
	}
	page, address := testutil.FreeAddr(t, "tcp"), testutil.FreeAddr(t, "tcp")
	downstream := testutil.ServeTCP(t, testutil.Discard)
	d, err := lab.StartDaemon(t.Context(), lab.DaemonOptions{Binary: binary, Args: []string{"--drain-timeout", "100ms"}, Config: fmt.Sprintf(`
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
`, page, address, downstream)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Stop(30 * time.Second); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("log of the daemon:\n%s", &d.Log)
		}
	})
	client, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	send(t, client)
	return daemon{"http://" + page, binary, d.Control}
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
