package daemon

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/shaper/config"
)

const (
	// sourceInterval is the time between two looks at the files with sources. A file that has changed is read when it has not changed
	// again at the next look: it may be in the midst of being written.
	sourceInterval = 500 * time.Millisecond
	// sourcePatience is after how long a file is read that changes all the time.
	sourcePatience = 5 * time.Second
	// sourceRetry is after how long one is read again that could not be applied, although it has not changed.
	sourceRetry = 10 * time.Second
)

// sourceWatch follows the files with sources that the configuration names: those of groups, and those with values. Its goroutine stays
// in a system call while their file system does not answer, and nothing else waits for it.
type sourceWatch struct {
	mu    sync.Mutex
	wrong map[string][]string // mistakes in the files as they are now, by path
}

// mistakes returns what keeps the files as they are now from taking effect.
func (w *sourceWatch) mistakes() (all []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, path := range slices.Sorted(maps.Keys(w.wrong)) {
		all = append(all, w.wrong[path]...)
	}
	return all
}

// set sets the mistakes in a file, none if wrong is nil.
func (w *sourceWatch) set(path string, wrong []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.wrong == nil {
		w.wrong = map[string][]string{}
	}
	if w.wrong[path] = wrong; wrong == nil {
		delete(w.wrong, path)
	}
}

// keep forgets the mistakes in files that are not among paths.
func (w *sourceWatch) keep(paths []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.wrong, func(path string, _ []string) bool { return !slices.Contains(paths, path) })
}

// watchedFile is what the watch knows of a file that is not as it was read.
type watchedFile struct {
	version string    // at the last look
	since   time.Time // when it was first seen to have changed
	refused string    // version that could not be applied
	plan    *plan.Plan
	retryAt time.Time // of the refused version, with the same plan
}

// due reports whether a file is to be read whose version is now that, of a plan p.
func (f *watchedFile) due(version string, p *plan.Plan, now time.Time) bool {
	if version != f.version && now.Sub(f.since) < sourcePatience {
		return false
	}
	return version != f.refused || p != f.plan || now.After(f.retryAt)
}

// watchSources applies changes of the files with sources until ctx ends, each by itself.
func (s *server) watchSources(ctx context.Context) {
	tick := time.NewTicker(sourceInterval)
	defer tick.Stop()
	files := map[string]*watchedFile{}
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		p, _ := s.current()
		versions := p.Versions()
		s.sources.keep(slices.Collect(maps.Keys(versions)))
		maps.DeleteFunc(files, func(path string, _ *watchedFile) bool { return versions[path] == "" })
		for _, path := range slices.Sorted(maps.Keys(versions)) {
			now := time.Now()
			f := files[path]
			switch {
			case versions[path] == p.ReadVersion(path):
				delete(files, path)
				s.sources.set(path, nil)
				continue
			case f == nil:
				files[path] = &watchedFile{version: versions[path], since: now}
				continue
			case f.due(versions[path], p, now):
				err := s.rereadSources(ctx, path)
				if ctx.Err() != nil {
					return
				}
				if f.since = now; err != nil {
					s.refuseSources(path, err, versions[path] == f.refused)
					f.refused, f.retryAt = versions[path], now.Add(sourceRetry)
					f.plan, _ = s.current()
				}
			}
			f.version = versions[path]
		}
	}
}

// rereadSources applies a file with sources as it is now.
func (s *server) rereadSources(ctx context.Context, path string) error {
	p, _ := s.current()
	next, err := p.Reread(path)
	if err != nil {
		return err
	}
	return s.do(ctx, s.commands, func(ctx context.Context) error {
		was, set := s.current()
		if was != p {
			return nil // the next look decides
		}
		f, err := s.merge(next, set)
		if err != nil {
			return err
		}
		if err := s.apply(ctx, f); err != nil {
			return err
		}
		s.sources.set(path, nil)
		s.log.Info("sources read again", "file", path)
		return nil
	})
}

// refuseSources says that a file with sources cannot be applied as it is now, in the log unless that was said before.
func (s *server) refuseSources(path string, err error, again bool) {
	wrong := []string{err.Error()}
	var all config.Errors
	if errors.As(err, &all) {
		wrong = nil
		for _, e := range all {
			wrong = append(wrong, e.Error())
		}
	}
	s.sources.set(path, wrong)
	if again {
		return
	}
	for _, text := range wrong {
		s.log.Error("sources not read again", "err", text)
	}
	s.log.Error("what was read before stays effective", "file", path)
}
