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

	"shaperd.dev/shaperd/test/lab"
)

// The capacity of the downstream.
const (
	workers     = 10                    // requests served at once
	backlog     = 10                    // accept queue; room for all that the daemon admits when workers are late
	serviceTime = 40 * time.Millisecond // per request, when no connection waits
	slowdown    = 4 * time.Millisecond  // added for each waiting connection
	tcpBuffer   = 32 << 10              // SO_RCVBUF of a connection
	udpBuffer   = 8 << 10               // SO_RCVBUF of the datagram socket
	perDatagram = 4 * time.Millisecond
)

// A request is its sender's tag, the length of the body in four bytes, and the body. A
// datagram starts with its sender's tag. The response to both is one byte.
const requestHead = 5

// downstream is a fragile server. It has ten workers that accept connections one by one,
// and gets slower the more connections wait, like a database or a gateway that is short
// of memory and locks. Its queues are small, and the kernel drops on overflow.
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

// listen opens the sockets. The net package cannot set the length of the accept queue.
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
			continue // the client has already gone
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
	time.Sleep(serviceTime + time.Duration(d.waiting())*slowdown)
	_, _ = c.Write(head[:1])
}

// waiting returns the kernel's count of connections in the accept queue.
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

// losses are the kernel's drop counters at the downstream.
type losses struct {
	overflows int // connections dropped because the accept queue was full
	datagrams int // datagrams dropped because the receive buffer was full
}

// losses reads the counters, which are per namespace and start at zero.
func (d *downstream) losses() (l losses, err error) {
	err = d.host.Do(func() error {
		// Not /proc/net, which is the main thread's.
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
