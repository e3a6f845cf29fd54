package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"shaperd/conn"
	"shaperd/control"
	"shaperd/leaky"
	"shaperd/shaper"
	"shaperd/shaper/config"
)

type runFlags struct {
	config       string
	logFormat    string
	logLevel     string
	state        string
	drainTimeout time.Duration
}

func runCommand(e env) *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the daemon",
		Long: `Run the daemon in the foreground. SIGHUP reloads the configuration in place; when
the new one is wrong, the old one stays. SIGTERM drains: no new connections, those
that are there go on until --drain-timeout. A second SIGTERM ends the drain.`,
		Args: noArgs("; the configuration is named by --config"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.drainTimeout < 0 {
				return usageError{fmt.Errorf("--drain-timeout %v: it cannot be negative", f.drainTimeout)}
			}
			log, lines, err := newLogger(e, f, control.NewEvents(keptEvents))
			if err != nil {
				return err
			}
			defer lines.close()
			return serve(cmd.Context(), e, f, log)
		},
	}
	cmd.Flags().StringVar(&f.config, "config", "/etc/shaperd/shaperd.toml", "configuration `file`; conf.d/*.toml beside it is read too")
	cmd.Flags().StringVar(&f.logFormat, "log-format", "text", "text or json")
	cmd.Flags().StringVar(&f.logLevel, "log-level", "info", "debug, info, warn or error")
	cmd.Flags().StringVar(&f.state, "state", "", "`file` to write down what buckets owe in, for the next start; none if empty")
	cmd.Flags().DurationVar(&f.drainTimeout, "drain-timeout", 30*time.Second, "how long connections may go on after SIGTERM")
	return cmd
}

// keptEvents is how many lines of the log the control socket can show.
const keptEvents = 1000

// server is a running daemon.
type server struct {
	flags   runFlags
	log     *slog.Logger
	clock   *leaky.Clock
	shaper  *shaper.Shaper
	proxy   *conn.Proxy
	reloads *control.Reloads
	plane   *packetPlane
	loaded  *loaded
	store   fdStore
	started bool
}

// serve runs until ctx ends, then drains. The end comes in the order: ports,
// connections, then the watchdog and the metrics endpoint, which go on during the
// drain, then what is left of the proxy.
func serve(ctx context.Context, e env, f runFlags, log *slog.Logger) error {
	start := time.Now()
	l, err := load(f.config)
	if err != nil {
		return err
	}
	s := &server{flags: f, log: log, clock: leaky.NewClock(), loaded: l, reloads: &control.Reloads{}}
	s.shaper = shaper.New(l.config.Daemon.Buckets)
	policy, err := l.compile(s.shaper)
	if err != nil {
		return err
	}
	if s.proxy, err = conn.New(s.shaper, s.clock, log, log); err != nil {
		return err
	}
	defer s.saveState() // when the proxy has given back its buckets
	defer s.proxy.Close()
	fds, err := inherited()
	if err != nil {
		return err
	}
	s.store.has(s.proxy.Inherit(fds))
	s.plane = &packetPlane{shaper: s.shaper, proxy: s.proxy, log: log}
	metrics, err := control.ServeMetrics(l.config.Daemon.Metrics, s.shaper, s.proxy, s.plane, s.reloads)
	if err != nil {
		return err
	}
	defer metrics.Close()
	s.restoreState(policy)
	if err := s.apply(ctx, l, policy, nil); err != nil {
		s.plane.close()
		return err
	}
	defer s.plane.close()
	s.started = true
	s.reloads.Note(nil, time.Since(start))
	log.Info("ready", "config", f.config, "limits", policy.Len(), "listeners", len(l.listens),
		"attachments", len(l.attach), "mode", mode(l.config.Daemon.Observe), "version", version)
	s.noteOddities()
	if note := l.leftovers(); note != "" {
		log.Warn(note)
	}
	notify(daemon.SdNotifyReady)

	watchdog := startWatchdog(ctx, s.proxy)
	defer watchdog()
	refusals := newRefusalLog(s.shaper, log)
	defer refusals.write()
	tick := time.NewTicker(refusalInterval)
	defer tick.Stop()
	for {
		select {
		case <-e.reload:
			s.reload(ctx)
		case <-tick.C:
			refusals.write()
		case <-ctx.Done():
			return s.drain(e.force)
		}
	}
}

// reload puts the configuration file in force as it is now. On an error
// everything stays as it was.
func (s *server) reload(ctx context.Context) {
	notify(daemon.SdNotifyReloading + "\n" + daemon.SdNotifyMonotonicUsec())
	defer notify(daemon.SdNotifyReady)
	start := time.Now()
	err := s.tryReload(ctx)
	took := time.Since(start)
	s.reloads.Note(err, took)
	if err != nil {
		var mistakes config.Errors
		if !errors.As(err, &mistakes) {
			s.log.Error("reload", "err", err)
		}
		for _, m := range mistakes {
			s.log.Error("reload", "err", m)
		}
		s.log.Error("the old configuration stays in force")
		return
	}
	s.log.Info("reloaded", "limits", s.shaper.Policy().Len(), "listeners", len(s.loaded.listens),
		"attachments", len(s.loaded.attach), "mode", mode(s.loaded.config.Daemon.Observe), "took", took.String())
	s.noteOddities()
}

func (s *server) noteOddities() {
	for _, note := range s.loaded.notes() {
		s.log.Warn(note)
	}
}

func (s *server) tryReload(ctx context.Context) error {
	l, err := load(s.flags.config)
	if err != nil {
		return err
	}
	policy, err := l.compile(s.shaper)
	if err != nil {
		return err
	}
	was, is := s.loaded.config.Daemon, l.config.Daemon
	if was.Buckets != is.Buckets {
		return fmt.Errorf("[daemon] buckets: %d became %d, which takes a restart", was.Buckets, is.Buckets)
	}
	if was.Metrics != is.Metrics {
		return fmt.Errorf("[daemon] metrics: %q became %q, which takes a restart", was.Metrics, is.Metrics)
	}
	if was.Pins != is.Pins {
		return fmt.Errorf("[daemon] pins: %q became %q, which takes a restart", was.Pins, is.Pins)
	}
	if err := s.apply(ctx, l, policy, s.loaded); err != nil {
		return err
	}
	s.loaded = l
	return nil
}

// apply puts l, compiled to policy, in force in both planes, or in none. was is what is
// in force, or nil.
func (s *server) apply(ctx context.Context, l *loaded, policy *shaper.Policy, was *loaded) error {
	change, err := s.plane.prepare(l, policy)
	if err != nil {
		return err
	}
	undo, err := l.divert(was)
	if err != nil {
		change.cancel()
		return err
	}
	if err := s.proxy.Apply(ctx, l.listens, policy); err != nil {
		change.cancel()
		return errors.Join(explainLack(err), undo())
	}
	if err := s.store.update(s.proxy.Ports()); err != nil {
		s.log.Warn("a restart will lose connections", "err", err)
	}
	return change.commit()
}

// errForced says that connections were cut for the asking.
var errForced = errors.New("a second signal ended the drain: connections were reset")

func (s *server) drain(force <-chan os.Signal) error {
	notify(daemon.SdNotifyStopping)
	s.log.Info("draining", "timeout", s.flags.drainTimeout.String())
	ctx, cancel := context.WithTimeout(context.Background(), s.flags.drainTimeout)
	defer cancel()
	go s.showProgress(ctx)
	forced := make(chan struct{})
	go func() {
		select {
		case <-force:
			close(forced)
			cancel()
		case <-ctx.Done():
		}
	}()
	left := s.proxy.Drain(ctx)
	select {
	case <-forced:
		s.log.Warn("second signal: connections are reset", "connections", left)
		return errForced
	default:
	}
	if left > 0 {
		s.log.Warn("drain timeout: connections are reset", "connections", left)
	}
	s.log.Info("stopped")
	return nil
}

// progressInterval is how often a drain says how far it has come.
const progressInterval = 5 * time.Second

// showProgress says what a drain waits for, until ctx ends.
func (s *server) showProgress(ctx context.Context) {
	tick := time.NewTicker(progressInterval)
	defer tick.Stop()
	for {
		connections, queued := s.proxy.Remaining()
		notify(fmt.Sprintf("STATUS=Draining: %d connections and %d bytes of datagrams are left", connections, queued))
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		connections, queued = s.proxy.Remaining()
		s.log.Info("still draining", "connections", connections, "queued_bytes", queued)
	}
}

// startWatchdog tells systemd that the daemon is alive for as long as its loop
// answers. It returns what ends it.
func startWatchdog(ctx context.Context, p *conn.Proxy) (stop func()) {
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
				alive, cancel := context.WithTimeout(ctx, interval/3)
				if p.Alive(alive) {
					notify(daemon.SdNotifyWatchdog)
				}
				cancel()
			}
		}
	}()
	return func() { cancel(); <-done }
}

// notify tells the service manager, if there is one.
func notify(state string) { _, _ = daemon.SdNotify(false, state) }

func mode(observe bool) string {
	if observe {
		return "observe"
	}
	return "enforce"
}
