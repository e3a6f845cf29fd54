package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"shaperd.dev/shaperd/api"
	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/internal/safefile"
	"shaperd.dev/shaperd/shaper/config"
)

// maxRevisions is the number of configurations that are kept.
const maxRevisions = 10

// keptRevision is a configuration that was effective, as it is kept in a file: so that it can be again when its files have been changed.
type keptRevision struct {
	Revision string
	At       time.Time // when it became effective
	Files    []api.ConfigFile
}

// revisions keeps the last configurations that were effective in a directory next to the state file, or nothing without one. Files are
// written in goroutines of their own: a disk that does not answer delays nothing.
type revisions struct {
	folder string // "" keeps nothing
	log    *slog.Logger

	pending sync.WaitGroup
	writing sync.Mutex
	mu      sync.Mutex
	applied *api.Revision // the one to which an operator has gone back, until a reload; nil otherwise
}

func (o *Options) revisionsPath() string {
	if o.State == "" {
		return ""
	}
	return o.State + ".revisions"
}

// rolledBack returns the revision to which an operator has gone back, or nil.
func (r *revisions) rolledBack() *api.Revision {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.applied
}

func (r *revisions) setRolledBack(to *api.Revision) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.applied = to
}

// keep writes the files of p, which has become effective.
func (r *revisions) keep(p *plan.Plan) {
	if r.folder == "" {
		return
	}
	k := keptRevision{p.Revision(), time.Now(), filesOf(p)}
	r.pending.Go(func() {
		defer blockSignals()()
		r.writing.Lock()
		defer r.writing.Unlock()
		if err := r.write(&k); err != nil {
			r.log.Warn("keeping the configuration for \"shaperd rollback\" failed", "err", err)
		}
	})
}

func filesOf(p *plan.Plan) (all []api.ConfigFile) {
	for path, text := range p.Files() {
		if absolute, err := filepath.Abs(path); err == nil {
			path = absolute // what it names is next to it
		}
		all = append(all, api.ConfigFile{Path: path, Text: text})
	}
	return all
}

// close waits until all is written, for saveTimeout at most.
func (r *revisions) close() {
	written := make(chan struct{})
	go func() { r.pending.Wait(); close(written) }()
	select {
	case <-written:
	case <-time.After(saveTimeout):
	}
}

func (r *revisions) write(k *keptRevision) error {
	if err := os.Mkdir(r.folder, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	names, err := r.names()
	if err != nil {
		return err
	}
	same := "-" + k.Revision + ".json"
	if err := writeJSON(filepath.Join(r.folder, fmt.Sprintf("%020d%s", k.At.UnixNano(), same)), k); err != nil {
		return err
	}
	others := 0
	for _, name := range slices.Backward(names) {
		if !strings.HasSuffix(name, same) {
			others++
		}
		if strings.HasSuffix(name, same) || others >= maxRevisions {
			err = errors.Join(err, os.Remove(filepath.Join(r.folder, name)))
		}
	}
	return err
}

// names returns the names of the files, the oldest first.
func (r *revisions) names() (names []string, err error) {
	entries, err := os.ReadDir(r.folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if filepath.Ext(e.Name()) == ".json" {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, err
}

// read returns those that are kept, the newest first. Files that cannot be read are left out.
func (r *revisions) read() (all []keptRevision, err error) {
	if r.folder == "" {
		return nil, &refusedError{errors.New("no configurations are kept: \"run\" has no --state")}
	}
	names, err := r.names()
	for _, name := range slices.Backward(names) {
		var k keptRevision
		if text, err := safefile.ReadRegular(filepath.Join(r.folder, name), maxStateFile); err == nil && json.Unmarshal(text, &k) == nil && len(k.Files) > 0 {
			all = append(all, k)
		}
	}
	return all, err
}

// Configuration returns the configuration in effect, as its files were read.
func (s *server) Configuration() api.Configuration {
	l, _ := s.current()
	return api.Configuration{Revision: l.Revision(), Files: filesOf(l)}
}

// Revisions returns the configurations that are kept, the newest first.
func (s *server) Revisions(ctx context.Context) ([]api.Revision, error) {
	kept, err := s.readRevisions(ctx)
	if err != nil {
		return nil, err
	}
	l, _ := s.current()
	all := []api.Revision{}
	for _, k := range kept {
		all = append(all, api.Revision{Revision: k.Revision, At: k.At, Effective: k.Revision == l.Revision()})
	}
	return all, nil
}

func (s *server) readRevisions(ctx context.Context) ([]keptRevision, error) {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	return runAsync(ctx, s.revisions.read)
}

// Rollback applies the kept configuration with a revision, or for "" the last one that is another than the one in effect, until the next
// reload or start.
func (s *server) Rollback(ctx context.Context, revision string) error {
	kept, err := s.readRevisions(ctx)
	if err != nil {
		return err
	}
	l, _ := s.current()
	i := slices.IndexFunc(kept, func(k keptRevision) bool {
		return revision == "" && k.Revision != l.Revision() || revision != "" && strings.HasPrefix(k.Revision, revision)
	})
	switch {
	case i < 0 && revision == "":
		return &notFoundError{errors.New("no other configuration is kept")}
	case i < 0:
		return &notFoundError{fmt.Errorf("unknown revision %q", revision)}
	}
	k := kept[i]
	var files config.Files
	for _, f := range k.Files {
		files.Add(f.Path, f.Text)
	}
	begun := time.Now()
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	next, err := runAsync(ctx, func() (*plan.Plan, error) { return plan.LoadFiles(&files, nil) })
	if err != nil {
		return &refusedError{err}
	}
	return s.withAudit(ctx, func(ctx context.Context) error {
		dropped, err := s.applyReload(ctx, next)
		s.logReload(time.Since(begun), err)
		s.reloads.SetDroppedOverrides(dropped)
		if err != nil {
			return &refusedError{err}
		}
		s.revisions.setRolledBack(&api.Revision{Revision: k.Revision, At: k.At, Effective: true})
		return nil
	}, "rolled back by operator", "revision", k.Revision, "of", k.At.Local().Format(time.DateTime))
}
