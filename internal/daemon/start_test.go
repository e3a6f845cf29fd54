package daemon

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// testDaemon is a daemon in this process, with one listener, "db", and what a test adds to its configuration.
type testDaemon struct {
	*api.Client
	config, listen string
	reload         chan os.Signal
	log            *testutil.Buffer
}

// startDaemon runs a daemon with o, and with a folder and signals of its own, until the test ends.
func startDaemon(t *testing.T, more string, o Options) *testDaemon {
	t.Helper()
	folder := t.TempDir()
	d := &testDaemon{
		config: filepath.Join(folder, "shaperd.toml"), listen: testutil.FreeAddr(t, "tcp"), reload: make(chan os.Signal), log: new(testutil.Buffer),
	}
	d.write(t, more)
	o.Config, o.Control, o.ControlRequired = d.config, filepath.Join(folder, "control.sock"), true
	o.Log, o.Reload, o.Force = d.log, d.reload, make(chan os.Signal)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, o) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	d.log.WaitFor(t, "msg=ready")
	d.Client = api.NewClient(o.Control)
	return d
}

// write replaces the configuration file.
func (d *testDaemon) write(t *testing.T, more string) {
	t.Helper()
	if err := os.WriteFile(d.config, fmt.Appendf(nil, `
[daemon]
metrics = ""
dashboard = ""
pin_path = "/nowhere/pins"
loops = 2
[[listen]]
name = "db"
address = ["tcp://%s"]
downstream = ["127.0.0.1:9"]
%s`, d.listen, more), 0o644); err != nil {
		t.Fatal(err)
	}
}
