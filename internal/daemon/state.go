package daemon

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

	"shaperd.dev/shaperd/internal/safefile"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// maxBacklogs bounds the buckets that a stopping daemon saves. The others have nearly drained.
const maxBacklogs = 100_000

// savedState is the backlog of all buckets when the daemon stops. Its time is that of the
// monotonic clock, which cannot be set, and which is valid for one boot.
type savedState struct {
	Boot     string
	At       time.Duration
	Backlogs []shaper.Backlog
	Debts    []shaper.Backlog `json:",omitempty"` // Backlogs, as an earlier version named it
}

func bootID() string {
	text, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text))
}

// monotonic returns the time since boot, without suspend.
func monotonic() time.Duration {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}

// checkState returns an error when the state file could not be written, before there is state to
// lose.
func (o *Options) checkState() error {
	if o.State == "" {
		return nil
	}
	if err := unix.Access(filepath.Dir(o.State), unix.W_OK|unix.X_OK); err != nil {
		return fmt.Errorf("--state %s: directory is not writable: %w", o.State, err)
	}
	return nil
}

// lockState keeps other daemons from using the state file, and those next to it, until unlock is called or the process has ended.
// Where the file system does not permit it, nothing is locked.
func (o *Options) lockState() (unlock func(), err error) {
	if o.State == "" {
		return func() {}, nil
	}
	f, err := os.OpenFile(o.State+".lock", os.O_RDONLY|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return func() {}, nil
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		f.Close()
		return nil, fmt.Errorf("--state %s: another daemon uses this file: each needs its own", o.State)
	}
	return func() {
		_ = unix.Flock(int(f.Fd()), unix.LOCK_UN) // a process that is being forked has the file, too
		f.Close()
	}, nil
}

// saveState saves the backlog of buckets. A daemon that never was ready leaves the file of an
// earlier one.
func (s *server) saveState() {
	select {
	case <-s.ready:
	default:
		return
	}
	if s.options.State == "" {
		return
	}
	state := savedState{Boot: bootID(), At: monotonic(), Backlogs: s.shaper.Backlogs(maxBacklogs, s.clock.Now())}
	ctx, cancel := context.WithTimeout(context.Background(), saveTimeout)
	defer cancel()
	if _, err := runAsync(ctx, func() (struct{}, error) { return struct{}{}, writeJSON(s.options.State, state) }); err != nil {
		s.log.Warn("saving bucket state failed", "err", err)
	}
}

func writeJSON(path string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return writeStateFile(path, text)
}

func writeStateFile(path string, text []byte) error {
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer folder.Close()
	_ = os.Remove(path + ".next") // of a daemon that was killed
	return safefile.Write(folder, filepath.Base(path), text, safefile.Ownership{Mode: 0o600, UID: -1, GID: -1}, nil)
}

// maxStateFile bounds the state files that a start reads.
const maxStateFile = 256 << 20 // bytes

// readStateFile reads a file within loadTimeout and parses it. It returns nil when there is no
// such file.
func readStateFile(ctx context.Context, path string, parse func(text []byte) error) error {
	ctx, cancel := context.WithTimeout(ctx, loadTimeout)
	defer cancel()
	text, err := runAsync(ctx, func() ([]byte, error) { return safefile.ReadRegular(path, maxStateFile) })
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

// restoreState restores the backlog that buckets had when the last daemon stopped, before any
// traffic is admitted under policy. A file that cannot be read, or is of an earlier boot, does
// not prevent a start. The file is kept for the next start, in case this one fails: backlog
// only shrinks with time.
func (s *server) restoreState(ctx context.Context, policy *shaper.Policy) {
	if s.options.State == "" {
		return
	}
	var state savedState
	if err := readStateFile(ctx, s.options.State, func(text []byte) error { return json.Unmarshal(text, &state) }); err != nil {
		s.log.Warn("bucket state not restored", "err", err)
		return
	}
	ago := monotonic() - state.At
	if state.Boot != bootID() || ago < 0 {
		return
	}
	backlogs := append(state.Backlogs, state.Debts...)
	s.shaper.Restore(policy, backlogs, leaky.FromDuration(ago), s.clock.Now())
	s.log.Info("bucket state restored", "buckets", len(backlogs), "age", ago.Round(time.Millisecond).String())
}
