package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// abi is the version of the map layout. Maps of another version are not used.
const abi = 10

// pinDir returns the directory of maps for the given number of keys. Maps of another size are
// other maps.
func pinDir(pins string, keys int) string {
	return filepath.Join(pins, fmt.Sprintf("v%d-%d", abi, keys))
}

// makePinDir creates a directory on a bpf file system.
func makePinDir(dir string) error {
	parent := dir
	var fs unix.Statfs_t
	for unix.Statfs(parent, &fs) != nil && parent != "/" {
		parent = filepath.Dir(parent)
	}
	if uint32(fs.Type) != unix.BPF_FS_MAGIC {
		return fmt.Errorf("%s is not on a bpf file system: run \"mount -t bpf bpf /sys/fs/bpf\", or name a directory on one", dir)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return explainPermission(err)
	}
	return nil
}

// Pinned reports whether maps of shaperd are pinned in the directory pins.
func Pinned(pins string) bool {
	found, _ := filepath.Glob(filepath.Join(pins, "v*", kernelMapHeartbeats))
	return len(found) > 0
}

// lockPins creates the directory pins and locks it until the file is closed or this process ends:
// two daemons would take each other's attachments for those of an earlier one.
func lockPins(pins string) (f *os.File, err error) {
	for range 10 { // a daemon that has just ended may remove it
		if err = makePinDir(pins); err == nil {
			f, err = lockDir(pins)
		}
		if !errors.Is(err, os.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("[daemon] pin_path: %w", err)
	}
	return f, nil
}

// lockTimeout is how long lockDir waits for a process in Alive, which locks the directory briefly.
const lockTimeout = 200 * time.Millisecond

// lockDir opens and locks a pin directory.
func lockDir(pins string) (*os.File, error) {
	for end := time.Now().Add(lockTimeout); ; time.Sleep(lockTimeout / 20) {
		f, err := os.Open(pins)
		if err != nil {
			return nil, explainPermission(err)
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil && sameFile(f, pins) {
			return f, nil
		}
		f.Close()
		if err != nil && (!errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end)) {
			return nil, fmt.Errorf(`%s: in use by another daemon or "shaperd detach": stop that, or name another directory (%w)`, pins, err)
		}
	}
}

// sameFile reports whether path still names f: the previous owner of the lock may have removed it.
func sameFile(f *os.File, path string) bool {
	is, err := f.Stat()
	at, err2 := os.Stat(path)
	return err == nil && err2 == nil && os.SameFile(is, at)
}

// Alive reports whether a daemon runs whose maps are pinned in the directory pins.
func Alive(pins string) bool {
	f, err := os.Open(pins)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}
