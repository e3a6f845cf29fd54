package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/control"
	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// controller holds what operators can change in a running daemon. Changes run one after the
// other in the loop of serve; methods that read may be called by several goroutines.
type controller struct {
	commands       chan func(context.Context)
	urgent         chan func(context.Context) // commands that go before all others
	reloadRequests chan chan error            // each receives the result
	draining       chan struct{}              // closed when the drain begins: no more reloads
	done           chan struct{}              // closed when serve runs no more commands
	stop           func()

	mu            sync.Mutex
	scheduleError string     // why the values of a schedule could not be applied; "" if they are
	loaded        *plan.Plan // current
	overrides     *overrides // changed with loaded
}

func newController() *controller {
	return &controller{
		commands: make(chan func(context.Context)), urgent: make(chan func(context.Context)), reloadRequests: make(chan chan error), draining: make(chan struct{}), done: make(chan struct{}),
		overrides: (&overrides{}).clone(),
	}
}

func (s *controller) current() (*plan.Plan, *overrides) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.loaded, s.overrides
}

// Stopping reports whether the drain has begun.
func (s *controller) Stopping() bool {
	select {
	case <-s.draining:
		return true
	default:
		return false
	}
}

func (s *controller) setScheduleError(why string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.scheduleError = why
}

func (s *controller) getScheduleError() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.scheduleError
}

func (s *controller) setCurrent(l *plan.Plan, w *overrides) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loaded, s.overrides = l, w
}

// do runs f in the loop of serve, as one of commands or urgent, and waits for it.
func (s *server) do(ctx context.Context, to chan<- func(context.Context), f func(context.Context) error) error {
	done := make(chan error, 1)
	select {
	case to <- func(ctx context.Context) { done <- f(ctx) }:
		return <-done
	case <-s.done:
		return control.ErrStopping
	case <-ctx.Done():
		return ctx.Err()
	}
}

// withAudit is do, and then logs msg and waits until overrides are saved, for saveWait at most.
func (s *server) withAudit(ctx context.Context, to chan<- func(context.Context), f func(context.Context) error, msg string, attrs ...any) error {
	attrs = append(attrs, control.CallerAttrs(ctx)...)
	err := s.do(ctx, to, func(ctx context.Context) error {
		if err := f(ctx); err != nil {
			return err
		}
		s.log.Warn(msg, attrs...)
		return nil
	})
	if err == nil && s.saver != nil {
		s.saver.flush(saveWait)
	}
	return err
}

// update applies the overrides that change makes of the current ones.
func (s *server) update(ctx context.Context, change func(*overrides) error, msg string, attrs ...any) error {
	return s.updateBy(ctx, s.commands, change, msg, attrs...)
}

// updateBy is update as one of commands or urgent.
func (s *server) updateBy(ctx context.Context, to chan<- func(context.Context), change func(*overrides) error, msg string, attrs ...any) error {
	return s.withAudit(ctx, to, func(ctx context.Context) error {
		_, current := s.current()
		next := current.clone()
		if err := change(next); err != nil {
			return err
		}
		return s.applyOverrides(ctx, next)
	}, msg, attrs...)
}

// applyOverrides applies all of next, or returns an error.
func (s *server) applyOverrides(ctx context.Context, next *overrides) error {
	was, _ := s.current()
	f, err := s.merge(was, next)
	if err != nil {
		return refuse(err)
	}
	return s.apply(ctx, f)
}

// apply makes f current, or leaves everything unchanged and returns an error.
func (s *server) apply(ctx context.Context, f mergedConfig) error {
	was, _ := s.current()
	if err := s.applyToPlanes(ctx, f.loaded, f.policy, was); err != nil {
		return err
	}
	s.setCurrent(f.loaded, f.overrides)
	s.saveOverrides()
	return nil
}

// refuse returns err as an ErrRefused, without positions: an override is in no file.
func refuse(err error) error {
	var all config.Errors
	if !errors.As(err, &all) {
		return &refusedError{err}
	}
	var msgs []error
	for _, e := range all {
		msgs = append(msgs, errors.New(e.Msg))
	}
	return &refusedError{errors.Join(msgs...)}
}

// refusedError is a [control.ErrRefused] whose text is only the reason.
type refusedError struct{ error }

func (r *refusedError) Is(target error) bool { return target == control.ErrRefused }

// notFoundError is a [control.ErrUnknown] whose text is only what is unknown.
type notFoundError struct{ error }

func (m *notFoundError) Is(target error) bool { return target == control.ErrUnknown }

// expireRetry is the time after which a failed expiry is tried again.
const expireRetry = 10 * time.Second

// expireOverrides removes expired overrides. It returns when the next one expires, or the zero
// time. An override that is invalid without an expired one is dropped too, so that it delays
// no other expiry.
func (s *server) expireOverrides(ctx context.Context) (next time.Time) {
	was, set := s.current()
	left, expired := set.afterExpiry(time.Now())
	if len(expired) == 0 {
		return set.nextExpiry()
	}
	f, err := s.mergeFitting(was, left)
	if err == nil {
		err = s.apply(ctx, f)
	}
	if err != nil {
		s.log.Error("removing expired overrides failed", "err", err)
		return time.Now().Add(expireRetry)
	}
	for _, what := range expired {
		s.log.Info("override expired", "override", what)
	}
	for _, err := range f.dropped {
		s.log.Warn("override dropped: invalid without the expired one", "err", err)
	}
	return f.overrides.nextExpiry()
}

// Describe fills in the parts of a status that only the daemon knows.
func (s *server) Describe(to *api.Status) {
	l, w := s.current()
	to.Version, to.Config, to.Revision, to.Started = s.options.Version, s.path, l.Revision(), s.startedAt
	to.State, to.Mode = "running", shaper.Mode(l.Config.Daemon.Observe).String()
	if s.Stopping() {
		to.State = "stopping"
	}
	for _, saver := range []*saver{s.penalties.saver, s.saver} {
		if saver == nil {
			continue
		}
		if err := saver.saveError(); err != nil {
			to.StateError = err.Error()
		}
	}
	to.RolledBack = s.revisions.rolledBack()
	to.SourceErrors, to.ScheduleError = s.sources.mistakes(), s.getScheduleError()
	w.describe(to)
	for i := range to.Listeners {
		for j := range l.Config.Listen {
			if listen := &l.Config.Listen[j]; listen.Name == to.Listeners[i].Name {
				for _, a := range listen.Addresses {
					to.Listeners[i].Addresses = append(to.Listeners[i].Addresses, a.String())
				}
			}
		}
	}
}

// Summary describes what each bucket of a limit enforces.
func (s *server) Summary(l *shaper.Limit) string {
	p, _ := s.current()
	return p.Config.Summary(l)
}

// Scheduled returns the overrides of a limit that have a schedule.
func (s *server) Scheduled(limit string) []api.Scheduled {
	l, _ := s.current()
	return scheduledOf(l.Config, limit, s.options.Now())
}

// Override returns the runtime overrides of a limit, and where files override it.
func (s *server) Override(limit string) (set, inFiles map[string]string) {
	l, w := s.current()
	return w.values(limit), l.Config.Overridden(limit)
}

// Config returns the current configuration.
func (s *server) Config() any {
	l, _ := s.current()
	return l.Config.Canonical()
}

// SetLimit overrides values of a limit, or with valid sources those of their buckets: for d, until the next reload, or, when d is 0,
// until they are unset.
func (s *server) SetLimit(ctx context.Context, limit string, sources netip.Prefix, set map[string]string, d time.Duration, untilReload bool) error {
	until := endText(d, "it is unset")
	if untilReload {
		until = "the next reload"
	}
	return s.update(ctx, func(w *overrides) error {
		w.set(targetOf(limit, sources), set, newValidity(d), untilReload)
		if w.countSources() > maxSourceOverrides {
			return &refusedError{fmt.Errorf("limits are overridden for %d prefixes already: write more into a file that values of the limit names", maxSourceOverrides)}
		}
		if err := s.checkSchedules(limit, w); err != nil {
			return refuse(err)
		}
		return nil
	}, "limit overridden by operator", "limit", limit, "sources", sourcesText(sources), "set", joinOverrides(set), "until", until)
}

// sourcesText returns sources as text, "all" if they are invalid.
func sourcesText(sources netip.Prefix) string {
	if !sources.IsValid() {
		return "all"
	}
	return sources.String()
}

// UnsetLimit removes the overrides of a limit, or with valid sources those of their buckets, or some keys of these.
func (s *server) UnsetLimit(ctx context.Context, limit string, sources netip.Prefix, keys []string) error {
	target := targetOf(limit, sources)
	return s.update(ctx, func(w *overrides) error {
		if len(keys) == 0 {
			keys = slices.Sorted(maps.Keys(w.limits[target]))
		}
		if len(keys) == 0 {
			return s.errNotSet(target, "no key is")
		}
		for _, key := range keys {
			if _, ok := w.limits[target][key]; !ok {
				if now := config.RenamedInLimit(key); now != "" {
					return &refusedError{fmt.Errorf("%s was renamed to %s", key, now)}
				}
				return s.errNotSet(target, key+" is not")
			}
			delete(w.limits[target], key)
		}
		if len(w.limits[target]) == 0 {
			delete(w.limits, target)
		}
		return nil
	}, "limit override removed by operator", "limit", limit, "sources", sourcesText(sources), "keys", cmp.Or(strings.Join(keys, " "), "all"))
}

// errNotSet returns the error that there is no override to remove. It names the files that
// override the limit.
func (s *server) errNotSet(target, what string) error {
	msg := fmt.Sprintf("%s overridden in %s", what, describeTarget(target))
	limit, sources := splitTarget(target)
	if sources.IsValid() {
		return &refusedError{errors.New(msg)}
	}
	l, _ := s.current()
	files := l.Config.Overridden(limit)
	for _, key := range slices.Sorted(maps.Keys(files)) {
		msg += fmt.Sprintf("; %s is overridden in %s", key, files[key])
	}
	return &refusedError{errors.New(msg)}
}

// ResetBucket forgets what the bucket of a limit owes, or with a valid source that of the bucket of this source.
func (s *server) ResetBucket(ctx context.Context, limit string, source netip.Addr) error {
	return s.withAudit(ctx, s.commands, func(context.Context) error {
		p, i, k, err := s.keyToReset(limit, source)
		if err != nil {
			return err
		}
		if l := p.Limit(i); l.Shared {
			return &refusedError{fmt.Errorf("hosts share limit %q: what one forgets, others know", limit)}
		} else if !l.InPacketPlane() {
			s.proxy.ForgetBucket(i, k)
		} else if !s.plane.forgetBucket(i, k) {
			return &refusedError{fmt.Errorf("the bucket of limit %q cannot be reset: other limits delay its packets differently", limit)}
		}
		return nil
	}, "bucket reset by operator", "limit", limit, "source", source.String())
}

// ResetQuota forgets what was used of the quota of a limit, or with a valid source of that of this source.
func (s *server) ResetQuota(ctx context.Context, limit string, source netip.Addr) error {
	return s.withAudit(ctx, s.commands, func(context.Context) error {
		p, i, k, err := s.keyToReset(limit, source)
		switch {
		case err != nil:
			return err
		case p.Limit(i).Quota.Amount == 0:
			return &refusedError{fmt.Errorf("limit %q has no quota", limit)}
		}
		if !s.proxy.ResetQuota(i, k) {
			return &refusedError{fmt.Errorf("nothing was used of the quota of limit %q there, or it is not counted apart", limit)}
		}
		return nil
	}, "quota reset by operator", "limit", limit, "source", source.String())
}

// keyToReset returns the key of a limit for a source, or without one if the limit has one bucket for all.
func (s *server) keyToReset(limit string, source netip.Addr) (p *shaper.Policy, i int, k shaper.Key, err error) {
	p = s.shaper.Policy()
	if i = p.Find(limit); i < 0 {
		return p, i, k, &notFoundError{fmt.Errorf("unknown limit %q", limit)}
	}
	switch l := p.Limit(i); {
	case l.Key != 0 && l.Key != shaper.KeySource:
		err = fmt.Errorf("limit %q has a bucket for each %s: only those by source, or one for all, can be reset", limit, l.KeyText())
	case l.Key == 0 && source.IsValid():
		err = fmt.Errorf("limit %q has one bucket for all sources: leave out the source", limit)
	case l.Key != 0 && !source.IsValid():
		err = fmt.Errorf("limit %q has a bucket for each source: name one with --source", limit)
	}
	if err != nil {
		return p, i, k, &refusedError{err}
	}
	return p, i, p.KeyOf(i, source), nil
}

// Bypass switches the bypass on, so that every limit only observes, or off. It goes before all changes that wait.
func (s *server) Bypass(ctx context.Context, on bool, d time.Duration) error {
	if !on {
		msg := "BYPASS off: limits enforced again"
		if _, w := s.current(); w.bypass == nil {
			msg = "bypass was already off"
		}
		return s.updateBy(ctx, s.urgent, func(w *overrides) error { w.bypass = nil; return nil }, msg)
	}
	return s.updateBy(ctx, s.urgent, func(w *overrides) error {
		t := newValidity(d)
		w.bypass = &t
		return nil
	}, "BYPASS on: no limit is enforced", "until", endText(d, "it is turned off"))
}

// DrainDownstream drains a downstream, or gives it new connections again.
func (s *server) DrainDownstream(ctx context.Context, listener, downstream string, drained bool) error {
	return s.withAudit(ctx, s.commands, func(context.Context) error {
		if s.proxy.DrainDownstream(listener, downstream, drained) == 0 {
			return &notFoundError{fmt.Errorf("unknown downstream %q", downstream)}
		}
		s.saveOverrides()
		return nil
	}, "downstream drained or enabled by operator", "listener", listener, "downstream", downstream, "drained", drained)
}

// HoldListener holds a listener, or resumes it.
func (s *server) HoldListener(ctx context.Context, listener string, d time.Duration, endIdle bool) (ended int, err error) {
	msg, attrs := "listener held by operator", []any{"listener", listener}
	switch d {
	case 0:
		msg = "listener resumed by operator"
	case shaper.Forever:
		attrs = append(attrs, "until", "it is resumed")
	default:
		attrs = append(attrs, "for", d.String())
	}
	err = s.withAudit(ctx, s.commands, func(context.Context) error {
		var known bool
		if ended, known = s.proxy.Hold(listener, d, endIdle); !known {
			return &notFoundError{fmt.Errorf("unknown listener %q", listener)}
		}
		s.saveOverrides()
		return nil
	}, msg, attrs...)
	return ended, err
}

// Stop starts the drain, after which the daemon exits.
func (s *server) Stop(ctx context.Context) {
	s.log.Warn("stop requested by operator", control.CallerAttrs(ctx)...)
	s.stop()
}

// endText returns when something ends that lasts for d, or otherwise when d is 0.
func endText(d time.Duration, otherwise string) string {
	if d == 0 {
		return otherwise
	}
	return time.Now().Add(d).Format(time.DateTime)
}

// joinOverrides formats overrides for the log, sorted by key.
func joinOverrides(set map[string]string) string {
	text := ""
	for _, key := range slices.Sorted(maps.Keys(set)) {
		text += " " + key + "=" + set[key]
	}
	return text[min(1, len(text)):]
}
