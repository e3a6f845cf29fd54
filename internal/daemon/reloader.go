package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"

	"shaperd.dev/shaperd/conn"
	"shaperd.dev/shaperd/control"
	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// loadTimeout bounds the reading of a configuration.
const loadTimeout = 20 * time.Second

// configReader reads the configuration for the loop of serve, in a goroutine of its own: a file
// system that does not answer (NFS, autofs, FUSE) blocks the thread that opens a file, and only
// the end of the process unblocks it.
type configReader struct {
	path    string
	timeout time.Duration
	idle    chan struct{} // holds an element while no goroutine reads
	opening atomic.Pointer[string]
}

func newConfigReader(path string, timeout time.Duration) *configReader {
	if timeout == 0 {
		timeout = loadTimeout
	}
	r := &configReader{path: path, timeout: timeout, idle: make(chan struct{}, 1)}
	r.idle <- struct{}{}
	r.opening.Store(&path)
	return r
}

// load reads the configuration, and resolves names for proxy unless that is nil. It returns soon
// after ctx ends, and after the timeout at the latest. The goroutine then stays until its file
// system answers, and no other one starts.
func (r *configReader) load(ctx context.Context, proxy *conn.Proxy) (*plan.Plan, error) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	select {
	case <-r.idle:
	default:
		return nil, fmt.Errorf("read configuration: an earlier reload is still waiting for %s", *r.opening.Load())
	}
	l, err := runAsync(ctx, func() (*plan.Plan, error) {
		defer func() { r.idle <- struct{}{} }()
		l, err := plan.Read(&config.Reader{Opening: func(path string) { r.opening.Store(&path) }}, r.path)
		if err == nil && proxy != nil {
			proxy.ResolveAhead(ctx, l.Config.Listen)
		}
		return l, err
	})
	if errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("read configuration: timed out after %v, at %s", r.timeout, *r.opening.Load())
	}
	return l, err
}

// reloader is the running reload. It belongs to the loop of serve, which keeps running commands
// while files are read, and then applies the new configuration between two commands.
type reloader struct {
	read    chan readResult // nil while no reload is under way
	begun   time.Time
	served  []chan error // results of this reload
	waiting []chan error // results of the next one: files may have changed since this one read them
	pending bool         // another reload was requested
}

type readResult struct {
	l   *plan.Plan
	err error
}

// begin starts a reload, or schedules one when another is running.
func (r *reloader) begin(ctx context.Context, s *server) {
	if r.read != nil {
		r.pending = true
		return
	}
	notify(sd.SdNotifyReloading + "\n" + sd.SdNotifyMonotonicUsec())
	r.begun, r.pending = time.Now(), false
	r.served, r.waiting = r.waiting, nil
	read := make(chan readResult, 1)
	r.read = read
	go func() {
		l, err := s.reader.load(ctx, s.proxy)
		read <- readResult{l, err}
	}()
}

// end applies the configuration that was read, and sends the result to the requests that wait.
func (r *reloader) end(ctx context.Context, s *server, got readResult) {
	var dropped []string
	err := got.err
	if err == nil {
		dropped, err = s.applyReload(ctx, got.l)
	}
	if s.logReload(time.Since(r.begun), err); err == nil {
		s.revisions.setRolledBack(nil)
		s.revisions.keep(got.l)
	}
	s.reloads.SetDroppedOverrides(dropped)
	notify(sd.SdNotifyReady)
	for _, done := range r.served {
		done <- err
	}
	r.read, r.served = nil, nil
	if r.pending {
		r.begin(ctx, s)
	}
}

// cancel abandons the running reload: its configuration is not applied.
func (r *reloader) cancel() {
	for _, done := range append(r.served, r.waiting...) {
		done <- control.ErrStopping
	}
	*r = reloader{}
}

// applyReload replaces the current configuration by l, and describes the overrides that end with
// it. On an error nothing changes.
func (s *server) applyReload(ctx context.Context, l *plan.Plan) (dropped []string, err error) {
	old, set := s.current()
	left, ended := set.afterReload()
	if l, err = l.At(s.options.Now()); err != nil {
		return nil, err
	}
	f, err := s.mergeFitting(l, left)
	if err != nil {
		return nil, err
	}
	if err := old.CheckReload(f.loaded); err != nil {
		return nil, err
	}
	if err := s.apply(ctx, f); err != nil {
		return nil, err
	}
	for _, what := range ended {
		dropped = append(dropped, what+": was set until the next reload")
	}
	for _, err := range f.dropped {
		dropped = append(dropped, "invalid for the new configuration: "+err.Error())
	}
	for _, what := range dropped {
		s.log.Warn("reload dropped an override", "override", what)
	}
	return dropped, nil
}

// logReload logs the result of a reload.
func (s *server) logReload(duration time.Duration, err error) {
	if err != nil {
		var all config.Errors
		texts := []string{err.Error()}
		if errors.As(err, &all) {
			texts = nil
			for _, e := range all {
				texts = append(texts, e.Error())
			}
		}
		for _, text := range texts {
			s.log.Error("reload failed", "err", text)
		}
		s.log.Error("the old configuration stays effective")
		s.reloads.Record(duration, texts...)
		return
	}
	s.reloads.Record(duration)
	l, _ := s.current()
	s.log.Info("reloaded", "revision", l.Revision(), "limits", s.shaper.Policy().Len(), "listeners", len(l.Config.Listen),
		"attachments", len(l.Config.Attach), "mode", shaper.Mode(l.Config.Daemon.Observe).String(), "duration", duration.String())
	s.logWarnings()
}

// Reload loads and applies the configuration file.
func (s *server) Reload(ctx context.Context) error {
	done := make(chan error, 1)
	s.log.Warn("reload requested by operator", control.CallerAttrs(ctx)...)
	select {
	case s.reloadRequests <- done:
	case <-s.draining:
		return control.ErrStopping
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-done:
		if err != nil && !errors.Is(err, control.ErrStopping) {
			return &refusedError{err}
		}
		return err
	case <-s.draining:
		return control.ErrStopping
	case <-ctx.Done():
		return ctx.Err()
	}
}
