package daemon

import (
	"strings"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// TestHealth_HungLoop checks that a daemon whose loop hangs still says so, and at once.
func TestHealth_HungLoop(t *testing.T) {
	t.Parallel()
	var hang sync.RWMutex
	d := startDaemon(t, "[[override]]\nlimit = \"l\"\nrate = \"2MB/s\"\nwhen = \"00:00-12:00 UTC\"\n[[limit]]\nname = \"l\"\nrate = \"1MB/s\"\n", Options{Now: func() time.Time {
		hang.RLock() // the loop asks for the time to follow schedules
		defer hang.RUnlock()
		return time.Now()
	}})
	health := func() (h api.Health, took time.Duration) {
		t.Helper()
		begun := time.Now()
		h, err := d.Health(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return h, time.Since(begun)
	}
	if h, _ := health(); h.State != api.Ready {
		t.Errorf("at first: %v", h)
	}
	hang.Lock()
	testutil.WaitFor(t, "the daemon to be silent", func() bool {
		h, took := health()
		if took > 10*time.Second {
			t.Errorf("an answer took %v", took)
		}
		return h.State == api.Silent && strings.HasPrefix(h.Detail, "no answer for ")
	})
	hang.Unlock()
	testutil.WaitFor(t, "the daemon to be ready again", func() bool {
		h, _ := health()
		return h.State == api.Ready
	})
}
