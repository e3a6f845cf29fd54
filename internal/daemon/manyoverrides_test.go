package daemon

import (
	"fmt"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
)

// TestReload_ManyInvalidOverrides reloads a configuration for which many of the overrides of sources are invalid: the others stay, and
// nothing takes long.
func TestReload_ManyInvalidOverrides(t *testing.T) {
	t.Parallel()
	limit := func(more string) string {
		return "[[limit]]\nname = \"l\"\nkey = [\"source\"]\nrate = \"10MB/s\"\n" + more
	}
	c := startDaemon(t, limit("max_connections = 10\n"), Options{})
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
	c.write(t, limit(""))
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
