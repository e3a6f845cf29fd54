package lab

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestNewBPFFS(t *testing.T) {
	dir, err := NewBPFFS()
	if err != nil {
		t.Fatal(err)
	}
	var stat unix.Statfs_t
	if err := unix.Statfs(dir, &stat); err != nil || stat.Type != unix.BPF_FS_MAGIC {
		t.Errorf("%s has magic number %#x, %v", dir, stat.Type, err)
	}
	if err := os.Mkdir(filepath.Join(dir, "pins"), 0o700); err != nil {
		t.Error(err)
	}
	// RemoveDir also removes a directory without a mount.
	other, err := TempDir()
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{dir, other} {
		if err := RemoveDir(dir); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s still exists: %v", dir, err)
		}
	}
}
