package daemon

import (
	"context"
	"sync/atomic"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
)

// pulseInterval is the time between two beats of a daemon without a watchdog, or with a slow one.
const pulseInterval = time.Second

// pulse knows when the loops of a daemon have answered last. While they answer, it notifies the
// watchdog of systemd.
type pulse struct {
	last atomic.Pointer[time.Time] // nil before the start and after the end
}

// silence returns for how long the loops have not answered.
func (p *pulse) silence() time.Duration {
	if last := p.last.Load(); last != nil {
		return time.Since(*last)
	}
	return 0
}

// Silence implements [control.Daemon].
func (s *server) Silence() time.Duration { return s.pulse.silence() }

// start calls alive at each beat until the function that it returns is called.
func (p *pulse) start(ctx context.Context, alive func(context.Context) bool) (stop func()) {
	interval := pulseInterval
	notifyEvery := time.Duration(0)
	if watchdog, err := sd.SdWatchdogEnabled(false); err == nil && watchdog > 0 {
		notifyEvery = watchdog / 3
		interval = min(interval, notifyEvery)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	p.beat()
	go func() {
		defer close(done)
		tick := time.NewTicker(interval)
		defer tick.Stop()
		notified := time.Now()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if !alive(ctx) {
				continue
			}
			p.beat()
			if notifyEvery > 0 && time.Since(notified) >= notifyEvery-interval/2 {
				notified = time.Now()
				notify(sd.SdNotifyWatchdog)
			}
		}
	}()
	return func() { cancel(); <-done; p.last.Store(nil) }
}

func (p *pulse) beat() {
	now := time.Now()
	p.last.Store(&now)
}
