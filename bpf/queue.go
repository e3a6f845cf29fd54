package bpf

import (
	"fmt"
	"math"
	"time"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// queueFor returns the queue that an attachment needs. No more than a.Queue packets wait in it
// for their time stamps (queue.h). A quarter more is for those that wait for the interface.
func queueFor(a *shaper.Attachment) attach.FQ {
	return attach.FQ{Packets: uint32(a.Queue + a.Queue/4), Flow: uint32(a.Queue), Horizon: shaper.MaxMaxDelay + time.Second}
}

// CheckQueue returns an error when one bucket could have more full packets in the queue of a
// than the share of one key: the queue would refuse packets that max_delay allows.
func CheckQueue(a *shaper.Attachment, shape *leaky.Shape) error {
	const payload = 1448 // bytes in a full TCP packet
	if !a.Shapes() || shape.Bytes.Unlimited() && shape.Packets.Unlimited() {
		return nil
	}
	n := uint64(math.MaxUint64)
	if !shape.Packets.Unlimited() {
		n = shape.Packets.Units(shape.MaxDelay)
	}
	if !shape.Bytes.Unlimited() {
		n = min(n, shape.Bytes.Units(shape.MaxDelay)/(payload+shape.Overhead))
	}
	if room := uint64(a.Queue) * 3 / 4; n > room {
		return fmt.Errorf("%v at this rate can hold %d packets, more than the %d that attachment %q queues for one key: lower max_delay, or raise its \"queue\"",
			shape.MaxDelay.Duration(), n, room, a.Name)
	}
	return nil
}

// queueStatus returns the state of the point's queue.
func (pt *point) queueStatus() (attach.QueueStatus, error) {
	l, err := pt.link()
	if err != nil {
		return attach.QueueStatus{}, err
	}
	return attach.QueueOf(l)
}

// waiting returns the programs' counters of the queue of an interface.
func (k *kernel) waiting(at attach.Point) (w kernelQueue, err error) {
	err = k.QueueCounts.Lookup((uint32(at.Ifindex)<<1|u32(!at.Ingress))&(k.QueueCounts.MaxEntries()-1), &w)
	return w, err
}

// ProbeShape returns an error when the kernel cannot delay packets, as mode "shape"
// needs. It tries in a temporary network namespace, and returns nil when it is not
// permitted to.
func ProbeShape() error { return attach.ProbeFQ() }
