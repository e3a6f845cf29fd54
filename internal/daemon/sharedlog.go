package daemon

import (
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/api"
)

const (
	// sharedLogInterval is the time between two looks at the group.
	sharedLogInterval = time.Second
	// sharedLogAfter is how long a problem lasts before it is logged.
	sharedLogAfter = 3 * time.Second
)

// sharedLog logs when the group gets a problem and when that has ended.
type sharedLog struct {
	log    *slog.Logger
	since  map[string]time.Time // by the title of the problem
	logged map[string]bool
}

func newSharedLog(log *slog.Logger) *sharedLog {
	return &sharedLog{log: log, since: map[string]time.Time{}, logged: map[string]bool{}}
}

// update takes the problems that there are at now. While the host has not joined, it does not know whether hosts
// disagree.
func (l *sharedLog) update(problems []api.Problem, joined bool, now time.Time) {
	texts := map[string][]string{}
	for _, p := range problems {
		texts[p.Title] = append(texts[p.Title], p.Text)
	}
	for _, title := range slices.Sorted(maps.Keys(texts)) {
		if l.since[title].IsZero() {
			l.since[title] = now
		}
		if !l.logged[title] && now.Sub(l.since[title]) >= sharedLogAfter {
			l.logged[title] = true
			l.log.Warn("problem of shared limits", "problem", strings.ToLower(title), "detail", strings.Join(texts[title], " "))
		}
	}
	for _, title := range slices.Sorted(maps.Keys(l.since)) {
		if texts[title] != nil || title == titleDisagree && !joined {
			continue
		}
		if l.logged[title] {
			l.log.Info("problem of shared limits has ended", "problem", strings.ToLower(title))
		}
		delete(l.since, title)
		delete(l.logged, title)
	}
}

// sharedProblems returns what an operator must know of the group, as far as this host knows without asking the ledger,
// which may be slow.
func (s *server) sharedProblems() (all []api.Problem, joined bool) {
	shared := s.Shared()
	return append(shared.Problems, disagreements(&shared)...), shared.State == sharedJoined
}
