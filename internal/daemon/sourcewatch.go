package daemon

import (
	"context"
	"errors"
	"sync"
	"time"

	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/shaper/config"
)

// sourceInterval is the time between two looks at the files with sources. A file that has changed is read when it has not changed again
// at the next look: it may be in the midst of being written.
const sourceInterval = 500 * time.Millisecond

// sourceWatch follows the files with sources that the configuration names: those of groups, and those with values. Its goroutine stays
// in a system call while their file system does not answer, and nothing else waits for it.
type sourceWatch struct {
	mu    sync.Mutex
	wrong []string // mistakes in the files as they are now
}

// mistakes returns what keeps the files as they are now from taking effect.
func (w *sourceWatch) mistakes() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.wrong
}

func (w *sourceWatch) set(wrong []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wrong = wrong
}

// watchSources applies changes of the files with sources until ctx ends.
func (s *server) watchSources(ctx context.Context) {
	tick := time.NewTicker(sourceInterval)
	defer tick.Stop()
	seen, refused := "", "" // versions at the last look, and those that are known to be wrong
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		p, _ := s.current()
		now := p.Versions()
		switch {
		case now == p.ReadVersions():
			refused = ""
			s.sources.set(nil)
		case now != seen: // may change again
		case now != refused:
			refused = ""
			if err := s.rereadSources(ctx, p); err != nil && ctx.Err() == nil {
				refused = now
				s.refuseSources(err)
			}
		}
		seen = now
	}
}

// rereadSources applies the files with sources of p, which is current, as they are now.
func (s *server) rereadSources(ctx context.Context, p *plan.Plan) error {
	next, err := p.Reread()
	if err != nil {
		return err
	}
	return s.do(ctx, func(ctx context.Context) error {
		was, set := s.current()
		if !was.SameFiles(p) {
			return nil // a reload has read them
		}
		f, err := s.merge(next, set)
		if err != nil {
			return err
		}
		if err := s.apply(ctx, f); err != nil {
			return err
		}
		s.sources.set(nil)
		s.log.Info("sources read again", "files", next.SourceFiles())
		return nil
	})
}

// refuseSources says that the files with sources are wrong as they are now.
func (s *server) refuseSources(err error) {
	wrong := []string{err.Error()}
	var all config.Errors
	if errors.As(err, &all) {
		wrong = nil
		for _, e := range all {
			wrong = append(wrong, e.Error())
		}
	}
	s.sources.set(wrong)
	for _, text := range wrong {
		s.log.Error("sources not read again", "err", text)
	}
	s.log.Error("what was read of them before stays effective")
}
