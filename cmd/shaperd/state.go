package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// maxDebts bounds what a stopping daemon writes down: the rest is nearly drained.
const maxDebts = 100_000

// savedState is what buckets owe when the daemon stops. Its time is the monotonic clock's,
// which nobody sets, and which belongs to one boot.
type savedState struct {
	Boot  string
	At    time.Duration
	Debts []shaper.Debt
}

func bootID() string {
	text, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text))
}

// monotonic is the time since boot, without sleep.
func monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}

// saveState writes down what buckets owe. The file appears whole or not at all, and a
// daemon that did not come so far leaves that of an earlier one.
func (s *server) saveState() {
	if s.flags.state == "" || !s.started {
		return
	}
	state := savedState{bootID(), monotonic(), s.shaper.Debts(maxDebts, s.clock.Now())}
	text, err := json.Marshal(state)
	if err == nil {
		next := s.flags.state + ".next"
		if err = os.WriteFile(next, text, 0o600); err == nil {
			err = os.Rename(next, s.flags.state)
		}
	}
	if err != nil {
		s.log.Warn("what buckets owe is forgotten", "err", err)
	}
}

// restoreState has buckets owe what they owed when the last daemon stopped, before
// anything is let in under policy. A file that cannot be read, or is of an earlier boot,
// is no reason not to start.
func (s *server) restoreState(policy *shaper.Policy) {
	if s.flags.state == "" {
		return
	}
	text, err := os.ReadFile(s.flags.state)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var state savedState
	if err == nil {
		if err = json.Unmarshal(text, &state); err != nil {
			err = fmt.Errorf("read %s: %w", s.flags.state, err)
		}
	}
	if err != nil {
		s.log.Warn("what buckets owe is forgotten", "err", err)
		return
	}
	ago := monotonic() - state.At
	if state.Boot != bootID() || ago < 0 {
		return
	}
	s.shaper.Restore(policy, state.Debts, leaky.FromDuration(ago), s.clock.Now())
	s.log.Info("buckets go on where they ended", "debts", len(state.Debts), "ago", ago.Round(time.Millisecond).String())
	if err := os.Remove(s.flags.state); err != nil {
		s.log.Warn("remove saved state", "err", err)
	}
}
