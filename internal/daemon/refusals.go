package daemon

import (
	"log/slog"
	"time"

	"shaperd.dev/shaperd/shaper"
)

// refusalInterval is the time between two summaries of refusals in the log.
const refusalInterval = 10 * time.Second

// refusalLog logs how much each limit has refused since the last summary, with one record per
// limit and reason. It reads counters, and so costs the data path nothing.
type refusalLog struct {
	shaper   *shaper.Shaper
	log      *slog.Logger
	reported map[*shaper.LimitState]*refusalCounts
}

// refusalCounts are datagrams and connections by reason.
type refusalCounts [shaper.NumReasons][2]uint64

func newRefusalLog(s *shaper.Shaper, log *slog.Logger) *refusalLog {
	return &refusalLog{shaper: s, log: log, reported: map[*shaper.LimitState]*refusalCounts{}}
}

func (r *refusalLog) write() {
	policy := r.shaper.Policy()
	for i := range policy.Len() {
		state := policy.State(i)
		seen := r.reported[state]
		if seen == nil {
			seen = &refusalCounts{}
			r.reported[state] = seen
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
				"mode", shaper.Mode(policy.Limit(i).Observe).String(),
				"packets", now[0]-seen[reason][0], "connections", now[1]-seen[reason][1])
			seen[reason] = now
		}
	}
}
