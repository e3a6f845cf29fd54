package control

import (
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var noLog = slog.New(slog.DiscardHandler)

func listenAt(t *testing.T, path string, gid int) *socket {
	t.Helper()
	s, err := listenSocket(path, gid, noLog)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// stale leaves a socket at path that nobody listens on.
func stale(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
}

func TestSocketReplaces(t *testing.T) {
	const left = "what was there"
	for _, tt := range []struct {
		name string
		make func(t *testing.T, path string) error
		want string // of the error; "" is none
	}{
		{"nothing", func(*testing.T, string) error { return nil }, ""},
		{"stale socket", func(t *testing.T, path string) error { stale(t, path); return nil }, ""},
		{"what a start left", func(t *testing.T, path string) error { stale(t, path+".next"); return nil }, ""},
		{"live socket", func(t *testing.T, path string) error { listenAt(t, path, -1); return nil }, "another daemon listens there: stop it, or name another path with --control"},
		{"socket of another user", func(t *testing.T, path string) error {
			stale(t, path)
			return os.Chown(path, other, other)
		}, "there is a socket of user 64003: remove it"},
		{"file", func(_ *testing.T, path string) error { return os.WriteFile(path, []byte(left), 0o600) }, "there is something else, which is no socket: remove it"},
		{"folder", func(_ *testing.T, path string) error { return os.Mkdir(path, 0o700) }, "something else"},
		{"FIFO", func(_ *testing.T, path string) error { return unix.Mkfifo(path, 0o600) }, "something else"},
		{"symlink to nothing", func(_ *testing.T, path string) error { return os.Symlink(path+"x", path) }, "something else"},
		{"symlink to a stale socket", func(t *testing.T, path string) error {
			stale(t, path+"x")
			return os.Symlink(path+"x", path)
		}, "something else"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := socketPath(t)
			if err := tt.make(t, path); err != nil {
				t.Fatal(err)
			}
			before, _ := os.Lstat(path)
			s, err := listenSocket(path, -1, noLog)
			if tt.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				defer s.Close()
				now, err := os.Lstat(path)
				if err != nil || now.Mode() != fs.ModeSocket|0o600 || os.SameFile(before, now) {
					t.Errorf("there is %v, %v", now, err)
				}
			} else {
				if err == nil {
					s.Close()
					t.Fatal("it was replaced")
				}
				if !strings.HasPrefix(err.Error(), "control socket "+path+": ") || !strings.Contains(err.Error(), tt.want) {
					t.Error(err)
				}
				if now, err := os.Lstat(path); err != nil || !os.SameFile(before, now) {
					t.Errorf("it is gone: %v", err)
				}
			}
			if _, err := os.Lstat(path + ".next"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("something is left: %v", err)
			}
		})
	}
}

func TestSocketFolder(t *testing.T) {
	for _, tt := range []struct {
		name string
		make func(folder string) error
		want string
	}{
		{"is made", os.Remove, ""},
		{"others may write", func(f string) error { return os.Chmod(f, 0o777) }, "others may write to its folder: chmod go-w "},
		{"a group may write", func(f string) error { return os.Chmod(f, 0o775) }, "others may write"},
		{"sticky", func(f string) error { return os.Chmod(f, 0o777|fs.ModeSticky) }, ""},
		{"of another user", func(f string) error { return os.Chown(f, other, other) }, "its folder belongs to user 64003: use one of root's, or of the daemon's own user"},
		{"in none", func(f string) error { return os.Rename(f, f+".gone") }, "make its folder: no such file or directory"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := socketPath(t)
			folder := filepath.Dir(path)
			if tt.name == "in none" {
				path = filepath.Join(folder, "a", "control.sock")
				t.Cleanup(func() { os.RemoveAll(folder + ".gone") })
			}
			if err := tt.make(folder); err != nil {
				t.Fatal(err)
			}
			s, err := listenSocket(path, -1, noLog)
			if err == nil {
				defer s.Close()
			}
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("err = %v, want %q", err, tt.want)
			}
		})
	}
}

func TestSocketPath(t *testing.T) {
	folder := filepath.Dir(socketPath(t))
	fits := filepath.Join(folder, strings.Repeat("x", maxPath-len(".next")-len(folder)-1))
	listenAt(t, fits, -1)
	if _, err := listenSocket(fits+"x", -1, noLog); err == nil || !strings.Contains(err.Error(), "its path is longer than 102 bytes") {
		t.Errorf("err = %v", err)
	}
}

// lookTwice returns what name is in folder when two looks agree. One look is not enough:
// stat(2) reads the group before the mode, and chown and chmod may come between.
func lookTwice(folder int, name string) (s unix.Stat_t, ok bool) {
	var again unix.Stat_t
	return s, unix.Fstatat(folder, name, &s, unix.AT_SYMLINK_NOFOLLOW) == nil &&
		unix.Fstatat(folder, name, &again, unix.AT_SYMLINK_NOFOLLOW) == nil &&
		s.Ino == again.Ino && s.Mode == again.Mode && s.Gid == again.Gid && s.Ctim == again.Ctim
}

// Whoever looks at the folder never sees a socket that others may connect to, however
// much new files may be used by others.
func TestSocketIsNeverOpenToOthers(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0))
	path := socketPath(t)
	folder, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(folder)
	type look struct {
		name string
		mode uint32
		gid  uint32
	}
	seen := map[look]bool{}
	whole := look{"control.sock", 0o660, readers}
	var caught atomic.Bool // in its whole state
	stop := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		for {
			for _, name := range []string{"control.sock", "control.sock.next"} {
				if s, ok := lookTwice(folder, name); ok {
					l := look{name, s.Mode &^ unix.S_IFMT, s.Gid}
					seen[l] = true
					if l == whole {
						caught.Store(true)
					}
				}
			}
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	for range 300 {
		s, err := listenSocket(path, readers, noLog)
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
	}
	listenAt(t, path, readers)
	until(t, "the socket is seen", caught.Load)
	close(stop)
	watching.Wait()
	for l := range seen {
		ok := l.mode == 0o600 || l.mode == 0o660 && l.gid == readers
		if l.name == "control.sock" { // it has its name when all else is done
			ok = l == whole
		}
		if !ok {
			t.Errorf("%s had mode %o and group %d", l.name, l.mode, l.gid)
		}
	}
}

func TestSocketIsRemovedIfItIsThere(t *testing.T) {
	for _, tt := range []struct {
		name string
		do   func(path string) error
		left bool
	}{
		{"it is", func(string) error { return nil }, false},
		{"it is gone", os.Remove, false},
		{"it is another one", func(path string) error { return errors.Join(os.Remove(path), os.WriteFile(path, nil, 0o600)) }, true},
		{"it is elsewhere", func(path string) error {
			return errors.Join(os.Rename(path, path+".old"), os.Symlink(path+".old", path))
		}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := socketPath(t)
			s := listenAt(t, path, -1)
			if err := tt.do(path); err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if _, err := os.Lstat(path); (err == nil) != tt.left {
				t.Errorf("afterwards: %v", err)
			}
		})
	}
}

// One of those that start at a moment gets the socket, and the others are told.
func TestSocketsAtOneMoment(t *testing.T) {
	for range 20 {
		path := socketPath(t)
		stale(t, path)
		stale(t, path+".next")
		const n = 6
		got, errs := make([]*socket, n), make([]error, n)
		var starts sync.WaitGroup
		for i := range n {
			starts.Go(func() { got[i], errs[i] = listenSocket(path, -1, noLog) })
		}
		starts.Wait()
		won := slices.IndexFunc(got, func(s *socket) bool { return s != nil })
		if won < 0 {
			t.Fatal(errs)
		}
		for i, err := range errs {
			if i != won && (err == nil || !strings.Contains(err.Error(), "another daemon listens there")) {
				t.Errorf("beside the one that won: %v", err)
			}
		}
		if c, err := net.Dial("unix", path); err != nil {
			t.Error(err)
		} else {
			c.Close()
		}
		for _, s := range got {
			if s != nil {
				s.Close()
			}
		}
		if _, err := os.Lstat(path); err == nil {
			t.Error("the socket is left")
		}
	}
}

// Whoever may read the folder may lock it. That keeps a daemon for a moment, and not from
// starting.
func TestSocketInLockedFolder(t *testing.T) {
	t.Parallel()
	path := socketPath(t)
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer folder.Close()
	if err := unix.Flock(int(folder.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	listenAt(t, path, -1)
	if took := time.Since(begun); took < lockTimeout || took > lockTimeout+2*time.Second {
		t.Errorf("it took %v", took)
	}
}
