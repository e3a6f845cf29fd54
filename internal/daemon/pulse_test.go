package daemon

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
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
	defer s.pulse.start(t.Context(), s.alive)()

	notifiedWithin := func(within time.Duration) bool {
		notified.SetReadDeadline(time.Now().Add(within))
		n, err := notified.Read(make([]byte, 100))
		return err == nil && n > 0
	}
	if notifiedWithin(200 * time.Millisecond) {
		t.Error("a notification while the control loop hangs")
	}
	if silence := s.Silence(); silence < 200*time.Millisecond {
		t.Errorf("the control loop hangs, and the daemon is silent for %v", silence)
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
	if silence := s.Silence(); silence > 10*time.Second {
		t.Errorf("both loops answer, and the daemon is silent for %v", silence)
	}
	close(take)
	taking.Wait()
	close(s.done)
	if !notifiedWithin(20 * time.Second) {
		t.Error("no notification during a drain")
	}
}

// TestPulse_Interval checks that a daemon without a watchdog has a pulse, that silence lasts until
// the loops answer, and that an end of the pulse is no silence.
func TestPulse_Interval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		t.Setenv("WATCHDOG_USEC", "")
		var p pulse
		answers, hangs := make(chan struct{}), make(chan struct{})
		close(answers)
		var loop atomic.Pointer[chan struct{}]
		loop.Store(&answers)
		var beats atomic.Int64
		alive := func(ctx context.Context) bool {
			beats.Add(1)
			select {
			case <-*loop.Load():
			case <-ctx.Done():
				return false
			}
			return true
		}
		stop := p.start(t.Context(), alive)
		time.Sleep(10*time.Second + time.Millisecond)
		if n := beats.Load(); n != 10 || p.silence() != time.Millisecond {
			t.Errorf("%d beats in 10 s, silent for %v", n, p.silence())
		}
		loop.Store(&hangs)
		time.Sleep(time.Minute)
		if p.silence() != time.Minute+time.Millisecond {
			t.Errorf("silent for %v after a minute", p.silence())
		}
		close(hangs)
		synctest.Wait()
		if p.silence() != 0 {
			t.Errorf("silent for %v after an answer", p.silence())
		}
		stop()
		time.Sleep(time.Minute)
		if p.silence() != 0 {
			t.Error("silent after the end")
		}
	})
}
