package daemon

import (
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/testutil"
)

// TestBypass_BeforeWaitingChanges switches the bypass on while a reload runs, and other changes wait for that: the bypass is next.
func TestBypass_BeforeWaitingChanges(t *testing.T) {
	const changes = 20
	var reloads atomic.Bool
	applying, goOn := make(chan struct{}), make(chan struct{})
	c := startDaemon(t, "[[limit]]\nname = \"l\"\nrate = \"10MB/s\"\n", Options{Now: func() time.Time {
		if reloads.CompareAndSwap(true, false) {
			close(applying)
			<-goOn
		}
		return time.Now()
	}})
	var calls sync.WaitGroup
	call := func(f func() error) {
		calls.Go(func() {
			if err := f(); err != nil {
				t.Error(err)
			}
		})
	}
	reloads.Store(true)
	call(func() error { _, err := c.Reload(t.Context()); return err })
	<-applying
	waiting := func(n int) {
		testutil.WaitFor(t, "changes that wait", func() bool {
			all := make([]byte, 1<<20)
			all = all[:runtime.Stack(all, true)]
			return strings.Count(string(all), "daemon.(*server).do(") == n
		})
	}
	for range changes {
		call(func() error {
			_, err := c.SetLimit(t.Context(), "l", api.SetLimit{Set: map[string]string{"rate": "1MB/s"}})
			return err
		})
	}
	waiting(changes)
	call(func() error { _, err := c.Bypass(t.Context(), api.SetBypass{On: true}); return err })
	waiting(changes + 1)
	close(goOn)
	calls.Wait()
	log := c.log.String()
	before, _, ok := strings.Cut(log, "BYPASS on")
	if n := strings.Count(before, "limit overridden"); !ok || n > 0 {
		t.Errorf("%d of %d changes were before the bypass:\n%s", n, changes, log)
	}
	if n := strings.Count(log, "limit overridden"); n != changes {
		t.Errorf("%d of %d changes are effective", n, changes)
	}
}
