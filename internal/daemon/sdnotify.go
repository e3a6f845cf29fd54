package daemon

import (
	"context"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
)

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
	interval, err := sd.SdWatchdogEnabled(false)
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
					notify(sd.SdNotifyWatchdog)
				}
				cancel()
			}
		}
	}()
	return func() { cancel(); <-done }
}

// notify sends state to the service manager, if there is one.
func notify(state string) { _, _ = sd.SdNotify(false, state) }
