package main

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"shaperd/test/lab"
)

// What the downstream can bear.
const (
	workers     = 10                    // requests it serves at once
	backlog     = 10                    // connections the kernel may hold for it; all that the daemon lets in, if workers are late
	service     = 40 * time.Millisecond // for a request, when nobody waits
	slowdown    = 4 * time.Millisecond  // more, for each connection that waits
	tcpBuffer   = 32 << 10              // SO_RCVBUF of a connection
	udpBuffer   = 8 << 10               // SO_RCVBUF of the datagram socket
	perDatagram = 4 * time.Millisecond
)

// A request is its sender's tag, the length of the body in four bytes, and the
// body. A datagram begins with its sender's tag. Both get one byte as answer.
const requestHead = 5

// downstream is a fragile server. It has ten workers and takes what is in front
// of them from the kernel one by one, the slower the more is waiting, as a
// database or a gateway does that is short of memory and locks. What its small
// queues cannot hold the kernel throws away.
type downstream struct {
	host     *lab.Host
	listener net.Listener
	gateway  net.PacketConn
	group    sync.WaitGroup

	mu   sync.Mutex
	open map[net.Conn]bool // being served
}

func newDownstream(h *lab.Host) (*downstream, error) {
	d := &downstream{host: h, open: map[net.Conn]bool{}}
	if err := h.Do(d.listen); err != nil {
		return nil, fmt.Errorf("start the downstream: %w", err)
	}
	for range workers {
		d.group.Go(d.work)
	}
	d.group.Go(d.acknowledge)
	return d, nil
}

// listen opens the sockets. The net package cannot choose the length of an accept
// queue.
func (d *downstream) listen() error {
	tcp, err := bound(unix.SOCK_STREAM, tcpBuffer)
	if err != nil {
		return err
	}
	defer tcp.Close()
	if err := unix.Listen(int(tcp.Fd()), backlog); err != nil {
		return err
	}
	if d.listener, err = net.FileListener(tcp); err != nil {
		return err
	}
	udp, err := bound(unix.SOCK_DGRAM, udpBuffer)
	if err != nil {
		d.listener.Close()
		return err
	}
	defer udp.Close()
	if d.gateway, err = net.FilePacketConn(udp); err != nil {
		d.listener.Close()
		return err
	}
	return nil
}

// bound returns a socket with a small receive buffer, bound to the downstream's port.
func bound(kind, buffer int) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, buffer),
		unix.Bind(fd, &unix.SockaddrInet4{Port: port, Addr: downstreamAddr.As4()}),
	)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "downstream"), nil
}

func (d *downstream) close() {
	d.listener.Close()
	d.gateway.Close()
	d.mu.Lock()
	for c := range d.open {
		c.Close()
	}
	d.mu.Unlock()
	d.group.Wait()
}

// work serves one connection after the other.
func (d *downstream) work() {
	for {
		c, err := d.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // the client has gone already
		}
		d.mu.Lock()
		d.open[c] = true
		d.mu.Unlock()
		d.serve(c)
		c.Close()
		d.mu.Lock()
		delete(d.open, c)
		d.mu.Unlock()
	}
}

func (d *downstream) serve(c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	var head [requestHead]byte
	r := bufio.NewReader(c)
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return
	}
	if _, err := io.CopyN(io.Discard, r, int64(binary.BigEndian.Uint32(head[1:]))); err != nil {
		return
	}
	time.Sleep(service + time.Duration(d.waiting())*slowdown)
	_, _ = c.Write(head[:1])
}

// waiting is how many connections are in the accept queue, by the kernel's count.
func (d *downstream) waiting() (n int) {
	raw, err := d.listener.(*net.TCPListener).SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		// A listening socket's tcpi_unacked is the length of its accept queue.
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			n = int(info.Unacked)
		}
	})
	return n
}

// acknowledge handles one datagram after the other.
func (d *downstream) acknowledge() {
	buf := make([]byte, 1500)
	for {
		n, from, err := d.gateway.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || n == 0 {
			continue
		}
		time.Sleep(perDatagram)
		_, _ = d.gateway.WriteTo(buf[:1], from)
	}
}

// losses are what the kernel of the downstream threw away, by its own count.
type losses struct {
	overflows int // connections that found the accept queue full
	datagrams int // that found the receive buffer full
}

// losses reads the counters. They begin at zero with the namespace.
func (d *downstream) losses() (l losses, err error) {
	err = d.host.Do(func() error {
		// Not /proc/net: that is the main thread's.
		tcp, err := readCounters("/proc/thread-self/net/netstat")
		if err != nil {
			return err
		}
		udp, err := readCounters("/proc/thread-self/net/snmp")
		if err != nil {
			return err
		}
		l = losses{overflows: tcp["TcpExt.ListenOverflows"], datagrams: udp["Udp.RcvbufErrors"]}
		return nil
	})
	return l, err
}

func readCounters(path string) (map[string]int, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return parseCounters(string(text)), nil
}

// parseCounters reads pairs of lines: "Group: name name", "Group: value value".
func parseCounters(text string) map[string]int {
	counters := map[string]int{}
	names := map[string][]string{}
	for line := range strings.Lines(text) {
		group, rest, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		fields := strings.Fields(rest)
		if names[group] == nil {
			names[group] = fields
			continue
		}
		for i, name := range names[group] {
			if i < len(fields) {
				if v, err := strconv.Atoi(fields[i]); err == nil {
					counters[group+"."+name] = v
				}
			}
		}
	}
	return counters
}
