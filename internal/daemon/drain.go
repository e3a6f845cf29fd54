package daemon

import (
	"context"
	"fmt"
	"os"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
)

// drain waits until all connections have ended, at most for --drain-timeout. A second signal
// ends it at once. That is an orderly exit too: after a failure, a service manager would start
// the daemon again.
func (s *server) drain(force <-chan os.Signal) {
	notify(sd.SdNotifyStopping)
	s.log.Info("stopping", "timeout", s.options.DrainTimeout.String())
	ctx, cancel := context.WithTimeout(context.Background(), s.options.DrainTimeout)
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
