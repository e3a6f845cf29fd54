package daemon

import (
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"time"
)

// groupFile remembers what a host that shares limits must know after a restart. A nil groupFile
// remembers nothing.
type groupFile struct {
	path string
	log  *slog.Logger

	mu    sync.Mutex // held while the file is written
	state groupState
}

// groupState is the content of a groupFile.
type groupState struct {
	Start int64 // number of the last start, see [cluster.HostOptions]
	Left  bool  // the ledger may count the part of this host for others
}

// groupPath returns the path of the groupFile.
func (o *Options) groupPath() string { return o.State + ".group" }

// begin returns the state of a host that starts now, with a number that no earlier start has had, as
// far as the file or the clock knows.
func (f *groupFile) begin(ctx context.Context) groupState {
	now := time.Now().UnixMicro()
	if f == nil {
		return groupState{Start: now}
	}
	var saved groupState
	if err := readStateFile(ctx, f.path, func(text []byte) error { return json.Unmarshal(text, &saved) }); err != nil {
		f.log.Warn("state of the group of shared limits not restored", "err", err)
	}
	saved.Start = max(now, saved.Start+1)
	f.save(ctx, saved)
	return saved
}

// joined remembers that this host uses its part, in the background.
func (f *groupFile) joined() {
	if f != nil {
		go f.save(context.Background(), groupState{Left: false})
	}
}

// leave remembers that this host uses nothing until it has joined again. It reports whether it does.
func (f *groupFile) leave(ctx context.Context) bool {
	return f != nil && f.save(ctx, groupState{Left: true})
}

// save writes s, and reports whether that succeeded. A Start of 0 stays as it is.
func (f *groupFile) save(ctx context.Context, s groupState) bool {
	ctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	_, err := runAsync(ctx, func() (struct{}, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if s.Start == 0 {
			s.Start = f.state.Start
		}
		if s == f.state {
			return struct{}{}, nil
		}
		f.state = s
		return struct{}{}, writeJSON(f.path, s)
	})
	if err != nil {
		f.log.Warn("saving the state of the group of shared limits failed", "err", err)
	}
	return err == nil
}
