package bpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// The queue that holds packets until their departure is sch_fq (net/sched/sch_fq.c):
// it sends each at its time stamp. There is one at the root of an interface, or one for
// each of its transmit queues.

// queueConfig is the configuration of sch_fq.
type queueConfig struct {
	packets uint32        // limit of all flows
	flow    uint32        // limit of one flow
	horizon time.Duration // packets with a later time stamp are dropped
}

// queue returns the queue that an attachment needs. No more than a.Queue packets wait in it
// for their time stamps (queue.h). A quarter more is for those that wait for the interface.
func queueFor(a *shaper.Attachment) queueConfig {
	return queueConfig{packets: uint32(a.Queue + a.Queue/4), flow: uint32(a.Queue), horizon: shaper.MaxMaxDelay + time.Second}
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

// Handles that identify the queue, and its parameters.
const (
	ownMajor   = 0x5ad
	ownHandle  = ownMajor << 16
	bucketsLog = 16        // size of sch_fq's flow table: 512 KiB a queue
	orphanMask = 1<<20 - 1 // number of flows for forwarded packets
)

// Attributes of sch_fq (include/uapi/linux/pkt_sched.h).
const (
	fqPacketLimit     = 1
	fqFlowPacketLimit = 2
	fqBucketsLog      = 8
	fqOrphanMask      = 10
	fqHorizon         = 14 // us
	fqHorizonDrop     = 15
)

// parameters are the options of sch_fq that are not left at their defaults.
func (q queueConfig) parameters() []*nl.RtAttr {
	return []*nl.RtAttr{
		nl.NewRtAttr(fqPacketLimit, nl.Uint32Attr(q.packets)),
		nl.NewRtAttr(fqFlowPacketLimit, nl.Uint32Attr(q.flow)),
		nl.NewRtAttr(fqBucketsLog, nl.Uint32Attr(bucketsLog)),
		nl.NewRtAttr(fqOrphanMask, nl.Uint32Attr(orphanMask)),
		nl.NewRtAttr(fqHorizon, nl.Uint32Attr(uint32(q.horizon.Microseconds()))),
		nl.NewRtAttr(fqHorizonDrop, []byte{1}),
	}
}

// fq returns an fq with the parameters of q.
func (q queueConfig) fq(handle, parent uint32) qdisc {
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	for _, p := range q.parameters() {
		options.AddChild(p)
	}
	return qdisc{Kind: "fq", Handle: handle, Parent: parent, Options: options.Serialize()}
}

// matches reports whether d is an fq with the parameters of q.
func (q queueConfig) matches(d *qdisc) bool {
	if d.Kind != "fq" || len(d.Options) < unix.SizeofRtAttr {
		return false
	}
	present, err := nl.ParseRouteAttrAsMap(d.Options[unix.SizeofRtAttr:])
	if err != nil {
		return false
	}
	for _, p := range q.parameters() {
		if !bytes.Equal(present[p.Type].Value, p.Data) {
			return false
		}
	}
	return true
}

// errNoFQ says that the kernel cannot delay packets.
var errNoFQ = errors.New(`this kernel has no sch_fq, which mode = "shape" needs: load the module with "modprobe sch_fq", write mode = "police", or use a [[listen]] instead`)

// errQueueChanged says that the queue of an interface was modified. setUpQueue repairs it.
var errQueueChanged = errors.New("its qdisc was modified externally")

// setUpQueue adds q to an interface. The qdiscs there are passed to keep before they are
// replaced, and restored on an error. An existing queue of ours gets the parameters of q
// and keeps its packets.
func setUpQueue(l netlink.Link, q queueConfig, keep func(savedQdiscs) error) error {
	all, err := qdiscs(l)
	if err != nil {
		return err
	}
	if len(leavesOf(all)) > 0 {
		return updateLeaves(l, q)
	}
	was, err := capture(l, all)
	if err != nil {
		return err
	}
	if err := keep(was); err != nil {
		return err
	}
	if err = addRoot(l, q); err == nil {
		err = updateLeaves(l, q)
	}
	if err != nil {
		return errors.Join(err, restoreQueue(l, was))
	}
	return nil
}

// addRoot adds the queue's root qdisc to an interface.
func addRoot(l netlink.Link, q queueConfig) error {
	if l.Attrs().NumTxQueues > 1 {
		err := replaceQdisc(l, qdisc{Kind: "mq", Handle: ownHandle, Parent: netlink.HANDLE_ROOT})
		if !errors.Is(err, unix.EOPNOTSUPP) {
			return err
		}
	}
	return replaceQdisc(l, q.fq(ownHandle, netlink.HANDLE_ROOT))
}

// updateLeaves makes each leaf an fq with the parameters of q.
func updateLeaves(l netlink.Link, q queueConfig) error {
	all, err := qdiscs(l)
	if err != nil {
		return err
	}
	for _, d := range leavesOf(all) {
		if q.matches(&d) {
			continue
		}
		if d.Kind != "fq" {
			d.Handle = 0 // a new kind needs a new handle
		}
		if err := replaceQdisc(l, q.fq(d.Handle, d.Parent)); err != nil {
			return err
		}
	}
	return nil
}

// leavesOf returns the qdiscs that must be an fq of the queue: its root, or those of the
// transmit queues in use. Transmit queues enabled later (ethtool -L) get the kernel's
// default. There are none when the root is not the queue's.
func leavesOf(all []qdisc) []qdisc {
	root := rootOf(all)
	switch {
	case root == nil || root.Handle != ownHandle:
		return nil
	case root.Kind == "fq":
		return []qdisc{*root}
	case root.Kind == "mq":
		return slices.DeleteFunc(slices.Clone(all), func(d qdisc) bool { return d.Parent>>16 != ownMajor })
	}
	return nil
}

// checkQueue returns errQueue when an interface no longer has q.
func checkQueue(l netlink.Link, q queueConfig) error {
	all, err := qdiscs(l)
	if err != nil {
		return err
	}
	leaves := leavesOf(all)
	if len(leaves) == 0 || slices.ContainsFunc(leaves, func(d qdisc) bool { return !q.matches(&d) }) {
		return errQueueChanged
	}
	return nil
}

// restoreQueue replaces the queue of an interface by the saved qdiscs. If another tool has
// replaced the queue, its qdisc stays.
func restoreQueue(l netlink.Link, was savedQdiscs) error {
	all, err := qdiscs(l)
	if err != nil {
		return err
	}
	if root := rootOf(all); root == nil || root.Handle != ownHandle {
		return nil
	}
	if err := was.restore(l); err != nil {
		return fmt.Errorf("restore the former qdisc: %w", errors.Join(err, savedQdiscs{}.restore(l)))
	}
	return nil
}

// QueueStatus is the state of the queue of an interface.
type QueueStatus struct {
	Packets, Bytes uint64 // currently queued
	Drops          uint64 // packets dropped since the queue was created, after they were charged
}

// queueStatus returns the state of the point's queue.
func (pt *point) queueStatus() (QueueStatus, error) {
	l, err := pt.link()
	if err != nil {
		return QueueStatus{}, err
	}
	return queueOf(l)
}

// queueOf returns the sum over the transmit queues of an interface.
func queueOf(l netlink.Link) (s QueueStatus, err error) {
	all, err := qdiscs(l)
	if err != nil {
		return s, err
	}
	for _, d := range leavesOf(all) {
		attrs, err := nl.ParseRouteAttrAsMap(d.stats)
		if err != nil {
			return s, fmt.Errorf("statistics of %s's qdisc %s: %w", l.Attrs().Name, d.Kind, err)
		}
		if q := attrs[nl.TCA_STATS_QUEUE].Value; len(q) >= 12 { // struct gnet_stats_queue
			s.Packets += uint64(binary.NativeEndian.Uint32(q))
			s.Bytes += uint64(binary.NativeEndian.Uint32(q[4:]))
			s.Drops += uint64(binary.NativeEndian.Uint32(q[8:]))
		}
	}
	return s, nil
}

// waiting returns the programs' counters of the queue of an interface.
func (k *kernel) waiting(at hookPoint) (w kernelQueue, err error) {
	err = k.QueueCounts.Lookup((uint32(at.ifindex)<<1|u32(!at.ingress))&(k.QueueCounts.MaxEntries()-1), &w)
	return w, err
}

// ProbeShape returns an error when the kernel cannot delay packets, as mode "shape"
// needs. It tries in a temporary network namespace, and returns nil when it is not
// permitted to.
func ProbeShape() error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends, and the namespace with it
		if unix.Unshare(unix.CLONE_NEWNET) != nil {
			result <- nil
			return
		}
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = replaceQdisc(lo, qdisc{Kind: "fq", Handle: ownHandle, Parent: netlink.HANDLE_ROOT})
		}
		if !errors.Is(err, errNoFQ) {
			err = nil
		}
		result <- err
	}()
	return <-result
}
