// Package daemon runs shaperd: it applies a configuration to both planes, reloads it, keeps what
// operators override, and ends in order. All changes run one after the other in the loop of
// serve, which is the goroutine of [Run]. The control socket's goroutines send it commands, and read
// what is current under a lock. Files are read and written in goroutines of their own, since a file
// system may not answer.
package daemon

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"

	"shaperd.dev/shaperd/cluster/member"
	"shaperd.dev/shaperd/conn"
	"shaperd.dev/shaperd/control/monitor"
	"shaperd.dev/shaperd/internal/logging"
	"shaperd.dev/shaperd/internal/plan"
	"shaperd.dev/shaperd/internal/quotafile"
	"shaperd.dev/shaperd/internal/shedding"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/config"
)

// Options are the settings of a daemon that its configuration does not have.
type Options struct {
	// Config is the path of the configuration.
	Config string
	// State is the path of the file that has the state of buckets while no daemon runs. Overrides
	// are in a file next to it. "" saves neither.
	State string
	// Control is the path of the control socket. "" means none.
	Control string
	// ControlRequired makes a control socket that cannot be created an error.
	ControlRequired bool
	// DrainTimeout is how long open connections may go on after the daemon was told to stop.
	DrainTimeout time.Duration
	// LoadTimeout bounds the reading of the configuration. 0 means the default.
	LoadTimeout time.Duration

	Log      io.Writer // receives the log
	LogLevel slog.Level
	LogJSON  bool
	Version  string // of this program

	Now    func() time.Time // the clock of schedules; nil is [time.Now]
	Reload <-chan os.Signal // triggers a reload; nil means SIGHUP
	Force  <-chan os.Signal // ends a drain at once; nil means a second SIGTERM or SIGINT
}

// Run runs a daemon until ctx ends or, without [Options.Force], the first SIGTERM or SIGINT, and
// then until its connections have ended.
func Run(ctx context.Context, o Options) error {
	if err := o.checkState(); err != nil {
		return err
	}
	unlock, err := o.lockState()
	if err != nil {
		return err
	}
	defer unlock()
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Reload == nil {
		hangups := make(chan os.Signal, 1)
		signal.Notify(hangups, syscall.SIGHUP)
		defer signal.Stop(hangups)
		o.Reload = hangups
	}
	if o.Force == nil {
		var stop func()
		ctx, o.Force, stop = stopSignals(ctx)
		defer stop()
	}
	s := &server{options: o, events: monitor.NewEvents(maxEvents)}
	var records *logging.Writer
	s.log, s.traffic, records = logging.New(o.Log, o.LogLevel, o.LogJSON, s.events.Handler)
	defer records.Close()
	s.droppedRecords = records.Dropped
	return s.serve(ctx)
}

// maxEvents is the number of log records that the control socket can show.
const maxEvents = 1000

// server is a running daemon.
type server struct {
	*controller
	options        Options
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
	group          *group
	reader         *configReader
	sources        sourceWatch
	revisions      revisions
	reload         reloader        // owner: the loop of serve
	quotas         *quotafile.File // nil until a limit has a quota
	saver          *saver          // nil without a state file
	penalties      penalties
	migrated       bool // restored overrides had keys of an earlier version
	store          fdStore
	pulse          pulse
	ready          chan struct{} // closed when the configuration has been applied
}

// serve runs until ctx ends, then drains. It closes ports first, then connections, then the
// watchdog, the API and the metrics, which stay up during the drain, and last the rest of the
// proxy.
func (s *server) serve(ctx context.Context) error {
	s.startedAt, s.ready = time.Now(), make(chan struct{})
	s.path, _ = filepath.Abs(s.options.Config)
	s.revisions.folder, s.revisions.log = s.options.revisionsPath(), s.log
	defer s.revisions.close()
	s.reader = newConfigReader(s.options.Config, s.options.LoadTimeout)
	l, err := s.reader.load(ctx, nil)
	if err == nil {
		l, err = l.At(s.options.Now())
	}
	if ctx.Err() != nil {
		s.log.Info("stopped before ready")
		return nil
	}
	if err != nil {
		return err
	}
	s.clock, s.reloads, s.controller = pacer.NewClockAt(monotonic()), &monitor.Reloads{}, newController()
	s.shaper = shaper.New(l.Config.Daemon.MaxBuckets)
	l = s.restoreOverrides(ctx, l)
	policy, err := l.Compile(s.shaper)
	if err != nil {
		return err
	}
	s.group = s.newGroup()
	if s.proxy, err = conn.New(conn.Options{Shaper: s.shaper, Clock: s.clock, Log: s.log, TrafficLog: s.traffic, OnShort: s.group.short, Loops: loops(l.Config)}); err != nil {
		return err
	}
	if s.options.State != "" {
		s.saver = newSaver("overrides", s.options.overridesPath(), s.log)
		defer s.saver.close()
		s.penalties.saver = newSaver("penalties", s.options.penaltiesPath(), s.log)
		defer s.penalties.saver.close()
	}
	defer s.saveState() // after the proxy has released its buckets
	defer s.closeQuotas()
	defer s.proxy.Close()
	fds, err := inheritedFDs()
	if err != nil {
		return err
	}
	s.store.markStored(s.proxy.Inherit(fds))
	s.plane = &packetPlane{shaper: s.shaper, clock: s.clock, proxy: s.proxy, log: s.log}
	s.group.planes, s.group.slotsInUse, s.group.proxy = []member.Plane{s.proxy, &s.plane.shares}, s.proxy.SharesSlots, s.proxy
	ctx, s.controller.stop = context.WithCancel(ctx)
	defer s.controller.stop()
	closeControl, err := s.serveControl(l.Config)
	if err != nil {
		return err
	}
	defer closeControl()
	s.restoreState(ctx, policy)
	s.restorePenalties(ctx)
	if err := s.applyToPlanes(ctx, l, policy, nil); err != nil {
		s.plane.close()
		return err
	}
	defer s.plane.close()
	defer s.group.stop()
	close(s.ready)
	s.reloads.Record(time.Since(s.startedAt))
	s.log.Info("ready", "config", s.options.Config, "revision", l.Revision(), "limits", policy.Len(), "listeners", len(l.Config.Listen),
		"attachments", len(l.Config.Attach), "mode", shaper.Mode(l.Config.Daemon.Observe).String(), "version", s.options.Version)
	s.logWarnings()
	s.revisions.keep(l)
	if s.migrated {
		s.saveOverrides()
	}
	if warning := leftoverRules(l); warning != "" {
		s.log.Warn(warning)
	}
	notify(sd.SdNotifyReady)
	go shedding.Run(ctx, s.shaper, s.proxy, s.log)
	go s.watchSources(ctx)

	defer s.pulse.start(ctx, s.alive)()
	refusals := newRefusalLog(s.shaper, s.traffic)
	defer refusals.write()
	tick := time.NewTicker(refusalInterval)
	defer tick.Stop()
	problems, look := newSharedLog(s.log), time.NewTicker(sharedLogInterval)
	defer look.Stop()
	expiry := time.NewTimer(0)
	defer expiry.Stop()
	await := func(next time.Time) {
		if !next.IsZero() {
			expiry.Reset(max(time.Until(next), 0))
		}
	}
	var nextSchedules time.Time // attempt
	var drained chan struct{}
	commandCtx := context.WithoutCancel(ctx) // commands run until the drain has ended
	run := func(command func(context.Context)) {
		command(commandCtx)
		_, w := s.current()
		await(w.nextExpiry())
	}
	stop, hangups, requests := ctx.Done(), s.options.Reload, s.reloadRequests
	for {
		select {
		case command := <-s.urgent:
			run(command)
			continue
		default:
		}
		select {
		case command := <-s.urgent:
			run(command)
		case <-hangups:
			s.reload.begin(ctx, s)
		case done := <-requests:
			s.reload.waiting = append(s.reload.waiting, done)
			s.reload.begin(ctx, s)
		case r := <-s.reload.read:
			s.reload.end(ctx, s, r)
		case command := <-s.commands:
			run(command)
		case <-expiry.C:
			await(s.expireOverrides(commandCtx))
		case <-tick.C:
			refusals.write()
			s.logBypass()
		case <-look.C:
			all, joined := s.sharedProblems()
			problems.update(all, joined, time.Now())
			nextSchedules = s.followSchedules(commandCtx, nextSchedules)
			s.savePenalties()
		case <-stop:
			close(s.draining)
			s.reload.cancel()
			stop, hangups, requests, drained = nil, nil, nil, make(chan struct{})
			go func() { s.drain(s.options.Force); close(drained) }()
		case <-drained:
			s.proxy.EndAll() // or this host would still use slots of shared limits
			if !s.group.keep {
				s.plane.close() // and rates, while packets are queued
			}
			s.savePenalties()
			s.group.leave(commandCtx)
			close(s.done)
			return nil
		}
	}
}

// loops returns how many threads may move bytes.
func loops(c *config.Config) int {
	return cmp.Or(c.Daemon.Loops, max(1, runtime.GOMAXPROCS(0)-1)) // main has added one, see package pacer
}

// applyToPlanes applies l, compiled to policy, to both planes, or to none. was is the current
// configuration, or nil at the start.
func (s *server) applyToPlanes(ctx context.Context, l *plan.Plan, policy *shaper.Policy, was *plan.Plan) error {
	if err := s.openQuotas(ctx, policy); err != nil {
		return err
	}
	if err := s.group.prepare(l.Config); err != nil {
		return err
	}
	change, err := s.plane.prepare(l, policy)
	if err != nil {
		s.group.cancel()
		return err
	}
	undo, err := installRules(l, was)
	if err != nil {
		s.group.cancel()
		change.cancel()
		return err
	}
	// The packet plane's swap may fail, and the proxy's cannot once it is prepared.
	if err := s.proxy.Apply(ctx, l.Config.Listen, policy, change.commit); err != nil {
		s.group.cancel()
		change.cancel()
		return errors.Join(PermissionHint(err), undo())
	}
	change.finish()
	s.group.follow(ctx, l.Config)
	if s.Stopping() {
		return nil // its ports are closed, and stay in the descriptor store for the next daemon
	}
	if err := s.store.update(s.proxy.Ports()); err != nil {
		s.log.Warn("storing listening sockets failed; a restart will refuse connections", "err", err)
	}
	return nil
}

// logBypass logs that a bypass is still on.
func (s *server) logBypass() {
	if _, w := s.current(); w.bypass != nil {
		s.traffic.Warn("BYPASS is on: no limit is enforced", "since", w.bypass.since.Local().Format(time.DateTime))
	}
}

func (s *server) logWarnings() {
	l, _ := s.current()
	for _, warning := range l.Warnings() {
		s.log.Warn(warning)
	}
}
