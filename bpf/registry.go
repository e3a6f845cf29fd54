// Owner: Plane.mu. Changes of attachments need Plane.changeMu too, which suffices to read.

package bpf

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"shaperd.dev/shaperd/bpf/internal/attach"
	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// registry is the metadata of the maps: the numbers that buckets and programs refer to, the
// hash multipliers, and the former state of the interfaces. It is pinned with the maps, so that
// a new daemon can take over from a killed one, and Detach can clean up after it.
type registry struct {
	Format      int // registryFormat
	Hashes      hashes
	Tables      map[uint32]uint32 // slots of tables, by the map IDs of policies that may be current
	Generation  uint32            // of the current policy, or higher
	Limits      map[string]*knownLimit
	Attachments map[string]uint32
	Cgroups     map[string]uint32 `json:",omitempty"` // of the current policy
	Points      []savedPoint
	Queues      []savedQueue
	Clsacts     []int   // interfaces without a qdisc clsact before shaperd
	Network     network // namespace of the interfaces

	store *ebpf.Map
}

// knownLimit is the registry entry of a limit of a current or former policy.
type knownLimit struct {
	Number  uint32
	Rates   rates // last active rates: a change rescales the buckets
	Slotted slotShifts
}

// rates are the configured rates of a limit's meters.
type rates struct {
	BitsPerSecond uint64
	Packets, New  shaper.Frequency
	Windows       bool `json:",omitempty"` // New counts in fixed windows
}

func ratesOf(l *shaper.Limit) rates {
	return rates{BitsPerSecond: l.Rate, Packets: l.Packets, New: l.NewConnections, Windows: l.Algorithm == shaper.FixedWindow}
}

// meterRate is the rate of a meter, which counts in fixed windows unless the window is 0.
type meterRate struct {
	leaky.Rate
	window leaky.Time
}

// meters returns the rates in the order of a limit's meters.
func (r rates) meters() [3]meterRate {
	connections := meterRate{Rate: leaky.NewRate(r.New.N, r.New.Per)}
	if r.Windows {
		connections.Rate, _ = leaky.NewWindow(r.New.N, r.New.Per)
		connections.window = leaky.FromDuration(r.New.Per)
	}
	return [3]meterRate{{Rate: leaky.NewRate(r.BitsPerSecond, 8*time.Second)}, {Rate: leaky.NewRate(r.Packets.N, r.Packets.Per)}, connections}
}

// rateChange is a change of a meter's rate from the first to the second.
type rateChange [2]meterRate

// rescale returns the virtual time of a bucket that had the virtual time until at now.
func (c *rateChange) rescale(until, now leaky.Time) leaky.Time {
	var b leaky.Bucket
	b.SetDrainTimes(0, until.Sub(now), now)
	b.Rescale(&leaky.Shape{Packets: c[0].Rate, Window: c[0].window}, &leaky.Shape{Packets: c[1].Rate, Window: c[1].window}, now)
	return b.DrainedAt()
}

// registryFormat is the version of the registry's content. A registry of another version
// may describe the former qdiscs in a way that this one does not understand.
const registryFormat = 1

// registrySpec is a single JSON value, as it is read rarely.
var registrySpec = ebpf.MapSpec{
	Name: "registry", Type: ebpf.Array, KeySize: 4, ValueSize: 1 << 18, MaxEntries: 1, Pinning: ebpf.PinByName,
}

// openRegistry reads the registry that is pinned in a directory, or creates one.
func openRegistry(dir string) (*registry, error) {
	store, err := ebpf.NewMapWithOptions(&registrySpec, ebpf.MapOptions{PinPath: dir})
	if err != nil {
		return nil, fmt.Errorf("open registry: %w", err)
	}
	r := &registry{Limits: map[string]*knownLimit{}, Attachments: map[string]uint32{}, Network: currentNetwork(), store: store}
	var text []byte
	if err := store.Lookup(uint32(0), &text); err != nil {
		store.Close()
		return nil, fmt.Errorf("read registry: %w", err)
	}
	if text = bytes.TrimRight(text, "\x00"); len(text) > 0 {
		if err := json.Unmarshal(text, r); err != nil {
			store.Close()
			return nil, fmt.Errorf("read registry: %w", err)
		}
		if r.Format != registryFormat {
			store.Close()
			return nil, fmt.Errorf("%s belongs to another version of shaperd: remove it with \"shaperd detach\" of that version, or remove the directory", dir)
		}
		return r, nil
	}
	r.Format = registryFormat
	var random [len(r.Hashes) * 16]byte
	_, _ = rand.Read(random[:])
	for i := range r.Hashes {
		r.Hashes[i] = [2]uint64{binary.NativeEndian.Uint64(random[16*i:]), binary.NativeEndian.Uint64(random[16*i+8:])}
	}
	return r, r.save()
}

func (r *registry) save() error {
	text, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("write registry: %w", err)
	}
	if len(text) > int(registrySpec.ValueSize) {
		return fmt.Errorf("write registry: %d bytes exceed the maximum of %d", len(text), registrySpec.ValueSize)
	}
	value := make([]byte, registrySpec.ValueSize)
	copy(value, text)
	if err := r.store.Put(uint32(0), value); err != nil {
		return fmt.Errorf("write registry: %w", err)
	}
	return nil
}

// savedQueue is the registry entry of a queue, with the qdiscs that it replaced.
type savedQueue struct {
	Ifindex int
	Ingress bool // the queue is at the IFB, and is removed with it
	Former  attach.SavedQdiscs
}

func (q *savedQueue) at() attach.Point { return attach.Point{Ifindex: q.Ifindex, Ingress: q.Ingress} }

// queueAt returns the entry of a queue, or nil.
func (r *registry) queueAt(at attach.Point) *savedQueue {
	for i := range r.Queues {
		if r.Queues[i].at() == at {
			return &r.Queues[i]
		}
	}
	return nil
}

// recordQueue records a queue before it is created.
func (r *registry) recordQueue(at attach.Point, was attach.SavedQdiscs) error {
	if q := r.queueAt(at); q != nil {
		q.Former = was
	} else {
		r.Queues = append(r.Queues, savedQueue{at.Ifindex, at.Ingress, was})
	}
	return r.save()
}

// recordPoint records a point before it is attached, and whether its interface has no qdisc
// clsact.
func (r *registry) recordPoint(l netlink.Link, s savedPoint) error {
	present, err := attach.HasClsact(l)
	if err != nil {
		return err
	}
	if !present && !slices.Contains(r.Clsacts, s.Ifindex) {
		r.Clsacts = append(r.Clsacts, s.Ifindex)
	}
	if !slices.Contains(r.Points, s) {
		r.Points = append(r.Points, s)
	}
	return r.save()
}

// removeUnused removes the queues that are not needed, and each qdisc clsact of ours without
// filters.
func (r *registry) removeUnused(needed func(attach.Point) bool) error {
	var errs []error
	n := len(r.Queues) + len(r.Clsacts)
	r.Queues = slices.DeleteFunc(r.Queues, func(q savedQueue) bool {
		if needed(q.at()) {
			return false
		}
		err := q.remove()
		errs = append(errs, err)
		return err == nil
	})
	r.Clsacts = slices.DeleteFunc(r.Clsacts, func(ifindex int) bool {
		removed, err := attach.RemoveClsact(ifindex)
		errs = append(errs, err)
		return removed
	})
	if len(r.Queues)+len(r.Clsacts) != n {
		errs = append(errs, r.save())
	}
	return errors.Join(errs...)
}

// remove removes a queue and restores the former qdiscs.
func (q *savedQueue) remove() error {
	if q.Ingress {
		return attach.RemoveIFB(q.Ifindex)
	}
	l, err := netlink.LinkByIndex(q.Ifindex)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil // the queue is gone with it
	}
	if err != nil {
		return err
	}
	return attach.RestoreQueue(l, q.Former)
}
