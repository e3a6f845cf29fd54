package bpf

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

	"shaperd/leaky"
	"shaperd/shaper"
)

// The queue that holds packets until their departure is sch_fq (net/sched/sch_fq.c):
// it sends each at its stamp. One stands at the root of an interface, or under each of
// its transmit queues.

// queue is what sch_fq is asked for.
type queue struct {
	packets uint32        // it may hold, of all flows and of one
	horizon time.Duration // a later stamp is a mistake
}

// queue returns what an attachment needs of a queue. The last packet that is let in
// waits max_delay.
func (a *Attachment) queue() queue {
	return queue{packets: uint32(a.Queue), horizon: shaper.MaxMaxDelay + time.Second}
}

// Holds returns an error when a bucket could have more packets in the queue of a than
// it takes: what has been charged would be dropped.
func (a *Attachment) Holds(shape *leaky.Shape) error {
	const payload = 1448 // of a full packet of TCP
	if a.Mode != Shape {
		return nil
	}
	n := shape.Packets.Units(shape.MaxDelay)
	if shape.Packets.Unlimited() {
		n = shape.Bytes.Units(shape.MaxDelay) / (payload + shape.Overhead)
	}
	if n > uint64(a.Queue) {
		return fmt.Errorf("%v at this rate may be %d packets, more than the %d that attachment %q has room for: lower max_delay, or raise its \"queue\"",
			shape.MaxDelay.Duration(), n, a.Queue, a.Name)
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

// attributes returns the options of sch_fq.
func (q queue) attributes() map[uint16]uint32 {
	return map[uint16]uint32{
		fqPacketLimit:     q.packets,
		fqFlowPacketLimit: q.packets,
		fqBucketsLog:      bucketsLog,
		fqOrphanMask:      orphanMask,
		fqHorizon:         uint32(q.horizon.Microseconds()),
	}
}

func (q queue) options() []byte {
	var b []byte
	attributes := q.attributes()
	for _, kind := range []uint16{fqPacketLimit, fqFlowPacketLimit, fqBucketsLog, fqOrphanMask, fqHorizon} {
		b = append(b, nl.NewRtAttr(int(kind), nl.Uint32Attr(attributes[kind])).Serialize()...)
	}
	return append(b, nl.NewRtAttr(fqHorizonDrop, []byte{1}).Serialize()...)
}

// qdisc is a queueing discipline as the kernel describes it.
type qdisc struct {
	Kind    string
	Handle  uint32
	Parent  uint32
	Options []byte
	stats   []byte
}

// former is what stood at the root of an interface before the queue. Nothing, when it
// was what the kernel puts there by itself.
type former struct {
	Root     *qdisc
	Children []qdisc // of mq
}

// errNoFQ says that the kernel cannot hold packets.
var errNoFQ = errors.New(`this kernel has no sch_fq, which mode = "shape" needs: load the module with "modprobe sch_fq", write mode = "police", or put a [[listen]] in the way instead`)

// setUpQueue puts q at an interface, and returns what stood there; nil when that was
// a queue of its own already, which keeps its packets.
func setUpQueue(l netlink.Link, q queue) (*former, error) {
	all, err := qdiscs(l)
	if err != nil {
		return nil, err
	}
	root := rootOf(all)
	var was *former
	if root == nil || root.Handle != ownHandle {
		if was, err = capture(l, all); err != nil {
			return nil, err
		}
		if err := addRoot(l, q); err != nil {
			return nil, err
		}
	}
	return was, tune(l, q)
}

// addRoot puts the queue's root at an interface.
func addRoot(l netlink.Link, q queue) error {
	if l.Attrs().NumTxQueues > 1 {
		err := replaceQdisc(l, qdisc{Kind: "mq", Handle: ownHandle, Parent: netlink.HANDLE_ROOT})
		if !errors.Is(err, unix.EOPNOTSUPP) {
			return err
		}
	}
	return replaceQdisc(l, qdisc{Kind: "fq", Handle: ownHandle, Parent: netlink.HANDLE_ROOT, Options: q.options()})
}

// tune sets the parameters of each fq of the queue. Packets in one that is there stay.
func tune(l netlink.Link, q queue) error {
	all, err := qdiscs(l)
	if err != nil {
		return err
	}
	root := rootOf(all)
	if root == nil || root.Handle != ownHandle {
		return errors.New("somebody has removed the queue")
	}
	if root.Kind == "fq" {
		return tuneOne(l, *root, q)
	}
	children := childrenOf(all, root)
	for i := range max(len(children), l.Attrs().NumTxQueues) {
		parent := uint32(ownHandle | i + 1)
		at := slices.IndexFunc(children, func(d qdisc) bool { return d.Parent == parent })
		switch {
		case at < 0 && i >= len(children):
			return nil // queues that are not in use
		case at >= 0 && children[at].Kind == "fq":
			err = tuneOne(l, children[at], q)
		default:
			err = replaceQdisc(l, qdisc{Kind: "fq", Parent: parent, Options: q.options()})
		}
		switch {
		case errors.Is(err, errNoFQ):
			return err // which has nothing to do with this queue
		case err != nil:
			return fmt.Errorf("transmit queue %d: %w", i, err)
		}
	}
	return nil
}

func tuneOne(l netlink.Link, d qdisc, q queue) error {
	if q.is(&d) {
		return nil
	}
	d.Options = q.options()
	return replaceQdisc(l, d)
}

// is reports whether d has the parameters of q.
func (q queue) is(d *qdisc) bool {
	present, err := nl.ParseRouteAttrAsMap(d.Options)
	if err != nil {
		return false
	}
	for kind, want := range q.attributes() {
		attr, ok := present[kind]
		if !ok || len(attr.Value) < 4 || binary.NativeEndian.Uint32(attr.Value) != want {
			return false
		}
	}
	return true
}

// checkQueue returns an error when q is not at an interface any more.
func checkQueue(l netlink.Link, q queue) error {
	all, err := qdiscs(l)
	if err != nil {
		return err
	}
	root := rootOf(all)
	if root == nil || root.Handle != ownHandle {
		return errors.New("somebody has removed the queue")
	}
	leaves := []qdisc{*root}
	if root.Kind == "mq" {
		leaves = childrenOf(all, root)
	}
	for i := range leaves {
		if leaves[i].Kind != "fq" || !q.is(&leaves[i]) {
			return errors.New("somebody has changed the queue")
		}
	}
	return nil
}

// restoreQueue removes the queue from an interface and puts back what stood there.
// What somebody else has put in its place stays.
func restoreQueue(l netlink.Link, was *former) error {
	all, err := qdiscs(l)
	if err != nil {
		return err
	}
	root := rootOf(all)
	if root == nil || root.Handle != ownHandle {
		return nil
	}
	if was == nil || was.Root == nil {
		return qdiscRequest(l, unix.RTM_DELQDISC, 0, qdisc{Kind: root.Kind, Handle: ownHandle, Parent: netlink.HANDLE_ROOT})
	}
	if err := replaceQdisc(l, *was.Root); err != nil {
		return err
	}
	for _, d := range was.Children {
		if err := replaceQdisc(l, d); err != nil {
			return err
		}
	}
	return nil
}

// classless are the disciplines that a description of their options brings back.
var classless = []string{
	"bfifo", "cake", "codel", "etf", "fq", "fq_codel", "fq_pie", "hhf", "noqueue",
	"pfifo", "pfifo_fast", "pfifo_head_drop", "pie", "sfq", "tbf",
}

// capture describes what stands at the root of an interface, for restoreQueue.
func capture(l netlink.Link, all []qdisc) (*former, error) {
	root := rootOf(all)
	if root == nil || root.Handle == 0 {
		return &former{}, nil
	}
	was := &former{Root: root}
	for _, d := range childrenOf(all, root) {
		if d.Handle != 0 {
			was.Children = append(was.Children, d)
		}
	}
	for _, d := range append([]qdisc{*root}, was.Children...) {
		if !slices.Contains(classless, d.Kind) && !(d.Kind == "mq" && d.Parent == netlink.HANDLE_ROOT) || len(was.Children) > 0 && root.Kind != "mq" {
			name := l.Attrs().Name
			return nil, fmt.Errorf("%s has a qdisc %s of its own, which mode = \"shape\" would remove for good: write mode = \"police\", attach to another interface, or remove it with \"tc qdisc del dev %s root\"", name, d.Kind, name)
		}
	}
	return was, nil
}

func rootOf(all []qdisc) *qdisc {
	for i := range all {
		if all[i].Parent == netlink.HANDLE_ROOT {
			return &all[i]
		}
	}
	return nil
}

func childrenOf(all []qdisc, root *qdisc) (children []qdisc) {
	for _, d := range all {
		if d.Parent != netlink.HANDLE_ROOT && d.Parent>>16 == root.Handle>>16 {
			children = append(children, d)
		}
	}
	return children
}

// qdiscs returns the disciplines of an interface.
func qdiscs(l netlink.Link) ([]qdisc, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETQDISC, unix.NLM_F_DUMP)
	req.AddData(&nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(l.Attrs().Index)})
	messages, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWQDISC)
	if err != nil {
		return nil, fmt.Errorf("list qdiscs: %w", err)
	}
	var all []qdisc
	for _, m := range messages {
		msg := nl.DeserializeTcMsg(m)
		if msg.Ifindex != int32(l.Attrs().Index) {
			continue
		}
		attrs, err := nl.ParseRouteAttrAsMap(m[msg.Len():])
		if err != nil {
			return nil, fmt.Errorf("list qdiscs: %w", err)
		}
		all = append(all, qdisc{
			Kind:    string(bytes.TrimRight(attrs[nl.TCA_KIND].Value, "\x00")),
			Handle:  msg.Handle,
			Parent:  msg.Parent,
			Options: attrs[nl.TCA_OPTIONS].Value,
			stats:   attrs[nl.TCA_STATS2].Value,
		})
	}
	return all, nil
}

func replaceQdisc(l netlink.Link, d qdisc) error {
	err := qdiscRequest(l, unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, d)
	if errors.Is(err, unix.ENOENT) && d.Kind == "fq" {
		return errNoFQ
	}
	return err
}

func qdiscRequest(l netlink.Link, kind, flags int, d qdisc) error {
	req := nl.NewNetlinkRequest(kind, flags|unix.NLM_F_ACK)
	req.AddData(&nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(l.Attrs().Index), Handle: d.Handle, Parent: d.Parent})
	req.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated(d.Kind)))
	if len(d.Options) > 0 {
		req.AddData(nl.NewRtAttr(nl.TCA_OPTIONS, d.Options))
	}
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil {
		return fmt.Errorf("qdisc %s: %w", d.Kind, err)
	}
	return nil
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
