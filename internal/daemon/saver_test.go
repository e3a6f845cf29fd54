package daemon

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"shaperd.dev/shaperd/internal/testutil"
)

// TestSaver_WakesTwice schedules two versions, the second between the wake-up for the first and its
// writing: the second wake-up finds nothing to write.
func TestSaver_WakesTwice(t *testing.T) {
	s := newSaver("overrides", filepath.Join(t.TempDir(), "overrides"), slog.New(slog.DiscardHandler))
	s.mu.Lock()
	s.wake <- struct{}{}
	testutil.WaitFor(t, "the wake-up", func() bool { return len(s.wake) == 0 })
	s.mu.Unlock()
	s.enqueue(persistedOverrides{})
	s.close()
	if err := s.saveError(); err != nil {
		t.Error(err)
	}
}

// TestSaver_Concurrent schedules versions from several goroutines while others are written. The
// last version must be in the file at the end.
func TestSaver_Concurrent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "overrides")
	s := newSaver("overrides", path, slog.New(slog.DiscardHandler))
	version := func(i int) persistedOverrides {
		return persistedOverrides{Drained: []drainedDownstream{{fmt.Sprint(i), "d"}}}
	}
	var writers sync.WaitGroup
	for i := range 4 {
		writers.Go(func() {
			for j := range 500 {
				s.enqueue(version(1000*i + j))
			}
		})
	}
	writers.Wait()
	s.enqueue(version(-1))
	s.close()
	var got persistedOverrides
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &got)
	}
	if err != nil || len(got.Drained) != 1 || got.Drained[0] != (drainedDownstream{"-1", "d"}) {
		t.Errorf("saved %+v, %v", got, err)
	}
}
