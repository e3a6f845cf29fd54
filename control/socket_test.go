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

	"shaperd.dev/shaperd/internal/testutil"
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

// leaveStaleSocket leaves a socket without a listener at path.
func leaveStaleSocket(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
}

func TestListenSocket_ReplacesOnlyStaleSocket(t *testing.T) {
	const left = "what was there"
	for _, tt := range []struct {
		name string
		make func(t *testing.T, path string) error
		want string // of the error; "" is none
	}{
		{"nothing", func(*testing.T, string) error { return nil }, ""},
		{"stale socket", func(t *testing.T, path string) error { leaveStaleSocket(t, path); return nil }, ""},
		{"what a start left", func(t *testing.T, path string) error { leaveStaleSocket(t, path+".next"); return nil }, ""},
		{"live socket", func(t *testing.T, path string) error { listenAt(t, path, -1); return nil }, "another daemon is listening: stop it, or choose another path with --control"},
		{"socket of another user", func(t *testing.T, path string) error {
			leaveStaleSocket(t, path)
			return os.Chown(path, otherID, otherID)
		}, "socket exists and is owned by user 64003: remove it"},
		{"file", func(_ *testing.T, path string) error { return os.WriteFile(path, []byte(left), 0o600) }, "file exists and is not a socket: remove it"},
		{"folder", func(_ *testing.T, path string) error { return os.Mkdir(path, 0o700) }, "is not a socket"},
		{"FIFO", func(_ *testing.T, path string) error { return unix.Mkfifo(path, 0o600) }, "is not a socket"},
		{"symlink to nothing", func(_ *testing.T, path string) error { return os.Symlink(path+"x", path) }, "is not a socket"},
		{"symlink to a stale socket", func(t *testing.T, path string) error {
			leaveStaleSocket(t, path+"x")
			return os.Symlink(path+"x", path)
		}, "is not a socket"},
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
					t.Fatal("the file was replaced")
				}
				if !strings.HasPrefix(err.Error(), "control socket "+path+": ") || !strings.Contains(err.Error(), tt.want) {
					t.Error(err)
				}
				if now, err := os.Lstat(path); err != nil || !os.SameFile(before, now) {
					t.Errorf("the file is gone: %v", err)
				}
			}
			if _, err := os.Lstat(path + ".next"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("a temporary file is left: %v", err)
			}
		})
	}
}

func TestListenSocket_ChecksFolder(t *testing.T) {
	for _, tt := range []struct {
		name string
		make func(folder string) error
		want string
	}{
		{"is made", os.Remove, ""},
		{"others may write", func(f string) error { return os.Chmod(f, 0o777) }, "directory is writable by others: chmod go-w "},
		{"a group may write", func(f string) error { return os.Chmod(f, 0o775) }, "directory is writable"},
		{"sticky", func(f string) error { return os.Chmod(f, 0o777|fs.ModeSticky) }, ""},
		{"of another user", func(f string) error { return os.Chown(f, otherID, otherID) }, "directory is owned by user 64003: it must be owned by root or the user of the daemon"},
		{"in none", func(f string) error { return os.Rename(f, f+".gone") }, "create directory: no such file or directory"},
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

func TestListenSocket_PathLength(t *testing.T) {
	folder := filepath.Dir(socketPath(t))
	fits := filepath.Join(folder, strings.Repeat("x", maxPath-len(".next")-len(folder)-1))
	listenAt(t, fits, -1)
	if _, err := listenSocket(fits+"x", -1, noLog); err == nil || !strings.Contains(err.Error(), "path is longer than 102 bytes") {
		t.Errorf("err = %v", err)
	}
}

// statTwice returns the status of name in folder if two calls agree. One call is not enough:
// stat(2) reads the group before the mode, and chown and chmod may happen in between.
func statTwice(folder int, name string) (s unix.Stat_t, ok bool) {
	var again unix.Stat_t
	return s, unix.Fstatat(folder, name, &s, unix.AT_SYMLINK_NOFOLLOW) == nil &&
		unix.Fstatat(folder, name, &again, unix.AT_SYMLINK_NOFOLLOW) == nil &&
		s.Ino == again.Ino && s.Mode == again.Mode && s.Gid == again.Gid && s.Ctim == again.Ctim
}

// The folder never contains a socket that other users may connect to, even with umask 0.
func TestListenSocket_NeverOpenToOthers(t *testing.T) {
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
	whole := look{"control.sock", 0o660, readersGID}
	var caught atomic.Bool // in its whole state
	stop := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		for {
			for _, name := range []string{"control.sock", "control.sock.next"} {
				if s, ok := statTwice(folder, name); ok {
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
		s, err := listenSocket(path, readersGID, noLog)
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
	}
	listenAt(t, path, readersGID)
	testutil.WaitFor(t, "the socket is seen", caught.Load)
	close(stop)
	watching.Wait()
	for l := range seen {
		ok := l.mode == 0o600 || l.mode == 0o660 && l.gid == readersGID
		if l.name == "control.sock" { // it has its name when all else is done
			ok = l == whole
		}
		if !ok {
			t.Errorf("%s had mode %o and group %d", l.name, l.mode, l.gid)
		}
	}
}

func TestSocket_CloseRemovesOwnFile(t *testing.T) {
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

// Of several daemons that start at once, one gets the socket, and the others get an error.
func TestListenSocket_Concurrently(t *testing.T) {
	for range 20 {
		path := socketPath(t)
		leaveStaleSocket(t, path)
		leaveStaleSocket(t, path+".next")
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
			if i != won && (err == nil || !strings.Contains(err.Error(), "another daemon is listening")) {
				t.Errorf("other than the winner: %v", err)
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

// Any user that may read the folder may lock it, which delays a daemon but does not keep it from
// starting.
func TestListenSocket_LockedFolder(t *testing.T) {
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
	if took := time.Since(begun); took < lockTimeout || took > lockTimeout+20*time.Second {
		t.Errorf("it took %v", took)
	}
}
