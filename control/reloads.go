package control

import (
	"sync"
	"time"
)

// Reloads keeps the result of the last reload. The zero value is ready for use
// by several goroutines.
type Reloads struct {
	mu          sync.Mutex
	last        time.Time // of the last one that succeeded
	tried       time.Time
	took        time.Duration
	errors      []string // of the last one
	failed      bool
	ok, notOkay uint64
}

// Note keeps the result of a reload that took took: what was wrong, a line a mistake, or
// nothing.
func (r *Reloads) Note(took time.Duration, errors ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tried, r.took, r.errors = time.Now(), took, errors
	if r.failed = len(errors) > 0; r.failed {
		r.notOkay++
		return
	}
	r.ok++
	r.last = r.tried
}

// Status returns the result of the last one.
func (r *Reloads) Status() ReloadStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	return ReloadStatus{OK: !r.failed, At: r.tried, Loaded: r.last, Took: r.took.Seconds(), Errors: append([]string{}, r.errors...)}
}
