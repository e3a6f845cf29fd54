package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"shaperd.dev/shaperd/conn"
	"shaperd.dev/shaperd/control"
	"shaperd.dev/shaperd/control/monitor"
	"shaperd.dev/shaperd/internal/logging"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

type runFlags struct {
	config       string
	logFormat    string
	logLevel     string
	state        string
	drainTimeout time.Duration
	root         *rootFlags
	controlSet   bool // the control socket was named explicitly
}

func runCommand(e env) *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the daemon",
		Long: `Run the daemon in the foreground. SIGHUP reloads the configuration in place; a new one
with errors is rejected. SIGTERM stops the daemon gracefully: new connections are refused,
open ones may go on for --drain-timeout. A second SIGTERM resets them.`,
		Example: `  shaperd run --config shaperd.toml`,
		Args:    noArgs("; use --config to name the configuration"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.drainTimeout < 0 {
				return usageError{fmt.Errorf("--drain-timeout %v: must not be negative", f.drainTimeout)}
			}
			if err := f.checkState(); err != nil {
				return err
			}
			if e.reload == nil { // other verbs end with the terminal
				hangups := make(chan os.Signal, 1)
				signal.Notify(hangups, syscall.SIGHUP)
				defer signal.Stop(hangups)
				e.reload = hangups
			}
			ctx := cmd.Context()
			if e.force == nil {
				var stop func()
				ctx, e.force, stop = stopSignals(ctx)
				defer stop()
			}
			level, asJSON, err := f.parseLog()
			if err != nil {
				return err
			}
			f.root = e.flags
			f.controlSet = cmd.Flags().Changed("control") || os.Getenv("SHAPERD_CONTROL") != ""
			s := &server{flags: f, events: monitor.NewEvents(maxEvents)}
			var records *logging.Writer
			s.log, s.traffic, records = logging.New(e.stderr, level, asJSON, s.events.Handler)
			defer records.Close()
			s.droppedRecords = records.Dropped
			return s.serve(ctx, e)
		},
	}
	cmd.Flags().StringVar(&f.config, "config", "/etc/shaperd/shaperd.toml", "configuration `file`; conf.d/*.toml next to it is read too")
	cmd.Flags().StringVar(&f.logFormat, "log-format", "text", "log `format`: text or json")
	cmd.Flags().StringVar(&f.logLevel, "log-level", "info", "minimum `level` to log: debug, info, warn or error")
	cmd.Flags().StringVar(&f.state, "state", "", "save bucket state in `file`, and runtime overrides in file.overrides, across restarts (default: not saved)")
	cmd.Flags().DurationVar(&f.drainTimeout, "drain-timeout", 30*time.Second, "how long open connections may go on after SIGTERM")
	return cmd
}

// parseLog parses the flags of the log.
func (f *runFlags) parseLog() (level slog.Level, asJSON bool, err error) {
	if level.UnmarshalText([]byte(f.logLevel)) != nil {
		return 0, false, usageError{fmt.Errorf("--log-level %q: must be debug, info, warn or error", f.logLevel)}
	}
	if f.logFormat != "text" && f.logFormat != "json" {
		return 0, false, usageError{fmt.Errorf("--log-format %q: must be text or json", f.logFormat)}
	}
	return level, f.logFormat == "json", nil
}

// stopSignals returns a context that the first SIGTERM or SIGINT cancels, and a channel that
// receives the following ones.
func stopSignals(ctx context.Context) (_ context.Context, force <-chan os.Signal, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	first, second := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(first, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		select {
		case <-first:
			signal.Notify(second, syscall.SIGTERM, syscall.SIGINT)
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, second, func() { cancel(); signal.Stop(first); signal.Stop(second) }
}

// maxEvents is the number of log records that the control socket can show.
const maxEvents = 1000

// server is a running daemon.
type server struct {
	*controller
	flags          runFlags
	path           string // absolute path of the configuration
	startedAt      time.Time
	log            *slog.Logger
	traffic        *slog.Logger // events that traffic causes
	droppedRecords func() uint64
	clock          *pacer.Clock
	shaper         *shaper.Shaper
	proxy          *conn.Proxy
	reloads        *monitor.Reloads
	events         *monitor.Events
	plane          *packetPlane
	reader         *configReader
	saver          *saver // nil without --state
	migrated       bool   // restored overrides had keys of an earlier version
	store          fdStore
	ready          bool
}

// serve runs until ctx ends, then drains. It closes ports first, then connections, then the
// watchdog, the API and the metrics, which stay up during the drain, and last the rest of the
// proxy.
func (s *server) serve(ctx context.Context, e env) error {
	s.startedAt = time.Now()
	s.path, _ = filepath.Abs(s.flags.config)
	s.reader = newConfigReader(s.flags.config, e.loadTimeout)
	l, err := s.reader.load(ctx, nil)
	if ctx.Err() != nil {
		s.log.Info("stopped before ready")
		return nil
	}
	if err != nil {
		return err
	}
	s.clock, s.reloads, s.controller = pacer.NewClock(), &monitor.Reloads{}, newController()
	s.shaper = shaper.New(l.config.Daemon.MaxBuckets)
	l = s.restoreOverrides(ctx, l)
	policy, err := l.compile(s.shaper)
	if err != nil {
		return err
	}
	if s.proxy, err = conn.New(s.shaper, s.clock, s.log, s.traffic); err != nil {
		return err
	}
	if s.flags.state != "" {
		s.saver = newSaver(s.flags.overridesPath(), s.log)
		defer s.saver.close()
	}
	defer s.saveState() // after the proxy has released its buckets
	defer s.proxy.Close()
	fds, err := inheritedFDs()
	if err != nil {
		return err
	}
	s.store.markStored(s.proxy.Inherit(fds))
	s.plane = &packetPlane{shaper: s.shaper, clock: s.clock, proxy: s.proxy, log: s.log}
	ctx, s.controller.stop = context.WithCancel(ctx)
	defer s.controller.stop()
	closeControl, err := s.serveControl(l.config)
	if err != nil {
		return err
	}
	defer closeControl()
	s.restoreState(ctx, policy)
	if err := s.applyToPlanes(ctx, l, policy, nil); err != nil {
		s.plane.close()
		return err
	}
	defer s.plane.close()
	s.ready = true
	s.reloads.Record(time.Since(s.startedAt))
	s.log.Info("ready", "config", s.flags.config, "limits", policy.Len(), "listeners", len(l.listens),
		"attachments", len(l.attach), "mode", modeName(l.config.Daemon.Observe), "version", version)
	s.logWarnings()
	if s.migrated {
		s.saveOverrides()
	}
	if warning := l.leftoverRules(); warning != "" {
		s.log.Warn(warning)
	}
	notify(daemon.SdNotifyReady)

	watchdog := startWatchdog(ctx, s.alive)
	defer watchdog()
	refusals := newRefusalLog(s.shaper, s.traffic)
	defer refusals.write()
	tick := time.NewTicker(refusalInterval)
	defer tick.Stop()
	expiry := time.NewTimer(0)
	defer expiry.Stop()
	await := func(next time.Time) {
		if !next.IsZero() {
			expiry.Reset(max(time.Until(next), 0))
		}
	}
	var reload reloader
	var drained chan struct{}
	commandCtx := context.WithoutCancel(ctx) // commands run until the drain has ended
	stop, hangups, requests := ctx.Done(), e.reload, s.reloadRequests
	for {
		select {
		case <-hangups:
			reload.begin(ctx, s)
		case done := <-requests:
			reload.waiting = append(reload.waiting, done)
			reload.begin(ctx, s)
		case r := <-reload.read:
			reload.end(ctx, s, r)
		case command := <-s.commands:
			command(commandCtx)
			_, w := s.current()
			await(w.nextExpiry())
		case <-expiry.C:
			await(s.expireOverrides(commandCtx))
		case <-tick.C:
			refusals.write()
			s.logBypass()
		case <-stop:
			close(s.draining)
			reload.cancel()
			stop, hangups, requests, drained = nil, nil, nil, make(chan struct{})
			go func() { s.drain(e.force); close(drained) }()
		case <-drained:
			close(s.done)
			return nil
		}
	}
}

// serveControl starts the control socket, the metrics and the dashboard. It returns a function that
// stops them.
func (s *server) serveControl(c *config.Config) (closeAll func(), err error) {
	monitor := monitor.New(s.shaper, s.log)
	var closers []func()
	stop := func() {
		monitor.Close() // which ends the live streams
		for _, f := range slices.Backward(closers) {
			f()
		}
	}
	defer func() {
		if err != nil {
			stop()
		}
	}()
	o := &control.Options{
		Shaper: s.shaper, Proxy: s.proxy, Packets: s.plane, Clock: s.clock.Now, Monitor: monitor,
		Reloads: s.reloads, Events: s.events, Daemon: s, Log: s.log, LogDropped: s.droppedRecords, Version: version,
	}
	metrics, err := control.ServeMetrics(c.Daemon.Metrics, o)
	if err != nil {
		return nil, err
	}
	closers = append(closers, func() { metrics.Close() })
	dashboard, err := control.ServeDashboard(c.Daemon.Dashboard, o)
	if err != nil {
		return nil, err
	}
	closers = append(closers, func() { dashboard.Close() })
	if s.flags.root.control == "" {
		return stop, nil
	}
	socket, err := control.Serve(s.flags.root.control, o)
	if err != nil && !s.flags.controlSet && (errors.Is(err, os.ErrPermission) || errors.Is(err, os.ErrNotExist)) {
		s.log.Warn("no control socket; use --control to name one", "err", err)
		return stop, nil
	}
	if err != nil {
		return nil, err
	}
	closers = append(closers, func() { socket.Close() })
	return stop, nil
}

// logBypass logs that a bypass is still on.
func (s *server) logBypass() {
	if _, w := s.current(); w.bypass != nil {
		s.traffic.Warn("BYPASS is on: no limit is enforced", "since", w.bypass.since.Local().Format(time.DateTime))
	}
}

func (s *server) logWarnings() {
	l, _ := s.current()
	for _, warning := range l.warnings() {
		s.log.Warn(warning)
	}
}

// applyToPlanes applies l, compiled to policy, to both planes, or to none. was is the current
// configuration, or nil at the start.
func (s *server) applyToPlanes(ctx context.Context, l *loadedConfig, policy *shaper.Policy, was *loadedConfig) error {
	change, err := s.plane.prepare(l, policy)
	if err != nil {
		return err
	}
	undo, err := l.installRules(was)
	if err != nil {
		change.cancel()
		return err
	}
	// The packet plane's swap may fail, and the proxy's cannot once it is prepared.
	if err := s.proxy.Apply(ctx, l.listens, policy, change.commit); err != nil {
		change.cancel()
		return errors.Join(permissionHint(err), undo())
	}
	change.finish()
	if s.isDraining() {
		return nil // its ports are closed, and stay in the descriptor store for the next daemon
	}
	if err := s.store.update(s.proxy.Ports()); err != nil {
		s.log.Warn("storing listening sockets failed; a restart will refuse connections", "err", err)
	}
	return nil
}

// drain waits until all connections have ended, at most for --drain-timeout. A second signal
// ends it at once. That is an orderly exit too: after a failure, a service manager would start
// the daemon again.
func (s *server) drain(force <-chan os.Signal) {
	notify(daemon.SdNotifyStopping)
	s.log.Info("stopping", "timeout", s.flags.drainTimeout.String())
	ctx, cancel := context.WithTimeout(context.Background(), s.flags.drainTimeout)
	defer cancel()
	go s.reportProgress(ctx)
	forced := make(chan struct{})
	go func() {
		select {
		case <-force:
			close(forced)
			cancel()
		case <-ctx.Done():
		}
	}()
	left := s.proxy.Shutdown(ctx)
	select {
	case <-forced:
		s.log.Warn("second signal: connections reset", "connections", left)
	default:
		if left > 0 {
			s.log.Warn("drain timed out: connections reset", "connections", left)
		}
	}
	s.log.Info("stopped")
}

// progressInterval is the time between two progress reports of a drain.
const progressInterval = 5 * time.Second

// reportProgress reports what a drain waits for, until ctx ends.
func (s *server) reportProgress(ctx context.Context) {
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		connections, queued := s.proxy.Remaining()
		notify(fmt.Sprintf("STATUS=Stopping: %d connections and %d bytes of datagrams left", connections, queued))
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		connections, queued = s.proxy.Remaining()
		s.log.Info("still stopping", "connections", connections, "queued_bytes", queued)
	}
}

// alive reports whether both loops answer before ctx ends: that of the proxy, and that of
// serve, which runs commands.
func (s *server) alive(ctx context.Context) bool {
	select {
	case s.commands <- func(context.Context) {}:
	case <-s.done: // the drain has its own timeout
	case <-ctx.Done():
		return false
	}
	return s.proxy.Alive(ctx)
}

// startWatchdog notifies the systemd watchdog for as long as alive returns true. It returns a
// function that stops it.
func startWatchdog(ctx context.Context, alive func(context.Context) bool) (stop func()) {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil || interval == 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(interval / 3)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
				within, cancel := context.WithTimeout(ctx, interval/3)
				if alive(within) {
					notify(daemon.SdNotifyWatchdog)
				}
				cancel()
			}
		}
	}()
	return func() { cancel(); <-done }
}

// notify sends state to the service manager, if there is one.
func notify(state string) { _, _ = daemon.SdNotify(false, state) }

func modeName(observe bool) string {
	if observe {
		return "observe"
	}
	return "enforce"
}
