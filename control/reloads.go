package control

import (
	"slices"
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
	dropped     []string // by the last one
	failed      bool
	ok, notOkay uint64
}

// Dropped keeps what of the settings of operators the last reload ended.
func (r *Reloads) Dropped(settings []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropped = settings
}

// Note keeps the result of a reload that took took: what was wrong, a line a mistake, or
// nothing.
func (r *Reloads) Note(took time.Duration, errors ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tried, r.took, r.errors, r.dropped = time.Now(), took, errors, nil
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
	return ReloadStatus{
		OK: !r.failed, At: r.tried, Loaded: r.last, Took: r.took.Seconds(), Errors: append([]string{}, r.errors...), Dropped: slices.Clone(r.dropped),
	}
}
