package bpf

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/shaper"
)

// departures are the departure times of packets that wait in the queue of an interface.
type departures []uint64

// waitingAt removes packets that have left by now, and returns how many still wait.
func (s *departures) waitingAt(now uint64) int {
	waiting := (*s)[:0]
	for _, depart := range *s {
		if depart > now {
			waiting = append(waiting, depart)
		}
	}
	*s = waiting
	return len(waiting)
}

// tiny returns a datagram of n bytes from 10.0.x.y to a port.
func tiny(source, port uint16, n int) []byte {
	b := append([]byte(nil), datagram(0)[:42+n]...)
	binary.BigEndian.PutUint16(b[16:], uint16(28+n))
	binary.BigEndian.PutUint16(b[28:], source)
	binary.BigEndian.PutUint16(b[36:], port)
	binary.BigEndian.PutUint16(b[38:], uint16(8+n))
	return b
}

// TestQueue_SharedBetweenKeys floods limits with datagrams of one byte, and with SYNs. The queue never
// overflows, and a key that keeps to its rate, in bursts of two, loses no packets, which depart as
// they would without the flood.
func TestQueue_SharedBetweenKeys(t *testing.T) {
	t.Parallel()
	const queue = 1000
	limit := func(name string, key shaper.Fields, port uint16, rate uint64, delay time.Duration) shaper.Limit {
		return shaper.Limit{
			Name: name, Key: key, Rate: rate, MaxDelay: delay, Match: shaper.Match{Port: []shaper.PortRange{{First: port, Last: port + 1}}},
		}
	}
	opens := func(key shaper.Fields, every time.Duration) shaper.Limit {
		return shaper.Limit{
			Name: "opens", Key: key, NewConnections: shaper.Frequency{N: 1, Per: every}, QueueTimeout: time.Hour,
			Match: shaper.Match{Port: []shaper.PortRange{{First: testServer.Port(), Last: testServer.Port()}}},
		}
	}
	datagrams := func(keys, port uint16) func(uint64) []byte {
		return func(i uint64) []byte { return tiny(1000+uint16(i%uint64(keys)), port, 1) }
	}
	syns := func(i uint64) []byte {
		return dial(fmt.Sprintf("10.2.%d.%d:%d", i%2, i%100, 1024+i/100)).nextSegment(client, syn, 0)
	}
	polite := limit("polite", shaper.KeySource, 53, 80e3, time.Second) // ports 53 and 54
	begin := uint64(0)                                                 // ns
	b := newBench(t, kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1, IdleTimeout: testIdleTimeout, QueueLimit: queue})
	const one = queue * 17 / 20 // the share of one key
	for _, c := range []struct {
		name   string
		limits []shaper.Limit
		flood  func(uint64) []byte
		most   int // maximum of waiting packets of the flood
	}{
		{"one key of the same limit", []shaper.Limit{polite}, datagrams(1, 53), one},
		{"300 keys", []shaper.Limit{polite, limit("flooded", shaper.KeySource, 55, 80, time.Second)}, datagrams(300, 55), queue},
		{"one bucket for all", []shaper.Limit{polite, limit("flooded", 0, 55, 8e3, time.Hour)}, datagrams(300, 55), one},
		{"one calendar for all", []shaper.Limit{polite, limit("flooded", 0, 54, 8e3, time.Second)}, datagrams(300, 54), one},
		{"SYNs, one bucket for all", []shaper.Limit{polite, opens(0, time.Second)}, syns, one},
		{"SYNs, 100 keys", []shaper.Limit{polite, opens(shaper.KeySource, time.Second)}, syns, queue},
		{"a retransmitted SYN", []shaper.Limit{polite, opens(0, time.Minute)}, func(i uint64) []byte { return syns(min(i, 1)) }, one},
	} {
		t.Run(c.name, func(t *testing.T) {
			begin += uint64(3 * time.Hour)
			b.loadLimits(t, attachHere(c.limits...), nil)
			var all, theirs departures
			refused := 0
			send := func(data []byte, now uint64, to ...*departures) (wait uint64, passed bool) {
				action, d, stamp := b.run(t, &sample{data: data}, now, (*bench).tc)
				if action == tcDrop {
					if d.Limit > uint32(len(c.limits)) || d.Reason != uint32(shaper.QueueFull) {
						t.Fatalf("refused by %+v", d)
					}
					return 0, false
				}
				for _, s := range to {
					*s = append(*s, stamp)
					if stamp <= now {
						*s = (*s)[:len(*s)-1]
					}
				}
				return stamp - now, true
			}
			const span, apart = uint64(1200e6), uint64(80e3) // ns
			most := 0
			for i := uint64(0); i*apart < span; i++ {
				now := begin + i*apart
				if _, passed := send(c.flood(i), now, &all, &theirs); !passed {
					refused++
				}
				if i%625 == 0 { // 50 ms, in which 500 bytes may leave
					for j := range uint64(2) {
						wait, passed := send(tiny(1, 53, 50), now, &all)
						if want := j * 5e6; !passed || wait != want {
							t.Errorf("at %v a polite packet waits %v, passed %v: want %v", time.Duration(now-begin), time.Duration(wait), passed, time.Duration(want))
						}
					}
				}
				if len(all) > queue || i%625 == 0 {
					if n := all.waitingAt(now); n > queue {
						t.Fatalf("%d packets wait", n)
					}
					most = max(most, theirs.waitingAt(now))
				}
			}
			if most > c.most || most < queue/2 || refused == 0 {
				t.Errorf("%d packets waited, %d were refused: want at most %d, at least %d, and some refused", most, refused, c.most, queue/2)
			}
		})
	}
}

// TestQueue_ConcurrentCounting sends packets that wait from all CPUs at once. When all of them have left,
// only later packets are counted.
func TestQueue_ConcurrentCounting(t *testing.T) {
	const longest = 30 * time.Millisecond
	b := newTimed(t, kernelConfig{Mode: programModes[shaper.AttachShape], Ethernet: 1, Keep: 1, Egress: 1, QueueLimit: 1 << 20})
	b.loadLimits(t, attachHere(shaper.Limit{Name: "l", Key: shaper.KeySource, Packets: perSecond(200_000), MaxDelay: longest}), nil)
	count := func() (packets, sum uint64) {
		w, err := b.waiting(attach.Point{Ifindex: 1})
		if err != nil {
			t.Fatal(err)
		}
		for _, level := range w.Slot {
			for _, n := range level {
				sum += uint64(n)
			}
		}
		return w.Packets, sum
	}
	stop := b.hammer(t, datagram(1), datagram(2))
	within(t, 30*time.Second, func() bool { packets, _ := count(); return packets > 1000 })
	time.Sleep(100 * time.Millisecond)
	stop()
	time.Sleep(2 * longest) // and the slots of that level
	if _, err := b.ShaperdTc.Run(&ebpf.RunOptions{Data: datagram(3), Repeat: 10}); err != nil {
		t.Fatal(err)
	}
	if packets, sum := count(); packets == 0 || packets > 9 || packets != sum {
		t.Errorf("%d packets wait, %d in all slots: want the same, and from 1 to 9", packets, sum)
	}
}
