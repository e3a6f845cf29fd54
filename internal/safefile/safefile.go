// Package safefile writes files so that a crash leaves the old or the new text, and reads and writes
// files for root in folders that no other user can tamper with. Its functions may be called by
// several goroutines; the name of a temporary file keeps concurrent writers apart.
package safefile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Ownership is the mode and owner of a file. A negative UID means that of this process.
type Ownership struct {
	Mode     uint32
	UID, GID int
}

// OwnershipOf returns the ownership of a file.
func OwnershipOf(s *unix.Stat_t) Ownership { return Ownership{s.Mode & 0o777, int(s.Uid), int(s.Gid)} }

// ApplyTo sets mode and owner of fd, whatever the umask is.
func (o Ownership) ApplyTo(fd int) error {
	if o.UID >= 0 {
		if err := unix.Fchown(fd, o.UID, o.GID); err != nil {
			return err
		}
	}
	return unix.Fchmod(fd, o.Mode)
}

// ErrBusy reports that a file is being written, or that a write was interrupted.
var ErrBusy = errors.New("already exists: the file is being written, or a write was interrupted; then remove it")

// Write writes a file in a folder atomically and durably: after a crash or a power failure
// it has the old or the new text. The temporary file must not exist; a link in its place is not
// followed. check, unless nil, can still cancel the write: it runs while the temporary file keeps
// all others from writing.
func Write(folder *os.File, name string, text []byte, o Ownership, check func() error) (err error) {
	at, next := int(folder.Fd()), name+".next"
	fd, err := unix.Openat(at, next, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%s %w", filepath.Join(folder.Name(), next), ErrBusy)
	}
	if err != nil {
		return &fs.PathError{Op: "create", Path: filepath.Join(folder.Name(), next), Err: err}
	}
	f := os.NewFile(uintptr(fd), filepath.Join(folder.Name(), next))
	defer func() {
		if err != nil {
			_ = unix.Unlinkat(at, next, 0) // a full disk leaves it empty
		}
	}()
	_, err = f.Write(text)
	if err == nil && check != nil {
		err = check()
	}
	if err == nil {
		err = o.ApplyTo(fd)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := unix.Renameat(at, next, at, name); err != nil {
		return &fs.PathError{Op: "rename to", Path: filepath.Join(folder.Name(), name), Err: err}
	}
	return folder.Sync()
}

// OpenTrusted opens a folder in which only root and this user can create or replace files,
// and which only they can replace: neither it nor a parent belongs to another user, is a symbolic
// link, or is writable by others. A parent may be writable by others when it has the sticky bit,
// which protects its entries.
func OpenTrusted(path string) (*os.File, error) {
	fd, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	at := os.NewFile(uintptr(fd), "/")
	for _, name := range strings.Split(strings.Trim(filepath.Clean(path), "/"), "/") {
		if name == "" {
			break
		}
		next, err := OpenFolder(at, name)
		at.Close()
		if err != nil {
			return nil, err
		}
		at = next
	}
	var s unix.Stat_t
	if err = unix.Fstat(int(at.Fd()), &s); err == nil {
		err = checkTrusted(at.Name(), &s, false)
	}
	if err != nil {
		at.Close()
		return nil, err
	}
	return at, nil
}

// OpenFolder opens a folder in a parent of a trusted folder.
func OpenFolder(in *os.File, name string) (*os.File, error) {
	path := filepath.Join(in.Name(), name)
	var s unix.Stat_t
	err := unix.Fstat(int(in.Fd()), &s)
	if err == nil {
		err = checkTrusted(in.Name(), &s, true)
	}
	if err != nil {
		return nil, err
	}
	fd, err := unix.Openat(int(in.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) {
		return nil, fmt.Errorf("%s is a symbolic link, or not a directory", path)
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// checkTrusted returns an error unless the file at path belongs to root or this user, and only
// they can write to it. sticky allows a folder with the sticky bit that all can write to.
func checkTrusted(path string, s *unix.Stat_t, sticky bool) error {
	switch {
	case s.Uid != 0 && int(s.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to user %d: it must belong to root", path, s.Uid)
	case s.Mode&0o022 != 0 && !(sticky && s.Mode&unix.S_ISVTX != 0):
		return fmt.Errorf("%s is writable by others: chmod go-w %[1]s", path)
	}
	return nil
}

// ReadTrusted reads a file in a trusted folder, and returns its ownership. The error is
// [fs.ErrNotExist] when there is no such file.
func ReadTrusted(folder *os.File, name string, maxSize int64) (text []byte, o Ownership, err error) {
	path := filepath.Join(folder.Name(), name)
	fd, err := unix.Openat(int(folder.Fd()), name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ELOOP) {
		return nil, o, fmt.Errorf("%s is a symbolic link", path)
	}
	if err != nil {
		return nil, o, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	var s unix.Stat_t
	if err := unix.Fstat(fd, &s); err != nil {
		return nil, o, err
	}
	if s.Mode&unix.S_IFMT != unix.S_IFREG || s.Nlink > 1 { // 0: it has just been replaced
		return nil, o, fmt.Errorf("%s is not a regular file with a single link", path)
	}
	if err := checkTrusted(path, &s, false); err != nil {
		return nil, o, err
	}
	if s.Size > maxSize {
		return nil, o, fmt.Errorf("%s is larger than %d bytes", path, maxSize)
	}
	text, err = io.ReadAll(io.LimitReader(f, maxSize))
	return text, OwnershipOf(&s), err
}

// ReadRegular reads a regular file. Other files may be endless, or block.
func ReadRegular(path string, maxSize int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s is not a regular file (%s)", path, info.Mode())
	case info.Size() > maxSize:
		return nil, fmt.Errorf("%s is larger than %d bytes", path, maxSize)
	}
	return io.ReadAll(io.LimitReader(f, maxSize))
}
