package control

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Role is what somebody who connects to the control socket may do.
type Role uint8

// The roles. Each may what the ones before it may.
const (
	Nobody Role = iota
	Reader      // see
	Admin       // and change
)

func (r Role) String() string { return [...]string{"nobody", "reader", "admin"}[r] }

// Group is the group whose members may read.
const Group = "shaperd"

// socket is the control socket. It knows who connects, and gives nobody too many connections.
type socket struct {
	*net.UnixListener
	path  string
	inode unix.Stat_t
	gid   int // of those that may read, negative when there is none
	log   *slog.Logger
	crowd *crowd

	mu   sync.Mutex
	told time.Time // of somebody without a role
}

// How many connections a user may have, and one who may change something.
const (
	maxOfUser  = 32
	maxOfAdmin = 256
)

func most(role Role) int {
	if role == Admin {
		return maxOfAdmin
	}
	return maxOfUser
}

// maxPath is how long the path of a socket may be.
const maxPath = len(unix.RawSockaddrUnix{}.Path) - 1

// lockTimeout is how long to wait for other daemons that start.
const lockTimeout = 2 * time.Second

// listenSocket makes the control socket at path. Whoever is in the group gid may connect,
// unless it is negative, and so may root and the daemon's own user. What is there already
// is replaced only if it is a socket of this user's that nobody listens on.
func listenSocket(path string, gid int, log *slog.Logger) (*socket, error) {
	wrong := func(format string, args ...any) error {
		return fmt.Errorf("control socket %s: %w", path, fmt.Errorf(format, args...))
	}
	next := path + ".next"
	if len(next) > maxPath {
		return nil, wrong("its path is longer than %d bytes", maxPath-len(".next"))
	}
	folder := filepath.Dir(path)
	if err := os.Mkdir(folder, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, wrong("make its folder: %w", cause(err))
	}
	if err := trusted(folder); err != nil {
		return nil, wrong("%w", err)
	}
	// Two daemons that start at once are not to take away each other's.
	lock, err := os.Open(folder)
	if err != nil {
		return nil, wrong("%w", cause(err))
	}
	defer lock.Close()
	if err := await(lock); err != nil {
		return nil, wrong("lock its folder: %w", err)
	}
	if err := replaceable(path); err != nil {
		return nil, wrong("%w", err)
	}
	s := &socket{path: path, gid: gid, log: log, crowd: &crowd{log: log, name: "control socket", groups: map[uint32]*group{}}}
	// It gets its name when it has its rights.
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, wrong("%w", cause(err))
	}
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }), err)
	}}
	l, err := config.Listen(context.Background(), "unix", next)
	if err != nil {
		return nil, wrong("%w", cause(err))
	}
	s.UnixListener = l.(*net.UnixListener)
	s.SetUnlinkOnClose(false)
	// The unit runs with that group, and without the system call chown.
	err = unix.Lstat(next, &s.inode)
	if err == nil && s.gid >= 0 && (int(s.inode.Gid) == s.gid || os.Lchown(next, -1, s.gid) == nil) {
		err = os.Chmod(next, 0o660)
	}
	if err == nil {
		err = os.Rename(next, path)
	}
	if err != nil {
		l.Close()
		_ = os.Remove(next)
		return nil, wrong("%w", cause(err))
	}
	return s, nil
}

// groupID returns the ID of Group, -1 when there is no such group.
func groupID() int {
	if g, err := user.LookupGroup(Group); err == nil {
		if gid, err := strconv.Atoi(g.Gid); err == nil {
			return gid
		}
	}
	return -1
}

// await locks folder, as a daemon that starts does for a moment. Whoever may read a folder
// may lock it: one that is locked for longer is taken for unlocked, or anybody could keep
// daemons from starting.
func await(folder *os.File) error {
	for end := time.Now().Add(lockTimeout); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Flock(int(folder.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return err
		}
		if time.Now().After(end) {
			return nil
		}
	}
}

// cause is err without what the caller says of it already.
func cause(err error) error {
	var errno unix.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// trusted returns an error when others could put something in the place of what is in folder.
func trusted(folder string) error {
	var s unix.Stat_t
	if err := unix.Stat(folder, &s); err != nil {
		return err
	}
	if s.Uid != 0 && int(s.Uid) != os.Geteuid() {
		return fmt.Errorf("its folder belongs to user %d: use one of root's, or of the daemon's own user", s.Uid)
	}
	if s.Mode&0o022 != 0 && s.Mode&unix.S_ISVTX == 0 {
		return errors.New("others may write to its folder: chmod go-w " + folder)
	}
	return nil
}

// replaceable returns an error when something is at path that must not be replaced.
func replaceable(path string) error {
	var s unix.Stat_t
	err := unix.Lstat(path, &s)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case s.Mode&unix.S_IFMT != unix.S_IFSOCK:
		return errors.New("there is something else, which is no socket: remove it, or name another path with --control")
	case s.Uid != uint32(os.Geteuid()):
		return fmt.Errorf("there is a socket of user %d: remove it, or name another path with --control", s.Uid)
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		c.Close()
		return errors.New("another daemon listens there: stop it, or name another path with --control")
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return cause(err)
	}
	return nil
}

// Close ends the socket, and removes it if it is still there: first, as nobody replaces a
// socket that is listened on.
func (s *socket) Close() error {
	var now unix.Stat_t
	if unix.Lstat(s.path, &now) == nil && now.Dev == s.inode.Dev && now.Ino == s.inode.Ino {
		_ = os.Remove(s.path)
	}
	return s.UnixListener.Close()
}

// peer is a connection of somebody who is known.
type peer struct {
	*guest
	role    Role
	uid     uint32
	pid     int32
	crowded bool // the user has too many, and is to be told
}

// Accept returns the next connection of somebody who may have one.
func (s *socket) Accept() (net.Conn, error) {
	for {
		c, err := s.AcceptUnix()
		if err != nil {
			return nil, err
		}
		uid, pid, role := s.identify(c)
		g, room := s.crowd.admit(c, uid, most(role))
		if g == nil {
			c.Close()
			continue
		}
		if role == Nobody {
			s.refuse(uid, pid)
		}
		return &peer{guest: g, role: role, uid: uid, pid: pid, crowded: !room}, nil
	}
}

// refuse tells of somebody who has no role, at most once a second.
func (s *socket) refuse(uid uint32, pid int32) {
	s.mu.Lock()
	again := time.Since(s.told) < time.Second
	if !again {
		s.told = time.Now()
	}
	s.mu.Unlock()
	if !again {
		s.log.Warn("control socket: refused", "uid", uid, "pid", pid)
	}
}

// identify returns who connected, by what the kernel says of them.
func (s *socket) identify(c *net.UnixConn) (uid uint32, pid int32, role Role) {
	uid = ^uint32(0)
	raw, err := c.SyscallConn()
	if err != nil {
		return uid, 0, Nobody
	}
	_ = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil {
			return
		}
		uid, pid = cred.Uid, cred.Pid
		switch {
		case uid == 0 || int(uid) == os.Geteuid():
			role = Admin
		case s.gid >= 0 && (int(cred.Gid) == s.gid || slices.Contains(peerGroups(fd), uint32(s.gid))):
			role = Reader
		}
	})
	return uid, pid, role
}

// peerGroups returns the supplementary groups of whoever connected.
func peerGroups(fd uintptr) []uint32 {
	const most = 1 << 16 // NGROUPS_MAX
	groups := make([]uint32, 64)
	for {
		size := uint32(len(groups) * 4)
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&size)), 0)
		if errno == unix.ERANGE && len(groups) < most {
			groups = make([]uint32, most)
			continue
		}
		if errno != 0 {
			return nil
		}
		return groups[:size/4]
	}
}
