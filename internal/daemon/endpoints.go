package daemon

import (
	"errors"
	"os"
	"slices"

	"shaperd.dev/shaperd/control"
	"shaperd.dev/shaperd/control/monitor"
	"shaperd.dev/shaperd/shaper/config"
)

// serveControl starts the control socket, the metrics and the dashboard. It returns a function that
// stops them.
func (s *server) serveControl(c *config.Config) (closeAll func(), err error) {
	monitor := monitor.New(s.shaper, s.proxy.Downstreams, s.log)
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
		Reloads: s.reloads, Events: s.events, Daemon: s, Log: s.log, LogDropped: s.droppedRecords, Version: s.options.Version,
		Ready: s.ready,
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
	if s.options.Control == "" {
		return stop, nil
	}
	socket, err := control.Serve(s.options.Control, o)
	if err != nil && !s.options.ControlRequired && (errors.Is(err, os.ErrPermission) || errors.Is(err, os.ErrNotExist)) {
		s.log.Warn("no control socket; use --control to name one", "err", err)
		return stop, nil
	}
	if err != nil {
		return nil, err
	}
	closers = append(closers, func() { socket.Close() })
	return stop, nil
}
