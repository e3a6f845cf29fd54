package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"shaperd/conn"
	"shaperd/control"
	"shaperd/shaper/config"
)

// loadTimeout is how long the files of a configuration may take.
const loadTimeout = 20 * time.Second

// reader reads the configuration for the loop of serve. It does so in a goroutine of its
// own: a file system that does not answer (NFS, autofs, FUSE) holds up whoever opens a
// file, and nothing but the end of the process takes that back.
type reader struct {
	path    string
	timeout time.Duration
	idle    chan struct{} // has an element while no goroutine reads
	opening atomic.Pointer[string]
}

func newReader(path string, timeout time.Duration) *reader {
	if timeout == 0 {
		timeout = loadTimeout
	}
	r := &reader{path: path, timeout: timeout, idle: make(chan struct{}, 1)}
	r.idle <- struct{}{}
	r.opening.Store(&path)
	return r
}

// load reads the configuration, and looks up names for proxy unless that is nil. It
// returns soon after ctx ends, and after the timeout at the latest; the goroutine then
// stays until its file answers, and no other is begun.
func (r *reader) load(ctx context.Context, proxy *conn.Proxy) (*loaded, error) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	select {
	case <-r.idle:
	default:
		return nil, fmt.Errorf("read configuration: an earlier reload still waits for %s", *r.opening.Load())
	}
	l, err := aside(ctx, func() (*loaded, error) {
		defer func() { r.idle <- struct{}{} }()
		l, err := loadWith(&config.Reader{Opening: func(path string) { r.opening.Store(&path) }}, r.path)
		if err == nil && proxy != nil {
			proxy.LookUp(ctx, l.listens)
		}
		return l, err
	})
	if err == context.DeadlineExceeded {
		err = fmt.Errorf("read configuration: no answer for %v, last from %s", r.timeout, *r.opening.Load())
	}
	return l, err
}

// withoutSignals has the signals that end or reload the daemon go to other threads than that
// of the caller, until the function that it returns is called. The kernel gives a signal to
// one thread, the first one if it can: one that hangs in a system call would keep it.
func withoutSignals() (undo func()) {
	runtime.LockOSThread()
	var block, was unix.Sigset_t
	const bits = 8 * unsafe.Sizeof(block.Val[0])
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT} {
		block.Val[uintptr(s-1)/bits] |= 1 << (uintptr(s-1) % bits)
	}
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, &block, &was); err != nil {
		return runtime.UnlockOSThread
	}
	return func() {
		_ = unix.PthreadSigmask(unix.SIG_SETMASK, &was, nil)
		runtime.UnlockOSThread()
	}
}

// reloading is the reload under way. It belongs to the loop of serve, which goes on taking
// orders while files are read; what was read is applied in the loop, between two orders.
type reloading struct {
	read    chan readResult // nil while no reload is under way
	begun   time.Time
	served  []chan error // who waits for it
	waiting []chan error // who waits for the next one: files may have changed since this one read them
	again   bool         // there is to be a next one
}

type readResult struct {
	l   *loaded
	err error
}

// begin begins a reload, after the one that is under way.
func (r *reloading) begin(ctx context.Context, s *server) {
	if r.read != nil {
		r.again = true
		return
	}
	notify(daemon.SdNotifyReloading + "\n" + daemon.SdNotifyMonotonicUsec())
	r.begun, r.again = time.Now(), false
	r.served, r.waiting = r.waiting, nil
	read := make(chan readResult, 1)
	r.read = read
	go func() {
		l, err := s.reader.load(ctx, s.proxy)
		read <- readResult{l, err}
	}()
}

// end applies what was read, and tells those who wait.
func (r *reloading) end(ctx context.Context, s *server, got readResult) {
	var dropped []string
	err := got.err
	if err == nil {
		dropped, err = s.applyReload(ctx, got.l)
	}
	s.noteReload(time.Since(r.begun), err)
	s.reloads.Dropped(dropped)
	notify(daemon.SdNotifyReady)
	for _, done := range r.served {
		done <- err
	}
	r.read, r.served = nil, nil
	if r.again {
		r.begin(ctx, s)
	}
}

// cancel forgets the reload under way: what it has read is not applied.
func (r *reloading) cancel() {
	for _, done := range append(r.served, r.waiting...) {
		done <- control.ErrEnding
	}
	*r = reloading{}
}

// applyReload puts l in force in the place of what is, and returns what of the settings of
// operators that ends. On an error everything stays as it was.
func (s *server) applyReload(ctx context.Context, l *loaded) (dropped []string, err error) {
	old, had := s.inForce()
	want, ended := had.reloaded()
	f, err := s.fit(l, want)
	if err != nil {
		return nil, err
	}
	was, is := old.config.Daemon, f.loaded.config.Daemon
	if was.Buckets != is.Buckets {
		return nil, fmt.Errorf("[daemon] max_buckets: %d became %d, which takes a restart", was.Buckets, is.Buckets)
	}
	for _, key := range []struct{ name, was, is string }{{"metrics", was.Metrics, is.Metrics}, {"dashboard", was.Page, is.Page}, {"pin_path", was.Pins, is.Pins}} {
		if key.was != key.is {
			return nil, fmt.Errorf("[daemon] %s: %q became %q, which takes a restart", key.name, key.was, key.is)
		}
	}
	if err := s.effect(ctx, f); err != nil {
		return nil, err
	}
	for _, what := range ended {
		dropped = append(dropped, what+": it was set until the next reload")
	}
	for _, err := range f.lost {
		dropped = append(dropped, "it does not go with the configuration: "+err.Error())
	}
	for _, what := range dropped {
		s.log.Warn("the reload dropped what an operator had set", "what", what)
	}
	return dropped, nil
}

// noteReload says how a reload went.
func (s *server) noteReload(took time.Duration, err error) {
	if err != nil {
		var mistakes config.Errors
		texts := []string{err.Error()}
		if errors.As(err, &mistakes) {
			texts = nil
			for _, m := range mistakes {
				texts = append(texts, m.Error())
			}
		}
		for _, text := range texts {
			s.log.Error("reload", "err", text)
		}
		s.log.Error("the old configuration stays in force")
		s.reloads.Note(took, texts...)
		return
	}
	s.reloads.Note(took)
	l, _ := s.inForce()
	s.log.Info("reloaded", "limits", s.shaper.Policy().Len(), "listeners", len(l.listens),
		"attachments", len(l.attach), "mode", mode(l.config.Daemon.Observe), "took", took.String())
	s.noteOddities()
}

// Reload puts the configuration file in force.
func (s *server) Reload(ctx context.Context) error {
	done := make(chan error, 1)
	s.log.Warn("reload asked for by an operator", control.Asker(ctx)...)
	select {
	case s.reloadWanted <- done:
	case <-s.draining:
		return control.ErrEnding
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-done:
		if err != nil && !errors.Is(err, control.ErrEnding) {
			return &refused{err}
		}
		return err
	case <-s.draining:
		return control.ErrEnding
	case <-ctx.Done():
		return ctx.Err()
	}
}
