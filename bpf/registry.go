package bpf

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// registry is what has to be known of the maps beside what is in them: by which
// numbers buckets and programs are marked, how keys are hashed, and what was there
// before. It is kept with the maps, so that a new daemon, or one that is to remove
// every trace, takes over from one that was killed.
type registry struct {
	Format      int // registryFormat
	Hashes      hashes
	Tables      map[uint32]uint32 // slots of tables, by the IDs of policies' maps that may be in force
	Generation  uint32            // of the policy in force, or more
	Limits      map[string]*knownLimit
	Attachments map[string]uint32
	Points      []savedPoint
	Queues      []savedQueue
	Clsacts     []int   // interfaces that had no qdisc clsact
	Network     network // that the interfaces are in

	store *ebpf.Map
}

// network is a network namespace. The cookie is no other one's since boot; the number, which
// people find it by, is that of another one as soon as it is gone.
type network struct{ Cookie, Number uint64 }

// knownLimit is a limit that has been in force, by its name.
type knownLimit struct {
	Number  uint32
	Rates   rates // last in force: a change rescales the buckets
	Slotted slotted
}

// rates is what makes up the rates of a limit's meters.
type rates struct {
	BitsPerSecond uint64
	Packets, New  shaper.Frequency
}

func ratesOf(l *shaper.Limit) rates {
	return rates{BitsPerSecond: l.Rate, Packets: l.Packets, New: l.NewConnections}
}

// meters returns the rates in the order of a limit's meters.
func (r rates) meters() [3]leaky.Rate {
	return [3]leaky.Rate{
		leaky.NewRate(r.BitsPerSecond, 8*time.Second),
		leaky.NewRate(r.Packets.N, r.Packets.Per),
		leaky.NewRate(r.New.N, r.New.Per),
	}
}

// registryFormat is the version of what is in a registry. One of another version
// may say what stood at an interface in a way that is not understood here.
const registryFormat = 1

// registrySpec is one value of JSON: few read it, and seldom.
var registrySpec = ebpf.MapSpec{
	Name: "registry", Type: ebpf.Array, KeySize: 4, ValueSize: 1 << 18, MaxEntries: 1, Pinning: ebpf.PinByName,
}

// openRegistry reads the registry that is pinned in a folder, or makes one.
func openRegistry(folder string) (*registry, error) {
	store, err := ebpf.NewMapWithOptions(&registrySpec, ebpf.MapOptions{PinPath: folder})
	if err != nil {
		return nil, fmt.Errorf("open registry: %w", err)
	}
	r := &registry{Limits: map[string]*knownLimit{}, Attachments: map[string]uint32{}, Network: networkHere(), store: store}
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
			return nil, fmt.Errorf("%s is of another version of shaperd: take it away with \"shaperd detach\" of that version, or remove the folder", folder)
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

// openRegistryHere is openRegistry of a folder whose interfaces are to be those of this network
// namespace: by their numbers, those of another one would be taken for others.
func openRegistryHere(folder string) (*registry, error) {
	r, err := openRegistry(folder)
	here := networkHere()
	if err != nil || r.Network.Cookie == here.Cookie {
		return r, err
	}
	if !r.gone(folder) {
		r.store.Close()
		pins, number := filepath.Dir(folder), r.Network.Number
		return nil, fmt.Errorf("%s is of interfaces in another network namespace, number %d, which may be there still: \"lsns %d\" lists its processes, "+
			"and \"nsenter --net --target PID shaperd detach --pins %s\" takes away what is attached there; if it shows no process, run \"rm -r %s\"; "+
			"or have [daemon] pin_path name another folder", folder, number, number, pins, pins)
	}
	_ = os.RemoveAll(filepath.Join(folder, "links"))
	_ = os.Mkdir(filepath.Join(folder, "links"), 0o700)
	r.Points, r.Queues, r.Clsacts, r.Network = nil, nil, nil, here
	return r, r.save()
}

// gone reports whether nothing is left of what r, which is kept in a folder, says of interfaces:
// the kernel ends the links at an interface that is removed, as all are with their network
// namespace. Where there are no links, there is no telling.
func (r *registry) gone(folder string) bool {
	removed := map[int]bool{}
	for _, s := range r.Points {
		pins := []string{s.pin(folder) + repliesPin}
		if !s.detours() { // else it is at another interface
			pins = append(pins, s.pin(folder))
		}
		for _, pin := range pins {
			if l, err := link.LoadPinnedLink(pin, nil); err == nil {
				info, err := l.Info()
				removed[s.Ifindex] = removed[s.Ifindex] || err == nil && interfaceOf(info) == 0
				_ = l.Close()
			}
		}
	}
	left := func(ifindex int) bool { return !removed[ifindex] }
	return !slices.ContainsFunc(r.Points, func(s savedPoint) bool { return left(s.Ifindex) }) &&
		!slices.ContainsFunc(r.Queues, func(q savedQueue) bool { return left(q.Ifindex) }) &&
		!slices.ContainsFunc(r.Clsacts, left)
}

func (r *registry) save() error {
	text, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("write registry: %w", err)
	}
	if len(text) > int(registrySpec.ValueSize) {
		return fmt.Errorf("write registry: %d bytes, more than the %d there may be", len(text), registrySpec.ValueSize)
	}
	value := make([]byte, registrySpec.ValueSize)
	copy(value, text)
	if err := r.store.Put(uint32(0), value); err != nil {
		return fmt.Errorf("write registry: %w", err)
	}
	return nil
}

// savedQueue is a queue that is made at an interface, and what stood there.
type savedQueue struct {
	Ifindex int
	Ingress bool // it is behind a detour, and goes with its device
	Former  former
}

func (q *savedQueue) at() side { return side{q.Ifindex, q.Ingress} }

// queueAt returns what is known of a queue, or nil.
func (r *registry) queueAt(at side) *savedQueue {
	for i := range r.Queues {
		if r.Queues[i].at() == at {
			return &r.Queues[i]
		}
	}
	return nil
}

// keepQueue remembers a queue that is about to be made.
func (r *registry) keepQueue(at side, was former) error {
	if q := r.queueAt(at); q != nil {
		q.Former = was
	} else {
		r.Queues = append(r.Queues, savedQueue{at.ifindex, at.ingress, was})
	}
	return r.save()
}

// keepPoint remembers a point that is about to be made, and that its interface has no
// qdisc clsact, if that is so.
func (r *registry) keepPoint(l netlink.Link, s savedPoint) error {
	present, err := clsactOf(l)
	if err != nil {
		return err
	}
	if present == nil && !slices.Contains(r.Clsacts, s.Ifindex) {
		r.Clsacts = append(r.Clsacts, s.Ifindex)
	}
	if !slices.Contains(r.Points, s) {
		r.Points = append(r.Points, s)
	}
	return r.save()
}

// tidy removes the queues that are not needed, and each qdisc clsact that is no use to
// anybody.
func (r *registry) tidy(needed func(side) bool) error {
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
		removed, err := removeClsact(ifindex)
		errs = append(errs, err)
		return removed
	})
	if len(r.Queues)+len(r.Clsacts) != n {
		errs = append(errs, r.save())
	}
	return errors.Join(errs...)
}

// remove removes a queue, and puts back what stood there.
func (q *savedQueue) remove() error {
	if q.Ingress {
		return removeIFB(q.Ifindex)
	}
	l, err := netlink.LinkByIndex(q.Ifindex)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil // it is gone, with its queue
	}
	if err != nil {
		return err
	}
	return restoreQueue(l, q.Former)
}

// Numbers there are, as the programs have them.
var (
	maxLimits      = uint32(256)
	maxAttachments = uint32(len(kernelPolicy{}.Place))
)

// number gives numbers to the limits and attachments of a policy. What an earlier
// one had keeps its number until the numbers run out. An attachment has the number of the
// one that it replaces, if former names one.
func (r *registry) number(p *shaper.Policy, attachments []Attachment, former map[string]string) (numbers, error) {
	n := numbers{limits: map[string]uint32{}, attachments: map[string]uint32{}}
	for i := range p.Len() {
		name := p.Limit(i).Name
		if known := r.Limits[name]; known != nil {
			n.limits[name] = known.Number
		}
	}
	taken := map[uint32]string{}
	for name, known := range r.Limits {
		taken[known.Number] = name
	}
	for i := range p.Len() {
		name := p.Limit(i).Name
		if _, ok := n.limits[name]; ok {
			continue
		}
		number, ok := freeNumber(maxLimits, taken, n.limits)
		if !ok {
			return n, fmt.Errorf("limit %q: no number is left for it", name) // a policy has fewer
		}
		n.limits[name] = number
		taken[number] = name
	}
	taken = map[uint32]string{}
	for name, number := range r.Attachments {
		taken[number] = name
	}
	for _, a := range attachments {
		if number, ok := r.Attachments[a.Name]; ok && former[a.Name] == "" {
			n.attachments[a.Name] = number
		}
	}
	for _, a := range attachments {
		if _, ok := n.attachments[a.Name]; ok {
			continue
		}
		number, ok := r.Attachments[former[a.Name]]
		if !ok || taken[number] != former[a.Name] {
			if number, ok = freeNumber(maxAttachments, taken, n.attachments); !ok {
				return n, fmt.Errorf("attachment %q: no number is left for it", a.Name)
			}
		}
		n.attachments[a.Name] = number
		taken[number] = a.Name
	}
	return n, nil
}

// freeNumber returns a number that nobody has, or else one of somebody who is not
// in use.
func freeNumber(limit uint32, taken map[uint32]string, used map[string]uint32) (uint32, bool) {
	for number := range limit {
		if _, ok := taken[number]; !ok {
			return number, true
		}
	}
	for number := range limit {
		if _, ok := used[taken[number]]; !ok {
			return number, true
		}
	}
	return 0, false
}

// adopt remembers what is in force now.
func (r *registry) adopt(n numbers, p *shaper.Policy) {
	for name, known := range r.Limits {
		for other, number := range n.limits {
			if number == known.Number && other != name {
				delete(r.Limits, name)
			}
		}
	}
	for i := range p.Len() {
		l := p.Limit(i)
		r.Limits[l.Name] = &knownLimit{Number: n.limits[l.Name], Rates: ratesOf(l), Slotted: slottedOf(p, i)}
	}
	for name, number := range r.Attachments {
		for other, taken := range n.attachments {
			if number == taken && other != name {
				delete(r.Attachments, name)
			}
		}
	}
	for name, number := range n.attachments {
		r.Attachments[name] = number
	}
}

// networkHere returns the network namespace of this thread.
func networkHere() (n network) {
	var s unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &s); err == nil {
		n.Number = s.Ino
	}
	if fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0); err == nil {
		n.Cookie, _ = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
		unix.Close(fd)
	}
	return n
}
