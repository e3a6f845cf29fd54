package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"shaperd/leaky"
	"shaperd/shaper"
)

// kernel is the maps that all programs share, and the policy in them.
type kernel struct {
	kernelMaps
	*registry
	spec      *ebpf.CollectionSpec
	buckets   []kernelBucketLine // as the programs see them
	floors    []uint64           // these and the following are mapped from the kernel too
	slots     []uint64
	calendars []kernelCalendar
	owners    [][2]uint64 // of watches
	watches   []kernelWatchPair

	excess, claims map[slot]uint32 // that reconcile found the last time
}

// abi is the version of the layout of the maps. Maps of another version are not used.
const abi = 7

// folder returns where maps for so many keys are pinned. Maps of another size are
// other maps.
func folder(pins string, keys int) string {
	return filepath.Join(pins, fmt.Sprintf("v%d-%d", abi, keys))
}

// openKernel opens the maps pinned under pins, or makes them, with room for the
// buckets of so many keys. Nothing is enforced before the first swap.
func openKernel(pins string, keys int) (*kernel, error) {
	dir := folder(pins, keys)
	if err := makeFolder(dir); err != nil {
		return nil, fmt.Errorf("[daemon] pin_path: %w", err)
	}
	spec, err := loadKernel()
	if err != nil {
		return nil, err
	}
	lines := bucketLines(keys)
	spec.Maps[kernelMapBuckets].MaxEntries = lines
	spec.Maps[kernelMapFloors].MaxEntries = lines
	spec.Maps[kernelMapHolding].MaxEntries += lines * uint32(len(kernelBucketLine{}.Tag))
	for _, name := range sharedMaps {
		spec.Maps[name].Pinning = ebpf.PinByName
	}
	k := &kernel{spec: spec}
	if err := spec.LoadAndAssign(&k.kernelMaps, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}}); err != nil {
		return nil, tooOld(privileges(fmt.Errorf("create maps: %w", err)))
	}
	if k.registry, err = openRegistryHere(dir); err != nil {
		k.kernelMaps.Close()
		return nil, privileges(err)
	}
	if err := k.share(); err != nil {
		k.close()
		return nil, err
	}
	return k, nil
}

// share maps into memory what the programs share with this process.
func (k *kernel) share() (err error) {
	if k.buckets, err = shared[kernelBucketLine](k.Buckets, 1); err != nil {
		return err
	}
	if k.floors, err = shared[uint64](k.Floors, 1); err != nil {
		return err
	}
	if k.slots, err = shared[uint64](k.ConnSlots, len(kernelSlotLine{}.Word)); err != nil {
		return err
	}
	if k.calendars, err = shared[kernelCalendar](k.Calendars, 1); err != nil {
		return err
	}
	if k.owners, err = shared[[2]uint64](k.Watched, int(maxLimits)); err != nil {
		return err
	}
	k.watches, err = shared[kernelWatchPair](k.Watches, 1)
	return err
}

// shared maps an array, each element of which is n of T, into memory.
func shared[T any](m *ebpf.Map, n int) ([]T, error) {
	n *= int(m.MaxEntries())
	var zero T
	memory, err := unix.Mmap(m.FD(), 0, n*int(unsafe.Sizeof(zero)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %v into memory: %w", m, err)
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&memory[0])), n), nil
}

func unshare[T any](s []T) {
	if s != nil {
		_ = unix.Munmap(unsafe.Slice((*byte)(unsafe.Pointer(&s[0])), len(s)*int(unsafe.Sizeof(s[0]))))
	}
}

// close lets go of the maps. What is pinned stays.
func (k *kernel) close() {
	unshare(k.buckets)
	unshare(k.floors)
	unshare(k.slots)
	unshare(k.calendars)
	unshare(k.owners)
	unshare(k.watches)
	_ = k.store.Close()
	_ = k.kernelMaps.Close()
}

// makeFolder makes a folder on a bpf file system.
func makeFolder(dir string) error {
	parent := dir
	var fs unix.Statfs_t
	for unix.Statfs(parent, &fs) != nil && parent != "/" {
		parent = filepath.Dir(parent)
	}
	if fs.Type != unix.BPF_FS_MAGIC {
		return fmt.Errorf("%s is not on a bpf file system: run \"mount -t bpf bpf /sys/fs/bpf\", or name a folder on one", dir)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return privileges(err)
	}
	return nil
}

// bucketLines returns how many lines hold the buckets of so many keys: twice the
// places, as hardly one key in 100,000 finds no room in a table half full.
func bucketLines(keys int) uint32 {
	places := len(kernelBucketLine{}.Tag)
	return uint32(max(1, (2*keys+places-1)/places))
}

// swap puts a policy in force with one update of a map: each packet meets the old
// policy or the new one. It returns when no packet meets the old one any more.
func (k *kernel) swap(im *image, changes map[uint64][2]leaky.Rate, carries []carry, now func() leaky.Time) error {
	tables, slot, err := k.freeSlot()
	if err != nil {
		return err
	}
	table := k.spec.Maps[kernelMapTables].InnerMap.Copy()
	table.MaxEntries = uint32(len(im.lines))
	lines, err := ebpf.NewMap(table)
	if err != nil {
		return fmt.Errorf("create table: %w", err)
	}
	defer lines.Close()
	keys := make([]uint32, len(im.lines))
	for i := range keys {
		keys[i] = uint32(i)
	}
	if _, err := lines.BatchUpdate(keys, im.lines, nil); err != nil {
		return fmt.Errorf("fill table: %w", err)
	}
	policy, err := ebpf.NewMap(k.spec.Maps[kernelMapPolicies].InnerMap.Copy())
	if err != nil {
		return fmt.Errorf("create policy: %w", err)
	}
	defer policy.Close()
	im.policy.Slot, im.policy.Generation = slot, k.Generation+1
	if err := policy.Put(uint32(0), &im.policy); err != nil {
		return fmt.Errorf("fill policy: %w", err)
	}

	info, err := policy.Info()
	if err != nil {
		return fmt.Errorf("policy: %w", err)
	}
	id, _ := info.ID()
	tables[uint32(id)] = slot
	k.registry.Tables = tables
	k.Generation++
	if err := k.save(); err != nil {
		return err
	}
	if err := k.kernelMaps.Tables.Put(slot, lines); err != nil {
		return fmt.Errorf("add table: %w", err)
	}
	// At the last moment before the swap: what is charged behind it is at the new rate.
	if len(changes) > 0 {
		k.rescale(changes, now)
	}
	for i := range carries {
		k.carryOver(&carries[i], now())
	}
	if err := k.Policies.Put(uint32(0), policy); err != nil {
		for meter, c := range changes {
			changes[meter] = [2]leaky.Rate{c[1], c[0]}
		}
		if len(changes) > 0 {
			k.rescale(changes, now)
		}
		return fmt.Errorf("swap policy: %w", err)
	}
	for i := range carries {
		k.settle(&carries[i])
	}
	k.forgetTimes() // whoever has just taken back a charge ends before the old table is gone
	for other := range k.kernelMaps.Tables.MaxEntries() {
		if other != slot {
			_ = k.kernelMaps.Tables.Delete(other) // takes memory alone
		}
	}
	return nil
}

// freeSlot returns a slot of tables that is not in force, and the one that is by the
// policy that names it. Which policy that is only the map says: a daemon may have been
// killed before a swap, or after it.
func (k *kernel) freeSlot() (inForce map[uint32]uint32, free uint32, err error) {
	inForce = map[uint32]uint32{}
	var id uint32
	err = k.Policies.Lookup(uint32(0), &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return inForce, 0, nil
	}
	if err != nil {
		return nil, 0, fmt.Errorf("policy in force: %w", err)
	}
	slot := k.registry.Tables[id]
	inForce[id] = slot
	return inForce, (slot + 1) % k.kernelMaps.Tables.MaxEntries(), nil
}

// rescale keeps the backlog of the buckets of a meter, in units, when its rate
// changes from old to next. Packets may charge them meanwhile, so the time is read
// anew for each bucket that owes: to walk the table may take longer than any backlog.
func (k *kernel) rescale(meters map[uint64][2]leaky.Rate, now func() leaky.Time) {
	begun := now()
	for i := range k.buckets {
		for j := range k.buckets[i].Tag {
			change, ok := meters[meterOf(atomic.LoadUint64(&k.buckets[i].Tag[j]))]
			if !ok {
				continue
			}
			for {
				until := atomic.LoadUint64(&k.buckets[i].Until[j])
				if leaky.Time(until) <= begun {
					break
				}
				now := now()
				backlog := leaky.Time(until).Sub(now)
				if backlog == 0 || atomic.CompareAndSwapUint64(&k.buckets[i].Until[j], until,
					uint64(now.Add(change[0].Rescale(backlog, change[1])))) {
					break
				}
			}
		}
	}
}

// setReplied says whether a responder has answered at the attachment of a place.
func (k *kernel) setReplied(place uint32, has bool) error { return k.Replied.Put(place, number(has)) }

// adoptPolicy swaps in p and rescales what changed. The registry is to be saved then.
func (k *kernel) adoptPolicy(p *shaper.Policy, n numbers, now func() leaky.Time) error {
	changes := map[uint64][2]leaky.Rate{}
	for i := range p.Len() {
		l := p.Limit(i)
		known := k.Limits[l.Name]
		if known == nil {
			continue
		}
		was, is := known.Rates.meters(), ratesOf(l).meters()
		for j := range is {
			if was[j] != is[j] {
				changes[meterNumber(known.Number, j)] = [2]leaky.Rate{was[j], is[j]}
			}
		}
	}
	im := newImage(p, n, k.Hashes, k.Buckets.MaxEntries())
	if err := k.swap(im, changes, k.carries(p, im), now); err != nil {
		return err
	}
	for _, place := range n.fresh { // an earlier attachment may have had it
		if err := k.setReplied(place, false); err != nil {
			return err
		}
	}
	k.adopt(n, p)
	return nil
}

// beat tells the programs that a daemon is there.
func (k *kernel) beat() error {
	return k.Heartbeats.Put(uint32(0), uint64(monotonic()/leaky.FromDuration(1)))
}

// sharedMaps are the maps that all instances of a program share.
var sharedMaps = []string{
	kernelMapBuckets, kernelMapCalendars, kernelMapConnSlots, kernelMapConnections, kernelMapDepartures, kernelMapFloors, kernelMapForgotten, kernelMapFragments,
	kernelMapHeartbeats, kernelMapHolding, kernelMapKeepers, kernelMapListeners, kernelMapPolicies, kernelMapProxied, kernelMapQueued, kernelMapReplied, kernelMapReversed,
	kernelMapSampleLosses, kernelMapSamples, kernelMapScratches, kernelMapSeen, kernelMapStates, kernelMapStaging,
	kernelMapSuspected, kernelMapTableCounts,
	kernelMapTables, kernelMapTurns, kernelMapWatched, kernelMapWatches,
}

// load loads the programs, for where they are to be attached.
func (k *kernel) load(at kernelAttachment, variables map[string]any, objects any) error {
	spec := k.spec.Copy()
	set := func(name string, value any) error { return spec.Variables[name].Set(value) }
	if err := set(kernelVarHere, at); err != nil {
		return err
	}
	if err := set(kernelVarSlotLines, k.ConnSlots.MaxEntries()); err != nil {
		return err
	}
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return fmt.Errorf("count processors: %w", err)
	}
	if err := set(kernelVarOtherCpus, uint32(cpus-1)); err != nil {
		return err
	}
	if err := set(kernelVarControlBand, number(kernelBefore(6, 7))); err != nil {
		return err
	}
	for name, value := range variables {
		if err := set(name, value); err != nil {
			return err
		}
	}
	err = spec.LoadAndAssign(objects, &ebpf.CollectionOptions{MapReplacements: map[string]*ebpf.Map{
		kernelMapBuckets:      k.Buckets,
		kernelMapCalendars:    k.Calendars,
		kernelMapConnSlots:    k.ConnSlots,
		kernelMapConnections:  k.Connections,
		kernelMapDepartures:   k.Departures,
		kernelMapFloors:       k.Floors,
		kernelMapForgotten:    k.Forgotten,
		kernelMapFragments:    k.Fragments,
		kernelMapHeartbeats:   k.Heartbeats,
		kernelMapHolding:      k.Holding,
		kernelMapKeepers:      k.Keepers,
		kernelMapListeners:    k.Listeners,
		kernelMapPolicies:     k.Policies,
		kernelMapProxied:      k.Proxied,
		kernelMapQueued:       k.Queued,
		kernelMapReplied:      k.Replied,
		kernelMapReversed:     k.Reversed,
		kernelMapSampleLosses: k.SampleLosses,
		kernelMapSamples:      k.Samples,
		kernelMapScratches:    k.Scratches,
		kernelMapSeen:         k.Seen,
		kernelMapStaging:      k.Staging,
		kernelMapStates:       k.States,
		kernelMapTableCounts:  k.TableCounts,
		kernelMapSuspected:    k.Suspected,
		kernelMapTables:       k.kernelMaps.Tables,
		kernelMapTurns:        k.Turns,
		kernelMapWatched:      k.Watched,
		kernelMapWatches:      k.Watches,
	}})
	return privileges(err)
}

// tableCounts returns what has become of places in the table of buckets.
func (k *kernel) tableCounts() (kernelTableCount, error) {
	var cpus []kernelTableCount
	if err := k.TableCounts.Lookup(uint32(0), &cpus); err != nil {
		return kernelTableCount{}, fmt.Errorf("read %s: %w", kernelMapTableCounts, err)
	}
	var sum kernelTableCount
	for _, c := range cpus {
		sum.EvictedDrained += c.EvictedDrained
		sum.EvictedIndebted += c.EvictedIndebted
		sum.Lost += c.Lost
	}
	return sum, nil
}
