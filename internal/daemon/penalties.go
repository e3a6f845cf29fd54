package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// penalties saves those of sources.
type penalties struct {
	saver *saver // nil without a state file
	saved uint64 // conn.Proxy.PenaltyChanges when it last did; owner: the loop of serve
}

// persistedPenalties are the penalties of sources that survive a restart and a crash, as they are saved in a file. Times
// are of the wall clock.
type persistedPenalties struct{ Penalties []persistedPenalty }

type persistedPenalty struct {
	Limit        string
	Source       netip.Prefix
	Since, Until time.Time
	Times        int
	Observed     bool `json:",omitempty"`
}

// penaltiesPath returns the path of the file with persistedPenalties.
func (o *Options) penaltiesPath() string { return o.State + ".penalties" }

// writeTo writes o to a file. It removes the file when o is empty.
func (o persistedPenalties) writeTo(path string) error {
	if len(o.Penalties) == 0 {
		return removeFile(path)
	}
	return writeJSON(path, o)
}

// savePenalties saves the penalties if there were others when that was last done.
func (s *server) savePenalties() {
	changes := s.proxy.PenaltyChanges()
	if s.penalties.saver == nil || changes == s.penalties.saved {
		return
	}
	s.penalties.saved = changes
	var all persistedPenalties
	now := time.Now()
	for _, y := range s.proxy.Penalties() {
		all.Penalties = append(all.Penalties, persistedPenalty{y.Limit, y.Source, now.Add(-y.Age), now.Add(y.Left), y.Times, y.Observed})
	}
	s.penalties.saver.enqueue(all)
}

// restorePenalties restores the penalties that were saved before the daemon ended, before any traffic is admitted.
func (s *server) restorePenalties(ctx context.Context) {
	if s.options.State == "" {
		return
	}
	var saved persistedPenalties
	if err := readStateFile(ctx, s.options.penaltiesPath(), func(text []byte) error { return json.Unmarshal(text, &saved) }); err != nil {
		s.log.Warn("penalties not restored", "err", err, "kept", s.setAside(ctx, "penalties", s.options.penaltiesPath()))
		return
	}
	var all []shaper.PenaltyStatus
	now := time.Now()
	for _, y := range saved.Penalties {
		if y.Source.IsValid() && y.Times > 0 && y.Since.Before(y.Until) {
			// A clock that was set, or is wrong after a boot, must not prolong a penalty.
			left := min(y.Until.Sub(now), y.Until.Sub(y.Since))
			all = append(all, shaper.PenaltyStatus{Limit: y.Limit, Source: y.Source, Age: y.Until.Sub(y.Since) - left, Left: left, Times: y.Times, Observed: y.Observed})
		}
	}
	s.proxy.RestorePenalties(all)
	if len(all) > 0 {
		s.log.Info("penalties restored after restart", "sources", len(all))
	}
}

// EndPenalty forgets what a limit has refused of a source, and ends its block; of all limits if limit is "".
func (s *server) EndPenalty(ctx context.Context, limit string, source netip.Prefix) error {
	return s.withAudit(ctx, s.commands, func(context.Context) error {
		if p := s.shaper.Policy(); limit != "" && (p.Find(limit) < 0 || p.Limit(p.Find(limit)).Penalty == nil) {
			return &notFoundError{fmt.Errorf("no limit %q with a penalty", limit)}
		}
		if !s.proxy.EndPenalty(limit, source) {
			return &notFoundError{fmt.Errorf("%v is not penalized", source)}
		}
		s.savePenalties()
		return nil
	}, "penalty ended by operator", "source", source.String(), "limit", limit)
}
