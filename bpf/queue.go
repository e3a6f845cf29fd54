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

	"shaperd/leaky"
	"shaperd/shaper"
)

// The queue that holds packets until their departure is sch_fq (net/sched/sch_fq.c):
// it sends each at its stamp. One stands at the root of an interface, or under each of
// its transmit queues.

// queue is what sch_fq is asked for.
type queue struct {
	packets uint32        // it may hold, of all flows
	flow    uint32        // of one
	horizon time.Duration // a later stamp is a mistake
}

// queue returns what an attachment needs of a queue. No more than a.Queue packets wait there
// for their stamps (waiting.h). A quarter more is for those that wait for the interface.
func (a *Attachment) queue() queue {
	return queue{packets: uint32(a.Queue + a.Queue/4), flow: uint32(a.Queue), horizon: shaper.MaxMaxDelay + time.Second}
}

// Holds returns an error when a bucket could have more full packets wait in the queue of a
// than one key gets of it: the queue would refuse what max_delay allows.
func (a *Attachment) Holds(shape *leaky.Shape) error {
	const payload = 1448 // of a full packet of TCP
	if a.Mode != Shape || shape.Bytes.Unlimited() && shape.Packets.Unlimited() {
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
		return fmt.Errorf("%v at this rate may be %d packets, more than the %d of one key that attachment %q has room for: lower max_delay, or raise its \"queue\"",
			shape.MaxDelay.Duration(), n, room, a.Name)
	}
	return nil
}

// Handles of the queue's own, by which it is recognised.
const (
	ownMajor   = 0x5ad
	ownHandle  = ownMajor << 16
	bucketsLog = 16        // of sch_fq's table of flows: 512 KiB a queue
	orphanMask = 1<<20 - 1 // flows of forwarded packets that are told apart
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

// parameters are the options of sch_fq that are not left to it.
func (q queue) parameters() []*nl.RtAttr {
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
func (q queue) fq(handle, parent uint32) qdisc {
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	for _, p := range q.parameters() {
		options.AddChild(p)
	}
	return qdisc{Kind: "fq", Handle: handle, Parent: parent, Options: options.Serialize()}
}

// is reports whether d is an fq with the parameters of q.
func (q queue) is(d *qdisc) bool {
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

// errNoFQ says that the kernel cannot hold packets.
var errNoFQ = errors.New(`this kernel has no sch_fq, which mode = "shape" needs: load the module with "modprobe sch_fq", write mode = "police", or put a [[listen]] in the way instead`)

// errQueue says that the queue of an interface is not as it was made. setUpQueue mends
// it.
var errQueue = errors.New("somebody has changed the queue")

// setUpQueue puts q at an interface. What stands there is given to keep before it is
// removed, and is back when there is an error. A queue of ours that stands there
// already gets the parameters of q, and the packets in it stay.
func setUpQueue(l netlink.Link, q queue, keep func(former) error) error {
	all, err := qdiscs(l)
	if err != nil {
		return err
	}
	if len(leavesOf(all)) > 0 {
		return tune(l, q)
	}
	was, err := capture(l, all)
	if err != nil {
		return err
	}
	if err := keep(was); err != nil {
		return err
	}
	if err = addRoot(l, q); err == nil {
		err = tune(l, q)
	}
	if err != nil {
		return errors.Join(err, restoreQueue(l, was))
	}
	return nil
}

// addRoot puts the queue's root at an interface.
func addRoot(l netlink.Link, q queue) error {
	if l.Attrs().NumTxQueues > 1 {
		err := replaceQdisc(l, qdisc{Kind: "mq", Handle: ownHandle, Parent: netlink.HANDLE_ROOT})
		if !errors.Is(err, unix.EOPNOTSUPP) {
			return err
		}
	}
	return replaceQdisc(l, q.fq(ownHandle, netlink.HANDLE_ROOT))
}

// tune makes an fq with the parameters of q of each that is to be one.
func tune(l netlink.Link, q queue) error {
	all, err := qdiscs(l)
	if err != nil {
		return err
	}
	for _, d := range leavesOf(all) {
		if q.is(&d) {
			continue
		}
		if d.Kind != "fq" {
			d.Handle = 0 // which another kind cannot take over
		}
		if err := replaceQdisc(l, q.fq(d.Handle, d.Parent)); err != nil {
			return err
		}
	}
	return nil
}

// leavesOf returns what is to be an fq of the queue: its root, or what is below the
// transmit queues in use. Below those that come into use later (ethtool -L), the kernel
// puts what it is used to. There is none when the root is not the queue's.
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

// checkQueue returns errQueue when q is not at an interface any more.
func checkQueue(l netlink.Link, q queue) error {
	all, err := qdiscs(l)
	if err != nil {
		return err
	}
	leaves := leavesOf(all)
	if len(leaves) == 0 || slices.ContainsFunc(leaves, func(d qdisc) bool { return !q.is(&d) }) {
		return errQueue
	}
	return nil
}

// restoreQueue removes the queue from an interface and puts back what stood there.
// What somebody else has put in its place stays.
func restoreQueue(l netlink.Link, was former) error {
	all, err := qdiscs(l)
	if err != nil {
		return err
	}
	if root := rootOf(all); root == nil || root.Handle != ownHandle {
		return nil
	}
	if err := was.putBack(l); err != nil {
		return fmt.Errorf("put back what stood there: %w", errors.Join(err, former{}.putBack(l)))
	}
	return nil
}

// QueueStatus is the queue of an interface.
type QueueStatus struct {
	Packets, Bytes uint64 // in it now
	Drops          uint64 // since it was made: of packets that had been charged
}

// queueStatus is that of the interface that holds packets.
func (pt *point) queueStatus() (QueueStatus, error) {
	l, err := pt.link()
	if err != nil {
		return QueueStatus{}, err
	}
	return queueOf(l)
}

// queueOf sums up over the transmit queues of an interface.
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

// waiting returns what the programs know of the queue of an interface.
func (k *kernel) waiting(at side) (w kernelWaiting, err error) {
	err = k.Queued.Lookup((uint32(at.ifindex)<<1|number(!at.ingress))&(k.Queued.MaxEntries()-1), &w)
	return w, err
}

// ProbeShape returns an error when the kernel cannot hold packets, as mode "shape"
// needs. It tries in a network namespace that is gone afterwards; nil is also for what
// it may not try.
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
