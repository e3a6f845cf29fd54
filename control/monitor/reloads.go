package monitor

import (
	"slices"
	"sync"
	"time"

	"shaperd.dev/shaperd/api"
)

// Reloads is the result of the last reload. The zero value is ready.
type Reloads struct {
	mu                  sync.Mutex
	loadedAt            time.Time // time of the last success
	at                  time.Time // time of the last attempt
	duration            time.Duration
	errors              []string // of the last attempt
	dropped             []string // overrides that it dropped
	failed              bool
	successes, failures uint64
}

// SetDroppedOverrides sets the runtime overrides that the last reload ended.
func (r *Reloads) SetDroppedOverrides(overrides []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropped = overrides
}

// Record sets the result of a reload and its duration. Without errors it succeeded; each error
// is one mistake.
func (r *Reloads) Record(duration time.Duration, errors ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.at, r.duration, r.errors, r.dropped = time.Now(), duration, errors, nil
	if r.failed = len(errors) > 0; r.failed {
		r.failures++
		return
	}
	r.successes++
	r.loadedAt = r.at
}

// Status returns the result of the last reload.
func (r *Reloads) Status() api.ReloadStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	return api.ReloadStatus{
		OK: !r.failed, At: r.at, Loaded: r.loadedAt, Duration: r.duration.Seconds(), Errors: append([]string{}, r.errors...), DroppedOverrides: slices.Clone(r.dropped),
	}
}

// Counts returns the number of reloads by result, including the first load.
func (r *Reloads) Counts() (succeeded, failed uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.successes, r.failures
}
