package daemon

import (
	"context"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper/config"
)

// followSchedules applies the values of overrides with a schedule that hold now, if they are others than those in effect. It is called
// each second, so that a clock that was set has no further consequence. It returns those that could not be applied, if any, which failed
// were the last time.
func (s *server) followSchedules(ctx context.Context, failed *uint64) *uint64 {
	was, set := s.current()
	active := was.Config.ActiveAt(s.options.Now())
	if active == was.Config.Active() {
		s.setScheduleError("")
		return nil
	}
	if failed != nil && active == *failed {
		return failed
	}
	f, err := s.mergeFitting(was, set)
	if err == nil {
		err = s.apply(ctx, f)
	}
	if err != nil {
		s.setScheduleError(err.Error())
		s.log.Error("applying the values of a schedule failed: those before stay effective", "err", err)
		return &active
	}
	s.setScheduleError("")
	for _, err := range f.dropped {
		s.log.Warn("override dropped: invalid with the values of a schedule", "err", err)
	}
	for i, o := range f.loaded.Config.Scheduled() {
		if bit := uint64(1) << i; (active^was.Config.Active())&bit != 0 {
			s.log.Info("schedule of a limit", "limit", o.Limit, "when", o.When.String(), "set", joinOverrides(o.Set), "holds", active&bit != 0)
		}
	}
	return nil
}

// scheduledOf returns the overrides of a limit that have a schedule.
func scheduledOf(c *config.Config, limit string, now time.Time) (all []api.Scheduled) {
	for i, o := range c.Scheduled() {
		if o.Limit != limit {
			continue
		}
		one := api.Scheduled{When: strings.Split(o.When.String(), ", "), Set: o.Set, Holds: c.Active()>>i&1 != 0}
		if change := o.When.Changes(now); !change.IsZero() {
			one.Changes = &change
		}
		all = append(all, one)
	}
	return slices.Clip(all)
}
