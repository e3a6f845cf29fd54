package main

import (
	"log/slog"
	"time"

	"shaperd/shaper"
)

// refusalInterval is how often refusals are summed up in the log.
const refusalInterval = 10 * time.Second

// refusalLog writes how much each limit has refused since it last did, a line for
// each limit and reason. However many they are, they cost the data path nothing.
type refusalLog struct {
	shaper *shaper.Shaper
	log    *slog.Logger
	seen   map[*shaper.State]*refusalCounts
}

// refusalCounts is datagrams and connections by reason.
type refusalCounts [shaper.Reasons][2]uint64

func newRefusalLog(s *shaper.Shaper, log *slog.Logger) *refusalLog {
	return &refusalLog{shaper: s, log: log, seen: map[*shaper.State]*refusalCounts{}}
}

func (r *refusalLog) write() {
	policy := r.shaper.Policy()
	for i := range policy.Len() {
		state := policy.State(i)
		seen := r.seen[state]
		if seen == nil {
			seen = &refusalCounts{}
			r.seen[state] = seen
		}
		for reason := range seen {
			now := [2]uint64{
				state.Packets[shaper.Refuse][reason].Load(),
				state.Connections[shaper.Refuse][reason].Load(),
			}
			if now == seen[reason] {
				continue
			}
			r.log.Warn("refused", "limit", state.Name, "reason", shaper.Reason(reason).String(),
				"mode", mode(policy.Limit(i).Observe),
				"packets", now[0]-seen[reason][0], "connections", now[1]-seen[reason][1])
			seen[reason] = now
		}
	}
}
