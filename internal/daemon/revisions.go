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
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
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
// written in a goroutine of their own: a disk that does not answer delays nothing.
type revisions struct {
	folder string // "" keeps nothing
	log    *slog.Logger

	pending sync.WaitGroup
	reading atomic.Bool
	mu      sync.Mutex
	next    []*keptRevision // to write, at most maxRevisions
	writing bool
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
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.next = append(r.next, &k); len(r.next) > maxRevisions {
		r.next = slices.Delete(r.next, 0, 1)
	}
	if r.writing {
		return
	}
	r.writing = true
	r.pending.Go(func() {
		defer blockSignals()()
		for next := r.take(); next != nil; next = r.take() {
			if err := r.write(next); err != nil {
				r.log.Warn("keeping the configuration for \"shaperd rollback\" failed", "err", err)
			}
		}
	})
}

// take returns what is to be written next, or nil if nothing is.
func (r *revisions) take() *keptRevision {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.writing = len(r.next) > 0; !r.writing {
		return nil
	}
	next := r.next[0]
	r.next = slices.Delete(r.next, 0, 1)
	return next
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
	n := uint64(1) // a clock may be set back
	if len(names) > 0 {
		last, _ := strconv.ParseUint(names[len(names)-1][:numberDigits], 10, 64)
		n = last + 1
	}
	same := "-" + k.Revision + ".json"
	if err := writeJSON(filepath.Join(r.folder, fmt.Sprintf("%0*d%s", numberDigits, n, same)), k); err != nil {
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

// numberDigits is how many digits the numbers of files have.
const numberDigits = 8

var revisionFile = regexp.MustCompile(`^[0-9]{8}-[0-9a-f]+\.json$`)

// names returns the names of the files, the oldest first.
func (r *revisions) names() (names []string, err error) {
	entries, err := os.ReadDir(r.folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		if revisionFile.MatchString(e.Name()) {
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
	if !r.reading.CompareAndSwap(false, true) {
		return nil, &refusedError{errors.New("the kept configurations are being read: try again")}
	}
	defer r.reading.Store(false)
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

// Rollback applies the kept configuration with a revision, of which the first letters are enough, or for "" the last one that is another
// than the one in effect, until the next reload or start.
func (s *server) Rollback(ctx context.Context, revision string) error {
	kept, err := s.readRevisions(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	begun := time.Now()
	to, err := runAsync(ctx, func() (loadedRevision, error) {
		l, _ := s.current()
		to, err := find(kept, revision, l.Revision())
		if err == nil {
			s.proxy.ResolveAhead(ctx, to.Config.Listen)
		}
		return to, err
	})
	if err != nil {
		return err
	}
	return s.withAudit(ctx, s.commands, func(ctx context.Context) error {
		if s.reload.read != nil {
			return &refusedError{errors.New("a reload is reading the files of the configuration: try again when it has ended")}
		}
		dropped, err := s.applyReload(ctx, to.Plan)
		s.logReload(time.Since(begun), err)
		s.reloads.SetDroppedOverrides(dropped)
		if err != nil {
			return &refusedError{err}
		}
		s.revisions.setRolledBack(&api.Revision{Revision: to.Revision(), At: to.at, Effective: true})
		return nil
	}, "rolled back by operator", "revision", to.Revision(), "of", to.at.Local().Format(time.DateTime))
}

// loadedRevision is a kept configuration, and when it became effective.
type loadedRevision struct {
	*plan.Plan
	at time.Time
}

// find loads the configuration of kept with a revision, or for "" the newest that is another than the one in effect.
func find(kept []keptRevision, revision, effective string) (loadedRevision, error) {
	matches := slices.DeleteFunc(slices.Clone(kept), func(k keptRevision) bool {
		return revision == "" && k.Revision == effective || !strings.HasPrefix(k.Revision, revision)
	})
	switch {
	case len(matches) == 0 && revision == "":
		return loadedRevision{}, &notFoundError{errors.New("no other configuration is kept")}
	case len(matches) == 0:
		return loadedRevision{}, &notFoundError{fmt.Errorf("unknown revision %q", revision)}
	case len(matches) > 1 && revision != "":
		return loadedRevision{}, &refusedError{fmt.Errorf("%d revisions begin with %q: write more of it", len(matches), revision)}
	}
	for _, k := range matches {
		var files config.Files
		for _, f := range k.Files {
			files.Add(f.Path, f.Text)
		}
		next, err := plan.LoadFiles(&files, nil)
		if err != nil {
			return loadedRevision{}, &refusedError{fmt.Errorf("revision %s: %w", k.Revision, err)}
		}
		if revision != "" || next.Revision() != effective { // else an earlier version of shaperd had another revision for the same
			return loadedRevision{next, k.At}, nil
		}
	}
	return loadedRevision{}, &notFoundError{errors.New("no other configuration is kept")}
}
