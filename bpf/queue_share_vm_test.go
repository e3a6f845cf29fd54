//go:build vmguest

package bpf

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/shaper"
)

// TestVMQueue_SharedBetweenKeys floods a limit with datagrams of one byte, of one key and of many,
// through a real queue. A key within its rate and traffic under no limit lose nothing, and the
// queue drops nothing.
func TestVMQueue_SharedBetweenKeys(t *testing.T) {
	l := newLine(t, "full0", false)
	p := openPlane(t)
	for _, keys := range []int{1, 200} {
		t.Run(fmt.Sprint(keys, " keys"), func(t *testing.T) {
			limits := attachHere(
				shaper.Limit{Name: "polite", Key: shaper.KeySource, Rate: 80e3, MaxDelay: time.Second},
				shaper.Limit{Name: fmt.Sprint("flooded", keys), Key: shaper.KeySource, Rate: 16e3 / uint64(keys), MaxDelay: time.Second},
			)
			limits[0].Match.Port = []shaper.PortRange{{First: 53, Last: 53}}
			limits[1].Match.Port = []shaper.PortRange{{First: 55, Last: 55}}
			p.apply(limits, shaper.Attachment{Name: "here", Interfaces: []string{"full0"}, Mode: shaper.AttachShape, Queue: 1000})
			flood := packetSocket(t, l.from, 0)
			must(t, unix.SetsockoptInt(flood, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 512<<20))
			others := [][]byte{tiny(3, 54, 100), tiny(4, 53, 100)} // under no limit; within its own
			sent, got := map[byte]int{}, map[byte]int{}
			buf := make([]byte, 2048)
			receive := func() {
				for {
					n, from, err := unix.Recvfrom(l.in, buf, 0)
					if err != nil {
						return
					}
					if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype != unix.PACKET_OUTGOING && n >= 43 && buf[28] == 0 {
						got[buf[29]]++
					}
				}
			}
			begin, round := time.Now(), 0
			for next := time.Second; sent[4] < 20; round++ {
				for i := range 200 {
					if _, err := unix.Write(flood, tiny(uint16(1000+i%keys), 55, 1)); err != nil && !errors.Is(err, unix.ENOBUFS) {
						t.Fatal(err)
					}
				}
				if time.Since(begin) > next {
					next = time.Since(begin) + 50*time.Millisecond
					for _, frame := range others {
						headerSum(frame[14:34])
						if _, err := unix.Write(l.out, frame); err != nil && !errors.Is(err, unix.ENOBUFS) {
							t.Fatal(err)
						}
						sent[frame[29]]++
					}
				}
				receive()
			}
			for end := time.Now(); time.Since(end) < 5*time.Second && (got[3] < sent[3] || got[4] < sent[4]); {
				time.Sleep(10 * time.Millisecond)
				receive()
			}
			if got[3] < sent[3] || got[4] < sent[4] {
				t.Errorf("%d of %d arrived under no limit, %d of %d within their rate: want all", got[3], sent[3], got[4], sent[4])
			}
			must(t, p.syncCounters())
			refused := map[bool]uint64{}
			for i := range p.policy.Len() {
				refused[p.policy.Limit(i).Name == "polite"] = p.policy.State(i).Packets[shaper.Refuse][shaper.QueueFull].Load()
			}
			status, err := p.Status()
			must(t, err)
			t.Logf("%d sent, %d of them refused, and %d of those within their rate, queue %+v", 200*round, refused[false], refused[true], status.Points[0].Queue)
			if q := status.Points[0].Queue; q.Drops != 0 || q.Packets > 1000 || refused[false] == 0 {
				t.Errorf("the queue holds %d packets and dropped %d, the limit refused %d: want at most 1000, none, some", q.Packets, q.Drops, refused[false])
			}
		})
	}
}
