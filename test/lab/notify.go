package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// A NotifySocket receives the notifications of a service, like systemd (sd_notify(3)), and keeps
// the descriptors that the service stores.
type NotifySocket struct {
	Path   string
	Stored map[string]*os.File // by name
	conn   *net.UnixConn
}

// ListenNotify opens a socket at a path. All users may write to it.
func ListenNotify(path string) (*NotifySocket, error) {
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o777); err != nil {
		conn.Close()
		return nil, err
	}
	return &NotifySocket{Path: path, Stored: map[string]*os.File{}, conn: conn}, nil
}

// Close closes the socket and the stored descriptors.
func (s *NotifySocket) Close() {
	s.conn.Close()
	s.DropStored()
}

// DropStored closes the stored descriptors, as systemd does when a service is stopped.
func (s *NotifySocket) DropStored() {
	for _, f := range s.Stored {
		f.Close()
	}
	clear(s.Stored)
}

// Await reads notifications until one has a line that starts with want. It fails when exited is
// closed before, and with ctx.
func (s *NotifySocket) Await(ctx context.Context, want string, exited <-chan struct{}) error {
	for {
		last := false // whether no further notification can come
		select {
		case <-exited:
			last = true
		default:
		}
		lines, err := s.receive()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case err != nil:
			return fmt.Errorf("read notification: %w", err)
		case slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, want) }):
			return nil
		default:
			continue
		}
		if last {
			return fmt.Errorf("it exited before it sent %s", want)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("it did not send %s: %w", want, ctx.Err())
		}
	}
}

// receive reads one notification, and updates the store.
func (s *NotifySocket) receive() (lines []string, err error) {
	if err := s.conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond)); err != nil {
		return nil, err
	}
	buf, oob := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	n, rights, _, _, err := s.conn.ReadMsgUnix(buf, oob)
	if err != nil {
		return nil, err
	}
	lines = strings.Split(string(buf[:n]), "\n")
	if len(lines) == 2 && strings.HasPrefix(lines[0], "FDSTORE") {
		err = s.updateStore(lines[0], strings.TrimPrefix(lines[1], "FDNAME="), oob[:rights])
	}
	return lines, err
}

// updateStore stores or removes a descriptor.
func (s *NotifySocket) updateStore(verb, name string, rights []byte) error {
	if verb == "FDSTOREREMOVE=1" {
		s.Stored[name].Close()
		delete(s.Stored, name)
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil || len(messages) != 1 {
		return fmt.Errorf("%s of %s came with %d messages, %w", verb, name, len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return fmt.Errorf("%s of %s came with %d descriptors, %w", verb, name, len(fds), err)
	}
	s.Stored[name] = os.NewFile(uintptr(fds[0]), name)
	return nil
}
