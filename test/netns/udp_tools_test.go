package netns

import (
	"cmp"
	"encoding/binary"
	"net"
	"net/netip"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/test/lab"
)

// stamp writes the head of a paced sender's datagram: the send time in ns since 1970, and the sender's tag.
func stamp(payload []byte, sent time.Time, tag byte) {
	binary.BigEndian.PutUint64(payload, uint64(sent.UnixNano()))
	payload[8] = tag
}

func tagOf(a lab.Arrival) byte { return a.Head[8] }

// sent returns when the datagram was sent, in capture time.
func (c *capture) sent(a lab.Arrival) time.Duration {
	return c.At(time.Unix(0, int64(binary.BigEndian.Uint64(a.Head[:]))))
}

// tagged returns the datagrams with the tag.
func tagged(list []lab.Arrival, tag byte) []lab.Arrival {
	var mine []lab.Arrival
	for _, a := range list {
		if tagOf(a) == tag {
			mine = append(mine, a)
		}
	}
	return mine
}

// paced is a sender of datagrams.
type paced struct {
	conn *net.UDPConn
	tag  byte
	size int // payload bytes
	rate int // datagrams a second

	period time.Duration // between two batches; 0 is 200 us
	pinned bool          // send on one processor: the kernel queues packets of each apart, so that they overtake one another
}

// newPaced returns a sender from the address from inside the host.
func (h *host) newPaced(t testing.TB, from netip.Addr, to netip.AddrPort, p paced) *paced {
	t.Helper()
	var err error
	p.conn, err = h.DialUDP(from, to)
	must(t, err)
	t.Cleanup(func() { p.conn.Close() })
	return &p
}

// send sends for the time d, and returns how many datagrams it sent. After a stall, the
// kernel may reject some of those that are due at once.
func (p *paced) send(d time.Duration) (sent int, err error) {
	period := cmp.Or(p.period, 200*time.Microsecond)
	raw, err := p.conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if p.pinned {
		unpin, err := pinThread()
		if err != nil {
			return 0, err
		}
		defer unpin()
	}
	payload := make([]byte, p.size)
	start := time.Now()
	offered := 0
	for at := time.Duration(0); at < d; at += period {
		sleepUntil(start.Add(at))
		due := int((at + period).Seconds() * float64(p.rate))
		var failed error
		err := raw.Write(func(fd uintptr) bool {
			for ; offered < due; offered++ {
				stamp(payload, time.Now(), p.tag)
				switch _, err := unix.Write(int(fd), payload); err {
				case nil:
					sent++
				case unix.ENOBUFS, unix.EAGAIN:
				default:
					failed = err
					return true
				}
			}
			return true
		})
		if err == nil {
			err = failed
		}
		if err != nil {
			return sent, err
		}
	}
	return sent, nil
}

// pinThread binds the calling thread to the processor that it is on.
func pinThread() (unpin func(), err error) {
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return nil, err
	}
	var cpu uint32
	if _, _, errno := unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0); errno != 0 {
		return nil, errno
	}
	one.Set(int(cpu))
	return func() { _ = unix.SchedSetaffinity(0, &all) }, unix.SchedSetaffinity(0, &one)
}

// discardUDP drops datagrams to the address at in the kernel, at minimal cost.
func (h *host) discardUDP(t testing.TB, at netip.AddrPort) {
	t.Helper()
	raw, err := h.listenUDP(t, at).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = raw.Control(func(fd uintptr) {
		err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: 1, Filter: &unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}})
	})
	if err != nil {
		t.Fatalf("discard at %v: %v", at, err)
	}
}

// echoUDP sends every datagram to the address at back to where it came from.
func (h *host) echoUDP(t testing.TB, at netip.AddrPort) {
	t.Helper()
	h.answerUDP(t, at, func([]byte, netip.AddrPort) bool { return true })
}

// answerUDP is like echoUDP for the datagrams that answers selects.
func (h *host) answerUDP(t testing.TB, at netip.AddrPort, answers func(data []byte, from netip.AddrPort) bool) {
	t.Helper()
	c := h.listenUDP(t, at)
	must(t, c.SetReadBuffer(4<<20))
	testutil.ServeUDP(t, c, func(data []byte, from netip.AddrPort) []byte {
		if !answers(data, from) {
			return nil
		}
		return data
	})
}
