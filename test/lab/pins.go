package lab

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// NewBPFFS creates a directory and mounts a BPF file system there. The caller removes it
// with [RemoveDir], which also detaches programs whose links are pinned there.
func NewBPFFS() (dir string, err error) {
	if dir, err = TempDir(); err != nil {
		return "", err
	}
	if err := unix.Mount("bpf", dir, "bpf", 0, ""); err != nil {
		return "", fmt.Errorf("mount a BPF file system: %w", errors.Join(err, os.Remove(dir)))
	}
	return dir, nil
}
