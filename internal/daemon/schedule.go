package daemon

import (
	"context"
	"slices"
	"strings"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// retrySchedule is how long after a failure the values of a schedule are tried again.
const retrySchedule = 10 * time.Second

// followSchedules applies the values of overrides with a schedule that hold now, if they are others than those in effect. It is called
// each second, so that a clock that was set has no further consequence. It returns when the next attempt is, the zero time if at once.
func (s *server) followSchedules(ctx context.Context, next time.Time) time.Time {
	was, set := s.current()
	active := was.Config.ActiveAt(s.options.Now())
	if active == was.Config.Active() {
		s.setScheduleError("")
		return time.Time{}
	}
	if time.Now().Before(next) {
		return next
	}
	var f mergedConfig
	now, err := was.With(active, nil, nil, false)
	if err == nil {
		f, err = s.mergeFitting(now, set)
	}
	if err == nil {
		err = s.apply(ctx, f)
	}
	if err != nil {
		if s.getScheduleError() != err.Error() {
			s.log.Error("applying the values of a schedule failed: those before stay effective", "err", err)
		}
		s.setScheduleError(err.Error())
		return time.Now().Add(retrySchedule)
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
	return time.Time{}
}

// checkSchedules reports whether overrides of a limit by operators would be invalid while some of its schedules hold: these would end them.
func (s *server) checkSchedules(limit string, w *overrides) error {
	l, _ := s.current()
	return l.Config.EachSchedule(func(name string, active uint64) error {
		if name != limit {
			return nil
		}
		then, err := l.With(active, w.configOverrides(), nil, false)
		if err == nil {
			_, err = then.Compile(shaper.New(1))
		}
		return err
	})
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
