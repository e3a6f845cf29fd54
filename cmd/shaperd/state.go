package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
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

// checkState finds where no state could be written, before the first one that counts.
func (f *runFlags) checkState() error {
	if f.state == "" {
		return nil
	}
	if err := unix.Access(filepath.Dir(f.state), unix.W_OK|unix.X_OK); err != nil {
		return fmt.Errorf("--state %s: write to its folder: %w", f.state, err)
	}
	return nil
}

// saveState writes down what buckets owe. A daemon that did not come so far leaves that of
// an earlier one.
func (s *server) saveState() {
	if s.flags.state == "" || !s.started {
		return
	}
	state := savedState{bootID(), monotonic(), s.shaper.Debts(maxDebts, s.clock.Now())}
	ctx, cancel := context.WithTimeout(context.Background(), keepTimeout)
	defer cancel()
	if _, err := aside(ctx, func() (struct{}, error) { return struct{}{}, save(s.flags.state, state) }); err != nil {
		s.log.Warn("what buckets owe is forgotten", "err", err)
	}
}

func save(path string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return saveText(path, text)
}

func saveText(path string, text []byte) error {
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer folder.Close()
	_ = os.Remove(path + ".next") // of a daemon that was killed
	return writeWhole(folder, filepath.Base(path), text, owned{0o600, -1, -1}, nil)
}

// mostKept bounds the files that a start reads.
const mostKept = 256 << 20 // bytes

// restore reads a file, within loadTimeout, and has parse take it. Without one there is nothing
// to take.
func restore(ctx context.Context, path string, parse func(text []byte) error) error {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	text, err := aside(ctx, func() ([]byte, error) { return readRegular(path, mostKept) })
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = parse(text)
	}
	if err != nil {
		err = fmt.Errorf("read %s: %w", path, err)
	}
	return err
}

// restoreState has buckets owe what they owed when the last daemon stopped, before
// anything is let in under policy. A file that cannot be read, or is of an earlier boot,
// is no reason not to start. The file stays, for the next start if this one fails: debts
// only shrink with time.
func (s *server) restoreState(ctx context.Context, policy *shaper.Policy) {
	if s.flags.state == "" {
		return
	}
	var state savedState
	if err := restore(ctx, s.flags.state, func(text []byte) error { return json.Unmarshal(text, &state) }); err != nil {
		s.log.Warn("what buckets owe is forgotten", "err", err)
		return
	}
	ago := monotonic() - state.At
	if state.Boot != bootID() || ago < 0 {
		return
	}
	s.shaper.Restore(policy, state.Debts, leaky.FromDuration(ago), s.clock.Now())
	s.log.Info("buckets go on where they ended", "debts", len(state.Debts), "ago", ago.Round(time.Millisecond).String())
}
