package daemon

import (
	"encoding/hex"
	"fmt"
	"os"

	"github.com/coreos/go-systemd/v22/activation"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/conn"
)

// fdStore stores the listening sockets in systemd (sd_pid_notify_with_fds(3)): while no daemon
// runs, after a crash or during a restart, connections wait in them.
type fdStore struct {
	stored map[string]bool
}

// inheritedFDs returns the sockets that systemd has passed on: those in its store, and those of a
// socket unit.
func inheritedFDs() (fds []int, err error) {
	for _, f := range activation.Files(true) {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return nil, fmt.Errorf("duplicate inherited descriptor %d: %w", f.Fd(), err)
		}
		f.Close()
		fds = append(fds, fd)
	}
	return fds, nil
}

// markStored records that systemd already stores ports.
func (s *fdStore) markStored(ports []conn.Port) {
	s.stored = map[string]bool{}
	for _, p := range ports {
		s.stored[storedName(p)] = true
	}
}

// update stores new ports, and removes closed ones from the store.
func (s *fdStore) update(ports []conn.Port) error {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return nil
	}
	to := &unix.SockaddrUnix{Name: socket}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("store listening sockets: %w", err)
	}
	defer unix.Close(fd)
	open := map[string]bool{}
	for _, p := range ports {
		name := storedName(p)
		open[name] = true
		if s.stored[name] {
			continue
		}
		if err := unix.Sendmsg(fd, []byte("FDSTORE=1\nFDNAME="+name), unix.UnixRights(p.FD), to, 0); err != nil {
			return fmt.Errorf("store the socket of %s: %w", p, err)
		}
	}
	for name := range s.stored {
		if open[name] {
			continue
		}
		if err := unix.Sendmsg(fd, []byte("FDSTOREREMOVE=1\nFDNAME="+name), nil, to, 0); err != nil {
			return fmt.Errorf("remove a listening socket from the store: %w", err)
		}
	}
	s.stored = open
	return nil
}

// storedName returns the name of a port in the store. Names cannot contain ":".
func storedName(p conn.Port) string {
	return fmt.Sprintf("%s.%s.%d", p.Protocol, hex.EncodeToString(p.Addr.Addr().AsSlice()), p.Addr.Port())
}
