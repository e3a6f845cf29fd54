package daemon

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// TestReload_ManyInvalidOverrides reloads a configuration for which many of the overrides of sources are invalid: the others stay, and
// nothing takes long.
func TestReload_ManyInvalidOverrides(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	config := filepath.Join(folder, "shaperd.toml")
	listen := testutil.FreeAddr(t, "tcp")
	write := func(more string) {
		t.Helper()
		if err := os.WriteFile(config, fmt.Appendf(nil, `
[daemon]
metrics = ""
dashboard = ""
pin_path = "/nowhere/pins"
[[listen]]
name = "db"
address = ["tcp://%s"]
downstream = ["127.0.0.1:9"]
[[limit]]
name = "l"
key = ["source"]
rate = "10MB/s"
%s`, listen, more), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("max_connections = 10\n")
	ctx, cancel := context.WithCancel(t.Context())
	log := new(testutil.Buffer)
	done := make(chan error, 1)
	control := filepath.Join(folder, "control.sock")
	go func() {
		done <- Run(ctx, Options{Config: config, Control: control, ControlRequired: true, Log: log, Reload: make(chan os.Signal), Force: make(chan os.Signal)})
	}()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	log.WaitFor(t, "msg=ready")
	c := api.NewClient(control)
	set := func(i int, key, value string) error {
		_, err := c.SetLimit(t.Context(), "l", api.SetLimit{Source: fmt.Sprintf("10.0.%d.%d", i/250, i%250), Set: map[string]string{key: value}})
		return err
	}
	for i := range maxSourceOverrides {
		key, value := "max_connections", "20"
		if i%2 == 0 {
			key, value = "rate", "1MB/s"
		}
		if err := set(i, key, value); err != nil {
			t.Fatal(err)
		}
	}
	if err := set(maxSourceOverrides, "rate", "1MB/s"); err == nil {
		t.Error("one too many is accepted")
	}
	write("")
	begin := time.Now()
	r, err := c.Reload(t.Context())
	took := time.Since(begin)
	if err != nil || !r.OK || len(r.DroppedOverrides) != maxSourceOverrides/2 || took > 5*time.Second {
		t.Errorf("%v, %v: %d overrides dropped, in %v", err, r.Errors, len(r.DroppedOverrides), took)
	}
	if s, err := c.Status(t.Context()); err != nil || len(s.Overrides) != maxSourceOverrides/2 {
		t.Errorf("%v: %d overrides are left", err, len(s.Overrides))
	}
}
