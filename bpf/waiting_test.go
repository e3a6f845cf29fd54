package bpf

import (
	"encoding/binary"
	"testing"
	"time"

	"shaperd/shaper"
)

// stamped are the stamps of packets that wait in the queue of an interface.
type stamped []uint64

// at takes out those that have left by now, and returns how many wait.
func (s *stamped) at(now uint64) int {
	waiting := (*s)[:0]
	for _, depart := range *s {
		if depart > now {
			waiting = append(waiting, depart)
		}
	}
	*s = waiting
	return len(waiting)
}

// tiny is a datagram of 10.0.x.y with n bytes to a port.
func tiny(source, port uint16, n int) []byte {
	b := append([]byte(nil), datagram(0)[:42+n]...)
	binary.BigEndian.PutUint16(b[16:], uint16(28+n))
	binary.BigEndian.PutUint16(b[28:], source)
	binary.BigEndian.PutUint16(b[36:], port)
	binary.BigEndian.PutUint16(b[38:], uint16(8+n))
	return b
}

// TestQueueIsShared floods limits with datagrams of one byte. What waits never exceeds the
// queue, and a key that keeps to its rate, in bursts of two, loses nothing and leaves at
// the times it would have alone.
func TestQueueIsShared(t *testing.T) {
	const queue = 1000
	limit := func(name string, key shaper.Fields, port uint16, rate uint64, delay time.Duration) shaper.Limit {
		return shaper.Limit{
			Name: name, Key: key, Rate: rate, MaxDelay: delay, Match: shaper.Match{Port: []shaper.PortRange{{First: port, Last: port + 1}}},
		}
	}
	polite := limit("polite", shaper.KeySource, 53, 80e3, time.Second) // ports 53 and 54
	begin := uint64(0)                                                 // ns
	b := newBench(t, kernelAttachment{Mode: uint32(Shape), Ethernet: 1, Keep: 1, Queue: queue})
	for _, c := range []struct {
		name   string
		limits []shaper.Limit
		keys   int // that flood
		port   uint16
		most   int // packets that they may have waiting
	}{
		{"one key of the same limit", []shaper.Limit{polite}, 1, 53, queue * 17 / 20},
		{"300 keys", []shaper.Limit{polite, limit("flooded", shaper.KeySource, 55, 80, time.Second)}, 300, 55, queue},
		{"one bucket of all", []shaper.Limit{polite, limit("flooded", 0, 55, 8e3, time.Hour)}, 300, 55, queue * 17 / 20},
		{"one calendar of all", []shaper.Limit{polite, limit("flooded", 0, 54, 8e3, time.Second)}, 300, 54, queue * 17 / 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			begin += uint64(time.Hour)
			b.use(t, attached(c.limits...), nil)
			var all, theirs stamped
			refused := 0
			send := func(data []byte, now uint64, to ...*stamped) (wait uint64, passed bool) {
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
				if _, passed := send(tiny(uint16(1000+i%uint64(c.keys)), c.port, 1), now, &all, &theirs); !passed {
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
					if n := all.at(now); n > queue {
						t.Fatalf("%d packets wait", n)
					}
					most = max(most, theirs.at(now))
				}
			}
			if most > c.most || most < queue/2 || refused == 0 {
				t.Errorf("%d packets waited, %d were refused: want at most %d, at least %d, and some refused", most, refused, c.most, queue/2)
			}
		})
	}
}
