package conn

import (
	"bytes"
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/internal/testutil"
	"shaperd.dev/shaperd/shaper"
)

// Datagrams arrive whole and in order, wherever they are coalesced and split on the way.
func TestTrain_PreservesDatagrams(t *testing.T) {
	rnd := testutil.Rand(t)
	for name, limits := range map[string][]shaper.Limit{
		"without limits": nil,
		"limited":        {{Name: "bytes", Rate: 10e9, Direction: shaper.Both, MaxDelay: testTimeout}},
		"observed":       {{Name: "bytes", Rate: 8e6, Observe: true, MaxDelay: time.Second}},
	} {
		t.Run(name, func(t *testing.T) {
			server := serveUDP(t)
			r := start(t, shaper.UDP, server.LocalAddr().String())
			r.listen.UDPIdleTimeout = time.Minute
			r.apply(limits...)
			client := dialUDP(t, r).(*net.UDPConn)
			var there net.Addr
			exchange := func(from, to net.PacketConn, write func([]byte, int) error, sizes []int, segment int) {
				t.Helper()
				sent := randomBytes(sum(sizes))
				if err := write(sent, segment); err != nil {
					t.Fatal(err)
				}
				got := make([]byte, 65536)
				for _, size := range sizes {
					to.SetReadDeadline(time.Now().Add(testTimeout))
					n, from, err := to.ReadFrom(got)
					if err != nil || !bytes.Equal(got[:n], sent[:size]) {
						t.Fatalf("%v: got %d bytes, want %d; err %v", sizes, n, size, err)
					}
					sent = sent[size:]
					there = from
				}
			}
			up := func(b []byte, segment int) error { return sendTrain(client, b, segment, nil) }
			down := func(b []byte, segment int) error { return sendTrain(server.(*net.UDPConn), b, segment, there) }
			for range 30 {
				segment := 1 + rnd.IntN(1400)
				for _, sizes := range [][]int{
					{segment},
					{segment, segment},
					{segment, segment, 1 + rnd.IntN(segment)},
					{9000},
					bytesOf(segment, min(40, 60000/segment)),
				} {
					exchange(client, server, up, sizes, sizes[0])
					exchange(server, client, down, sizes, sizes[0])
				}
			}
			// Separate datagrams of all sizes, received in one batch.
			var want [][]byte
			for range 40 {
				b := randomBytes(rnd.IntN(2000))
				if rnd.IntN(3) > 0 && len(want) > 0 {
					b = randomBytes(len(want[len(want)-1]))
				}
				want = append(want, b)
				if _, err := client.Write(b); err != nil {
					t.Fatal(err)
				}
			}
			got := make([]byte, 65536)
			for i, b := range want {
				server.SetReadDeadline(time.Now().Add(testTimeout))
				n, _, err := server.ReadFrom(got)
				if err != nil || !bytes.Equal(got[:n], b) {
					t.Fatalf("datagram %d: got %d bytes, want %d; err %v", i, n, len(b), err)
				}
			}
			if n := r.shaper.Listener("l").SendErrors.Load(); n != 0 {
				t.Errorf("%d send errors", n)
			}
		})
	}
}

func sum(list []int) (n int) {
	for _, x := range list {
		n += x
	}
	return n
}

func bytesOf(size, n int) (list []int) {
	for range n {
		list = append(list, size)
	}
	return list
}

// sendTrain sends b as datagrams of segment bytes, in one call (UDP_SEGMENT).
func sendTrain(c *net.UDPConn, b []byte, segment int, to net.Addr) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	split := func(size int) error {
		var errno error
		err := rc.Control(func(fd uintptr) { errno = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size) })
		return errors.Join(err, errno)
	}
	if err := split(segment); err != nil {
		return err
	}
	if to == nil {
		_, err = c.Write(b)
	} else {
		_, err = c.WriteTo(b, to)
	}
	return errors.Join(err, split(0))
}
