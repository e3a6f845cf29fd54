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

// Role is the set of permissions of a peer on the control socket.
type Role uint8

// The roles. Each includes the permissions of the ones before it.
const (
	NoRole Role = iota
	Reader      // may read
	Admin       // may also change
)

func (r Role) String() string { return [...]string{"none", "reader", "admin"}[r] }

// Group is the group whose members have the role Reader.
const Group = "shaperd"

// socket is the control socket. It identifies its peers, and bounds their connections.
type socket struct {
	*net.UnixListener
	path    string
	inode   unix.Stat_t
	gid     int // group with the role Reader; negative for none
	log     *slog.Logger
	limiter *connLimiter

	mu       sync.Mutex
	loggedAt time.Time // when logRefused last logged
}

// Maximum number of connections of a user, and of an admin.
const (
	maxUserConnections  = 32
	maxAdminConnections = 256
)

func maxConnections(role Role) int {
	if role == Admin {
		return maxAdminConnections
	}
	return maxUserConnections
}

// maxPath is the maximum length of the path of a socket.
const maxPath = len(unix.RawSockaddrUnix{}.Path) - 1

// lockTimeout bounds the wait for other daemons that are starting.
const lockTimeout = 2 * time.Second

// listenSocket creates the control socket at path. Root, the user of the daemon and, unless gid
// is negative, the members of that group may connect. It replaces an existing file only if
// that is a socket of this user without a listener.
func listenSocket(path string, gid int, log *slog.Logger) (*socket, error) {
	fail := func(format string, args ...any) error {
		return fmt.Errorf("control socket %s: %w", path, fmt.Errorf(format, args...))
	}
	next := path + ".next"
	if len(next) > maxPath {
		return nil, fail("path is longer than %d bytes", maxPath-len(".next"))
	}
	folder := filepath.Dir(path)
	if err := os.Mkdir(folder, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fail("create directory: %w", errnoOf(err))
	}
	if err := checkFolder(folder); err != nil {
		return nil, fail("%w", err)
	}
	// Two daemons that start at once must not replace the socket of each other.
	lock, err := os.Open(folder)
	if err != nil {
		return nil, fail("%w", errnoOf(err))
	}
	defer lock.Close()
	if err := lockFolder(lock); err != nil {
		return nil, fail("lock directory: %w", err)
	}
	if err := checkReplaceable(path); err != nil {
		return nil, fail("%w", err)
	}
	s := &socket{path: path, gid: gid, log: log, limiter: &connLimiter{log: log, endpoint: "control socket", users: map[uint32]*userConns{}}}
	// Its final name comes last, when its permissions are set.
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fail("%w", errnoOf(err))
	}
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }), err)
	}}
	l, err := config.Listen(context.Background(), "unix", next)
	if err != nil {
		return nil, fail("%w", errnoOf(err))
	}
	s.UnixListener = l.(*net.UnixListener)
	s.SetUnlinkOnClose(false)
	// The systemd unit runs with that group, and without the system call chown.
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
		return nil, fail("%w", errnoOf(err))
	}
	return s, nil
}

// groupID returns the ID of Group, or -1 if it does not exist.
func groupID() int {
	if g, err := user.LookupGroup(Group); err == nil {
		if gid, err := strconv.Atoi(g.Gid); err == nil {
			return gid
		}
	}
	return -1
}

// lockFolder locks folder, as every daemon does briefly when it starts. Any user that may read a
// folder may lock it; after lockTimeout the lock is ignored, or any user could keep daemons
// from starting.
func lockFolder(folder *os.File) error {
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

// errnoOf returns the errno of err, without the operation and path, if it has one.
func errnoOf(err error) error {
	var errno unix.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

// checkFolder returns an error if other users could replace files in folder.
func checkFolder(folder string) error {
	var s unix.Stat_t
	if err := unix.Stat(folder, &s); err != nil {
		return err
	}
	if s.Uid != 0 && int(s.Uid) != os.Geteuid() {
		return fmt.Errorf("directory is owned by user %d: it must be owned by root or the user of the daemon", s.Uid)
	}
	if s.Mode&0o022 != 0 && s.Mode&unix.S_ISVTX == 0 {
		return errors.New("directory is writable by others: chmod go-w " + folder)
	}
	return nil
}

// checkReplaceable returns an error if path is a file that must not be replaced.
func checkReplaceable(path string) error {
	var s unix.Stat_t
	err := unix.Lstat(path, &s)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case s.Mode&unix.S_IFMT != unix.S_IFSOCK:
		return errors.New("file exists and is not a socket: remove it, or choose another path with --control")
	case s.Uid != uint32(os.Geteuid()):
		return fmt.Errorf("socket exists and is owned by user %d: remove it, or choose another path with --control", s.Uid)
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		c.Close()
		return errors.New("another daemon is listening: stop it, or choose another path with --control")
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return errnoOf(err)
	}
	return nil
}

// Close closes the socket, and removes its file if that is still its own. It removes it first:
// while the socket listens, no other daemon replaces the file.
func (s *socket) Close() error {
	var now unix.Stat_t
	if unix.Lstat(s.path, &now) == nil && now.Dev == s.inode.Dev && now.Ino == s.inode.Ino {
		_ = os.Remove(s.path)
	}
	return s.UnixListener.Close()
}

// peer is a connection with the identity and the role of its client.
type peer struct {
	*limitedConn
	role    Role
	uid     uint32
	pid     int32
	tooMany bool // the user is at its maximum: requests get an error
}

// Accept returns the next connection that the limit admits.
func (s *socket) Accept() (net.Conn, error) {
	for {
		c, err := s.AcceptUnix()
		if err != nil {
			return nil, err
		}
		uid, pid, role := s.identify(c)
		g, ok := s.limiter.admit(c, uid, maxConnections(role))
		if g == nil {
			c.Close()
			continue
		}
		if role == NoRole {
			s.logRefused(uid, pid)
		}
		return &peer{limitedConn: g, role: role, uid: uid, pid: pid, tooMany: !ok}, nil
	}
}

// logRefused logs a peer without a role, at most once a second.
func (s *socket) logRefused(uid uint32, pid int32) {
	s.mu.Lock()
	recent := time.Since(s.loggedAt) < time.Second
	if !recent {
		s.loggedAt = time.Now()
	}
	s.mu.Unlock()
	if !recent {
		s.log.Warn("control socket: connection without permission", "uid", uid, "pid", pid)
	}
}

// identify returns the credentials of a peer, from the kernel, and its role.
func (s *socket) identify(c *net.UnixConn) (uid uint32, pid int32, role Role) {
	uid = ^uint32(0)
	raw, err := c.SyscallConn()
	if err != nil {
		return uid, 0, NoRole
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

// peerGroups returns the supplementary groups of a peer.
func peerGroups(fd uintptr) []uint32 {
	const maxGroups = 1 << 16 // NGROUPS_MAX
	groups := make([]uint32, 64)
	for {
		size := uint32(len(groups) * 4)
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&size)), 0)
		if errno == unix.ERANGE && len(groups) < maxGroups {
			groups = make([]uint32, maxGroups)
			continue
		}
		if errno != 0 {
			return nil
		}
		return groups[:size/4]
	}
}
