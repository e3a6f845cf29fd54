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
	root         *rootFlags
	controlGiven bool // and not the usual place
}

func runCommand(e env) *cobra.Command {
	var f runFlags
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the daemon",
		Long: `Run the daemon in the foreground. SIGHUP reloads the configuration in place; when
the new one is wrong, the old one stays. SIGTERM drains: no new connections, those
that are there go on until --drain-timeout. A second SIGTERM ends the drain.`,
		Example: `  shaperd run --config shaperd.toml`,
		Args:    noArgs("; the configuration is named by --config"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.drainTimeout < 0 {
				return usageError{fmt.Errorf("--drain-timeout %v: it cannot be negative", f.drainTimeout)}
			}
			if err := f.checkState(); err != nil {
				return err
			}
			if e.reload == nil { // other verbs end with their terminal
				hangups := make(chan os.Signal, 1)
				signal.Notify(hangups, syscall.SIGHUP)
				defer signal.Stop(hangups)
				e.reload = hangups
			}
			ctx := cmd.Context()
			if e.force == nil {
				var stop func()
				ctx, e.force, stop = drainSignals(ctx)
				defer stop()
			}
			f.root = e.flags
			f.controlGiven = cmd.Flags().Changed("control") || os.Getenv("SHAPERD_CONTROL") != ""
			s := &server{flags: f, events: control.NewEvents(keptEvents)}
			var lines *logWriter
			var err error
			if s.log, s.traffic, lines, err = newLogger(e, f, s.events); err != nil {
				return err
			}
			defer lines.close()
			s.lost = lines.Lost
			return s.serve(ctx, e)
		},
	}
	cmd.Flags().StringVar(&f.config, "config", "/etc/shaperd/shaperd.toml", "configuration `file`; conf.d/*.toml beside it is read too")
	cmd.Flags().StringVar(&f.logFormat, "log-format", "text", "`format` of the log: text or json")
	cmd.Flags().StringVar(&f.logLevel, "log-level", "info", "`level` from which on there is a log: debug, info, warn or error")
	cmd.Flags().StringVar(&f.state, "state", "", "`file` to write down what buckets owe in, and beside it what operators ordered, for the next start; none if empty")
	cmd.Flags().DurationVar(&f.drainTimeout, "drain-timeout", 30*time.Second, "how long connections may go on after SIGTERM")
	return cmd
}

// drainSignals returns a context that the first SIGTERM or SIGINT ends, and a channel that
// has those after it.
func drainSignals(ctx context.Context) (_ context.Context, force <-chan os.Signal, stop func()) {
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

// keptEvents is how many lines of the log the control socket can show.
const keptEvents = 1000

// server is a running daemon.
type server struct {
	*steering
	flags   runFlags
	path    string // of the configuration, from the root
	begun   time.Time
	log     *slog.Logger
	traffic *slog.Logger // what sources bring about
	lost    func() uint64
	clock   *leaky.Clock
	shaper  *shaper.Shaper
	proxy   *conn.Proxy
	reloads *control.Reloads
	events  *control.Events
	plane   *packetPlane
	reader  *reader
	keeper  *keeper // nil without --state
	store   fdStore
	started bool
}

// serve runs until ctx ends, then drains. The end comes in the order: ports,
// connections, then the watchdog and what shows and steers, which go on during the
// drain, then what is left of the proxy.
func (s *server) serve(ctx context.Context, e env) error {
	s.begun = time.Now()
	s.path, _ = filepath.Abs(s.flags.config)
	s.reader = newReader(s.flags.config, e.loadTimeout)
	l, err := s.reader.load(ctx, nil)
	if ctx.Err() != nil {
		s.log.Info("stopped before it was ready")
		return nil
	}
	if err != nil {
		return err
	}
	s.clock, s.reloads, s.steering = leaky.NewClock(), &control.Reloads{}, newSteering()
	s.shaper = shaper.New(l.config.Daemon.Buckets)
	l = s.restoreOrders(ctx, l)
	policy, err := l.compile(s.shaper)
	if err != nil {
		return err
	}
	if s.proxy, err = conn.New(s.shaper, s.clock, s.log, s.traffic); err != nil {
		return err
	}
	if s.flags.state != "" {
		s.keeper = newKeeper(s.flags.orders(), s.log)
		defer s.keeper.close()
	}
	defer s.saveState() // when the proxy has given back its buckets
	defer s.proxy.Close()
	fds, err := inherited()
	if err != nil {
		return err
	}
	s.store.has(s.proxy.Inherit(fds))
	s.plane = &packetPlane{shaper: s.shaper, clock: s.clock, proxy: s.proxy, log: s.log}
	ctx, s.steering.drain = context.WithCancel(ctx)
	defer s.steering.drain()
	shown, err := s.show(l.config)
	if err != nil {
		return err
	}
	defer shown()
	s.restoreState(ctx, policy)
	if err := s.apply(ctx, l, policy, nil); err != nil {
		s.plane.close()
		return err
	}
	defer s.plane.close()
	s.started = true
	s.reloads.Note(time.Since(s.begun))
	s.log.Info("ready", "config", s.flags.config, "limits", policy.Len(), "listeners", len(l.listens),
		"attachments", len(l.attach), "mode", mode(l.config.Daemon.Observe), "version", version)
	s.noteOddities()
	if note := l.leftovers(); note != "" {
		s.log.Warn(note)
	}
	notify(daemon.SdNotifyReady)

	watchdog := startWatchdog(ctx, s.alive)
	defer watchdog()
	refusals := newRefusalLog(s.shaper, s.traffic)
	defer refusals.write()
	tick := time.NewTicker(refusalInterval)
	defer tick.Stop()
	over := time.NewTimer(0)
	defer over.Stop()
	await := func(next time.Time) {
		if !next.IsZero() {
			over.Reset(max(time.Until(next), 0))
		}
	}
	var reload reloading
	var drained chan struct{}
	orders := context.WithoutCancel(ctx) // they are taken until the drain has ended
	stop, hangups, wanted := ctx.Done(), e.reload, s.reloadWanted
	for {
		select {
		case <-hangups:
			reload.begin(ctx, s)
		case done := <-wanted:
			reload.waiting = append(reload.waiting, done)
			reload.begin(ctx, s)
		case r := <-reload.read:
			reload.end(ctx, s, r)
		case order := <-s.orders:
			order(orders)
			_, w := s.inForce()
			await(w.next())
		case <-over.C:
			await(s.expire(orders))
		case <-tick.C:
			refusals.write()
			s.remind()
		case <-stop:
			close(s.draining)
			reload.cancel()
			stop, hangups, wanted, drained = nil, nil, nil, make(chan struct{})
			go func() { s.drainAll(e.force); close(drained) }()
		case <-drained:
			close(s.ended)
			return nil
		}
	}
}

// show begins to show the daemon, and to have it steered. It returns what ends that.
func (s *server) show(c *config.Config) (end func(), err error) {
	monitor := control.NewMonitor(s.shaper, s.log)
	var ends []func()
	endAll := func() {
		monitor.Close() // and with it the streams
		for _, f := range slices.Backward(ends) {
			f()
		}
	}
	defer func() {
		if err != nil {
			endAll()
		}
	}()
	o := &control.Options{
		Shaper: s.shaper, Proxy: s.proxy, Packets: s.plane, Clock: s.clock.Now, Monitor: monitor,
		Reloads: s.reloads, Events: s.events, Daemon: s, Log: s.log, LogLost: s.lost, Version: version,
	}
	metrics, err := control.ServeMetrics(c.Daemon.Metrics, o)
	if err != nil {
		return nil, err
	}
	ends = append(ends, func() { metrics.Close() })
	page, err := control.ServePage(c.Daemon.Page, o)
	if err != nil {
		return nil, err
	}
	ends = append(ends, func() { page.Close() })
	if s.flags.root.control == "" {
		return endAll, nil
	}
	socket, err := control.Serve(s.flags.root.control, o)
	if err != nil && !s.flags.controlGiven && (errors.Is(err, os.ErrPermission) || errors.Is(err, os.ErrNotExist)) {
		s.log.Warn("no control socket; name one with --control", "err", err)
		return endAll, nil
	}
	if err != nil {
		return nil, err
	}
	ends = append(ends, func() { socket.Close() })
	return endAll, nil
}

// remind says again what must not be forgotten.
func (s *server) remind() {
	if _, w := s.inForce(); w.bypass != nil {
		s.traffic.Warn("BYPASS is on: no limit is enforced", "since", w.bypass.since.Local().Format(time.DateTime))
	}
}

func (s *server) noteOddities() {
	l, _ := s.inForce()
	for _, note := range l.notes() {
		s.log.Warn(note)
	}
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
	// The packet plane's swap may fail, and the proxy's cannot once it is prepared.
	if err := s.proxy.Apply(ctx, l.listens, policy, change.commit); err != nil {
		change.cancel()
		return errors.Join(explainLack(err), undo())
	}
	change.done()
	if s.drains() {
		return nil // its ports are closed, and stay in the store for the next daemon
	}
	if err := s.store.update(s.proxy.Ports()); err != nil {
		s.log.Warn("a restart will lose connections", "err", err)
	}
	return nil
}

// drainAll waits until connections have ended, and for --drain-timeout at most. A second
// signal ends it at once: that is an end as ordered too, and no failure, after which a service
// manager would start the daemon again.
func (s *server) drainAll(force <-chan os.Signal) {
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
	default:
		if left > 0 {
			s.log.Warn("drain timeout: connections are reset", "connections", left)
		}
	}
	s.log.Info("stopped")
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

// alive reports whether both loops answer until ctx ends: the proxy's, and that of serve,
// which takes orders.
func (s *server) alive(ctx context.Context) bool {
	select {
	case s.orders <- func(context.Context) {}:
	case <-s.ended: // the drain has its own timeout
	case <-ctx.Done():
		return false
	}
	return s.proxy.Alive(ctx)
}

// startWatchdog tells systemd that the daemon is alive for as long as alive says so. It
// returns what ends it.
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

// notify tells the service manager, if there is one.
func notify(state string) { _, _ = daemon.SdNotify(false, state) }

func mode(observe bool) string {
	if observe {
		return "observe"
	}
	return "enforce"
}
