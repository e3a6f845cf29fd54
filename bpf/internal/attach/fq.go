package attach

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// FQ is the queue that holds packets until their departure, sch_fq (net/sched/sch_fq.c): it sends
// each at its time stamp. There is one at the root of an interface, or one for each of its
// transmit queues.
type FQ struct {
	// Packets is the most packets that one queue holds. It drops those beyond.
	Packets uint32

	// Flow is the most packets of one flow.
	Flow uint32

	// Horizon is how far ahead a time stamp may be. Packets with a later one are dropped.
	Horizon time.Duration
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
func (q FQ) parameters() []*nl.RtAttr {
	return []*nl.RtAttr{
		nl.NewRtAttr(fqPacketLimit, nl.Uint32Attr(q.Packets)),
		nl.NewRtAttr(fqFlowPacketLimit, nl.Uint32Attr(q.Flow)),
		nl.NewRtAttr(fqBucketsLog, nl.Uint32Attr(bucketsLog)),
		nl.NewRtAttr(fqOrphanMask, nl.Uint32Attr(orphanMask)),
		nl.NewRtAttr(fqHorizon, nl.Uint32Attr(uint32(q.Horizon.Microseconds()))),
		nl.NewRtAttr(fqHorizonDrop, []byte{1}),
	}
}

// qdisc returns an fq with the parameters of q.
func (q FQ) qdisc(handle, parent uint32) Qdisc {
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	for _, p := range q.parameters() {
		options.AddChild(p)
	}
	return Qdisc{Kind: "fq", Handle: handle, Parent: parent, Options: options.Serialize()}
}

// matches reports whether d is an fq with the parameters of q.
func (q FQ) matches(d *Qdisc) bool {
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

// ErrNoFQ says that the kernel cannot delay packets, as mode "shape" needs.
var ErrNoFQ = errors.New(`this kernel has no sch_fq, which mode = "shape" needs: load the module with "modprobe sch_fq", write mode = "police", or use a [[listen]] instead`)

// ErrQueueChanged says that the queue of an interface was modified. [FQ.SetUp] repairs it.
var ErrQueueChanged = errors.New("its qdisc was modified externally")

// SetUp adds q to an interface. The qdiscs there are passed to keep before they are
// replaced, and restored on an error. An existing queue of ours gets the parameters of q
// and keeps its packets.
func (q FQ) SetUp(l netlink.Link, keep func(SavedQdiscs) error) error {
	all, err := Qdiscs(l)
	if err != nil {
		return err
	}
	if len(leavesOf(all)) > 0 {
		return q.updateLeaves(l)
	}
	was, err := Capture(l)
	if err != nil {
		return err
	}
	if err := keep(was); err != nil {
		return err
	}
	if err = q.addRoot(l); err == nil {
		err = q.updateLeaves(l)
	}
	if err != nil {
		return errors.Join(err, RestoreQueue(l, was))
	}
	return nil
}

// addRoot adds the queue's root qdisc to an interface.
func (q FQ) addRoot(l netlink.Link) error {
	if l.Attrs().NumTxQueues > 1 {
		err := replaceQdisc(l, Qdisc{Kind: "mq", Handle: ownHandle, Parent: netlink.HANDLE_ROOT})
		if !errors.Is(err, unix.EOPNOTSUPP) {
			return err
		}
	}
	return replaceQdisc(l, q.qdisc(ownHandle, netlink.HANDLE_ROOT))
}

// updateLeaves makes each leaf an fq with the parameters of q.
func (q FQ) updateLeaves(l netlink.Link) error {
	all, err := Qdiscs(l)
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
		if err := replaceQdisc(l, q.qdisc(d.Handle, d.Parent)); err != nil {
			return err
		}
	}
	return nil
}

// leavesOf returns the qdiscs that must be an fq of the queue: its root, or those of the
// transmit queues in use. Transmit queues enabled later (ethtool -L) get the kernel's
// default. There are none when the root is not the queue's.
func leavesOf(all []Qdisc) []Qdisc {
	root := rootOf(all)
	switch {
	case root == nil || root.Handle != ownHandle:
		return nil
	case root.Kind == "fq":
		return []Qdisc{*root}
	case root.Kind == "mq":
		return slices.DeleteFunc(slices.Clone(all), func(d Qdisc) bool { return d.Parent>>16 != ownMajor })
	}
	return nil
}

// Check returns ErrQueueChanged when an interface no longer has q.
func (q FQ) Check(l netlink.Link) error {
	all, err := Qdiscs(l)
	if err != nil {
		return err
	}
	leaves := leavesOf(all)
	if len(leaves) == 0 || slices.ContainsFunc(leaves, func(d Qdisc) bool { return !q.matches(&d) }) {
		return ErrQueueChanged
	}
	return nil
}

// QueueStatus is the state of the queue of an interface.
type QueueStatus struct {
	Packets, Bytes uint64 // currently queued
	Drops          uint64 // packets dropped since the queue was created, after they were charged
}

// QueueOf returns the state of the queue of an interface: the sum over its transmit queues.
func QueueOf(l netlink.Link) (s QueueStatus, err error) {
	all, err := Qdiscs(l)
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

// ProbeFQ returns ErrNoFQ when the kernel has no sch_fq. It tries in a temporary network
// namespace, and returns nil when it is not permitted to.
func ProbeFQ() error {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends, and the namespace with it
		if unix.Unshare(unix.CLONE_NEWNET) != nil {
			result <- nil
			return
		}
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			err = replaceQdisc(lo, Qdisc{Kind: "fq", Handle: ownHandle, Parent: netlink.HANDLE_ROOT})
		}
		if !errors.Is(err, ErrNoFQ) {
			err = nil
		}
		result <- err
	}()
	return <-result
}
