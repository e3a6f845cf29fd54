package lab

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// NewPins makes a folder with a BPF file system of its own. The caller removes it with
// [RemoveDir]. What was attached by links that are pinned there is attached no more then.
func NewPins() (dir string, err error) {
	if dir, err = TempDir(); err != nil {
		return "", err
	}
	if err := unix.Mount("bpf", dir, "bpf", 0, ""); err != nil {
		return "", fmt.Errorf("mount a BPF file system: %w", errors.Join(err, os.Remove(dir)))
	}
	return dir, nil
}
