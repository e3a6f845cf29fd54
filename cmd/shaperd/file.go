package main

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

// owned is the mode and the owner of a file. A negative owner is whoever makes it.
type owned struct {
	mode     uint32
	uid, gid int
}

// ownedBy is what a file is.
func ownedBy(s *unix.Stat_t) owned { return owned{s.Mode & 0o777, int(s.Uid), int(s.Gid)} }

// give has fd be so, whatever the umask is.
func (o owned) give(fd int) error {
	if o.uid >= 0 {
		if err := unix.Fchown(fd, o.uid, o.gid); err != nil {
			return err
		}
	}
	return unix.Fchmod(fd, o.mode)
}

// errBusy says that a file is being written, or that writing it was cut short.
var errBusy = errors.New("is there already: it is being written, or that was cut short: remove it")

// writeWhole writes a file of a folder that appears whole or not at all, also when the power
// fails. What stands in the place of the file that it writes first is never followed or
// written to. check, unless nil, has the last word: nobody else writes the file until it has
// appeared.
func writeWhole(folder *os.File, name string, text []byte, o owned, check func() error) (err error) {
	at, next := int(folder.Fd()), name+".next"
	fd, err := unix.Openat(at, next, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%s %w", filepath.Join(folder.Name(), next), errBusy)
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
		err = o.give(fd)
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

// trustedFolder opens a folder in which nobody but root and this user can put anything,
// nor another folder in its place: neither it nor one above it is another user's, a symbolic
// link, or one that others may write to. Above it that may be, where its sticky bit keeps
// others from what is there.
func trustedFolder(path string) (*os.File, error) {
	fd, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	at := os.NewFile(uintptr(fd), "/")
	for _, name := range strings.Split(strings.Trim(filepath.Clean(path), "/"), "/") {
		if name == "" {
			break
		}
		next, err := openFolder(at, name)
		at.Close()
		if err != nil {
			return nil, err
		}
		at = next
	}
	var s unix.Stat_t
	if err = unix.Fstat(int(at.Fd()), &s); err == nil {
		err = trusted(at.Name(), &s, false)
	}
	if err != nil {
		at.Close()
		return nil, err
	}
	return at, nil
}

// openFolder opens a folder in one that may be above a trusted one.
func openFolder(in *os.File, name string) (*os.File, error) {
	path := filepath.Join(in.Name(), name)
	var s unix.Stat_t
	err := unix.Fstat(int(in.Fd()), &s)
	if err == nil {
		err = trusted(in.Name(), &s, true)
	}
	if err != nil {
		return nil, err
	}
	fd, err := unix.Openat(int(in.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENOTDIR) {
		return nil, fmt.Errorf("%s is a symbolic link, or no folder", path)
	}
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// trusted returns an error unless what is at path is root's or this user's, and nobody else's
// to write to. sticky allows a folder that all may write to, each his own files.
func trusted(path string, s *unix.Stat_t, sticky bool) error {
	switch {
	case s.Uid != 0 && int(s.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to user %d: it is to be root's", path, s.Uid)
	case s.Mode&0o022 != 0 && !(sticky && s.Mode&unix.S_ISVTX != 0):
		return fmt.Errorf("others may write to %s: chmod go-w %[1]s", path)
	}
	return nil
}

// readTrusted reads a file of a trusted folder, and tells what it is. The error is
// [fs.ErrNotExist] when there is none.
func readTrusted(folder *os.File, name string, most int64) (text []byte, o owned, err error) {
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
	if s.Mode&unix.S_IFMT != unix.S_IFREG || s.Nlink > 1 { // 0 is one that was just replaced
		return nil, o, fmt.Errorf("%s is no regular file of one name", path)
	}
	if err := trusted(path, &s, false); err != nil {
		return nil, o, err
	}
	if s.Size > most {
		return nil, o, fmt.Errorf("%s is larger than %d bytes", path, most)
	}
	text, err = io.ReadAll(io.LimitReader(f, most))
	return text, ownedBy(&s), err
}

// readRegular reads a file, which must be a regular one: others may have no end, or wait for
// somebody.
func readRegular(path string, most int64) ([]byte, error) {
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
		return nil, fmt.Errorf("%s is no regular file (%s)", path, info.Mode())
	case info.Size() > most:
		return nil, fmt.Errorf("%s is larger than %d bytes", path, most)
	}
	return io.ReadAll(io.LimitReader(f, most))
}
