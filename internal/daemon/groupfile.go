package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"shaperd.dev/shaperd/cluster"
)

// groupFile remembers what a host that shares limits must know after a restart. A nil groupFile
// remembers nothing.
type groupFile struct {
	path string
	log  *slog.Logger

	wanted atomic.Pointer[groupState] // what the file should have
	away   int64                      // us: Away of the current process
	mu     sync.Mutex                 // held while the file is written
	saved  groupState                 // what it has
}

// groupState is the content of a groupFile.
type groupState struct {
	Start int64 // number of the last start, see [cluster.HostOptions]
	Left  bool  // the ledger may count the part of this host for others
	Away  int64 // us: the longest [cluster.Params.Away] since it has joined last
}

// groupPath returns the path of the groupFile.
func (o *Options) groupPath() string { return o.State + ".group" }

// startSalts is the number of starts that may have the same time, which decides first.
const startSalts = 1 << 10

// begin returns the state of a host that starts now, with a number that no earlier start has had, and
// a greater one as far as the file or the clock knows. Without a file it may be a new host, or one that has left: who
// else counts its part is not known.
func (f *groupFile) begin(ctx context.Context, p cluster.Params) groupState {
	now := time.Now().UnixMilli()*startSalts + rand.Int64N(startSalts) // neither file nor clock may know
	if f == nil {
		return groupState{Start: now, Left: true}
	}
	saved := groupState{Left: true} // if there is no file
	if err := readStateFile(ctx, f.path, func(text []byte) error { return json.Unmarshal(text, &saved) }); err != nil {
		f.log.Warn("state of the group of shared limits not restored; this host lets nothing of them pass until it has joined", "err", err)
		saved.Left = true // perhaps
	}
	f.away = int64(p.Away())
	saved.Start, saved.Away = max(now, saved.Start+1), max(saved.Away, f.away)
	f.wanted.Store(&saved)
	f.trySave(ctx)
	return saved
}

// joined remembers that this host uses its part, in the background.
func (f *groupFile) joined() {
	if f != nil {
		f.wanted.Store(&groupState{Start: f.wanted.Load().Start, Away: f.away})
		go f.trySave(context.Background())
	}
}

// leave remembers that this host uses nothing until it has joined again.
func (f *groupFile) leave(ctx context.Context) error {
	if f == nil {
		return errors.New("there is no state directory to remember it in")
	}
	s := *f.wanted.Load()
	s.Left = true
	f.wanted.Store(&s)
	return f.save(ctx)
}

func (f *groupFile) trySave(ctx context.Context) {
	if err := f.save(ctx); err != nil {
		f.log.Warn("saving the state of the group of shared limits failed", "err", err)
	}
}

// save writes what is wanted when it is the turn of this call: a call that the file system has held up does not
// undo a later one.
func (f *groupFile) save(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	_, err := runAsync(ctx, func() (struct{}, error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		s := *f.wanted.Load()
		if s == f.saved {
			return struct{}{}, nil
		}
		err := writeJSON(f.path, s)
		if f.saved = s; err != nil {
			f.saved = groupState{} // unknown
		}
		return struct{}{}, err
	})
	return err
}
