package logging

import (
	"errors"
	"net"

	"golang.org/x/sys/unix"
)

// journalPath is the socket at which the journal takes entries in its native protocol.
const journalPath = "/run/systemd/journal/socket"

// journalSocket sends entries to the journal. It is connected: a sender that is not, such as that of
// go-systemd, is not woken when a full queue of the journal has room again, and keeps a processor
// busy until then.
type journalSocket struct {
	path string
	conn *net.UnixConn // nil while there is no socket
}

func dialJournal(path string) (*journalSocket, error) {
	j := &journalSocket{path: path}
	return j, j.dial()
}

func (j *journalSocket) dial() (err error) {
	if j.conn != nil {
		j.conn.Close()
	}
	j.conn, err = net.DialUnix("unixgram", nil, &net.UnixAddr{Name: j.path, Net: "unixgram"})
	return err
}

// Write sends one entry. It waits while the queue of the journal is full.
func (j *journalSocket) Write(entry []byte) (int, error) {
	err := j.send(entry)
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNRESET) {
		// The socket was made again.
		if err = j.dial(); err == nil {
			err = j.send(entry)
		}
	}
	return len(entry), err
}

func (j *journalSocket) send(entry []byte) error {
	if j.conn == nil {
		return unix.ENOTCONN
	}
	_, err := j.conn.Write(entry)
	return err
}
