package daemon

import (
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"shaperd.dev/shaperd/conn"
	"shaperd.dev/shaperd/leaky/pacer"
	"shaperd.dev/shaperd/shaper"
)

// TestWatchdog_CoversControlLoop checks that notifications stop when the control loop hangs.
func TestWatchdog_CoversControlLoop(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	notified, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer notified.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "60000")
	t.Setenv("WATCHDOG_PID", "")
	s := &server{controller: newController()}
	noLog := slog.New(slog.DiscardHandler)
	if s.proxy, err = conn.New(conn.Options{Shaper: shaper.New(1 << 10), Clock: pacer.NewClock(), Log: noLog, TrafficLog: noLog}); err != nil {
		t.Fatal(err)
	}
	defer s.proxy.Close()
	stop := startWatchdog(t.Context(), s.alive)
	defer stop()

	notifiedWithin := func(within time.Duration) bool {
		notified.SetReadDeadline(time.Now().Add(within))
		n, err := notified.Read(make([]byte, 100))
		return err == nil && n > 0
	}
	if notifiedWithin(200 * time.Millisecond) {
		t.Error("a notification while the control loop hangs")
	}
	take := make(chan struct{})
	var taking sync.WaitGroup
	taking.Go(func() {
		for {
			select {
			case command := <-s.commands:
				command(t.Context())
			case <-take:
				return
			}
		}
	})
	if !notifiedWithin(20 * time.Second) {
		t.Error("no notification while both loops answer")
	}
	close(take)
	taking.Wait()
	close(s.done)
	if !notifiedWithin(20 * time.Second) {
		t.Error("no notification during a drain")
	}
}
