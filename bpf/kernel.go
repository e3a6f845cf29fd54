// Owner: Plane.mu. Heartbeats and marks of sockets need none; load needs Plane.changeMu alone.

package bpf

import (
	"fmt"
	"reflect"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky"
)

// kernel holds the maps that all programs share, with the policy in them.
type kernel struct {
	kernelMaps
	*registry
	spec       *ebpf.CollectionSpec
	buckets    []kernelBucketLine // this and the following slices are mapped from the kernel
	floors     []uint64
	slots      []uint64
	calendars  []kernelCalendar
	owners     [][2]uint64 // owners of the monitors
	monitors   []kernelMonitorPair
	leases     []kernelLeaseSlot
	coldFloors []uint64
	bursts     []uint64 // of shared limits, by meter less one
	hotLines   []kernelHotLine
	hotBuckets []kernelHotBucket
	cooled     map[int]uint64      // when hot buckets became cold, by index; ticks of CLOCK_BOOTTIME
	lacking    map[uint64]hotParts // hot buckets without room, by tag: all cold ones have no more than these
	retryAt    uint64              // when to look for room for them again

	cgroups map[uint32]cgroupID // those in the map, by number

	closedRetention time.Duration       // minimum time for which a closed connection stays in the map, when that is crowded
	excess, claims  map[slotWord]uint32 // found by the last reconcile
}

// connectionEntries is the size of the table of connections if it is not that of the programs. Tests
// make it smaller, since a large table takes 0.2 s to create.
var connectionEntries uint32

// openKernel opens the maps pinned under pins, or creates them, with buckets for the given
// number of keys. Nothing is enforced before the first swap. Each map is pinned as it is created,
// and the registry last: after a daemon that was killed meanwhile, the next one creates the rest.
func openKernel(pins string, keys int) (*kernel, error) {
	dir := pinDir(pins, keys)
	if err := makePinDir(dir); err != nil {
		return nil, fmt.Errorf("[daemon] pin_path: %w", err)
	}
	spec, err := loadKernel()
	if err != nil {
		return nil, err
	}
	lines := bucketLines(keys)
	spec.Maps[kernelMapBuckets].MaxEntries = lines
	spec.Maps[kernelMapFloors].MaxEntries = lines
	spec.Maps[kernelMapKeyQueued].MaxEntries += lines * uint32(len(kernelBucketLine{}.Tag))
	if connectionEntries > 0 {
		spec.Maps[kernelMapConnections].MaxEntries = connectionEntries
	}
	k := &kernel{spec: spec, cooled: map[int]uint64{}, lacking: map[uint64]hotParts{}, cgroups: map[uint32]cgroupID{}}
	for name := range k.byName() {
		spec.Maps[name].Pinning = ebpf.PinByName
	}
	if err := spec.Variables[kernelVarRecheckInterval].Get(&k.closedRetention); err != nil {
		return nil, err
	}
	if err := spec.LoadAndAssign(&k.kernelMaps, &ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}}); err != nil {
		return nil, explainOldKernel(explainPermission(fmt.Errorf("create maps: %w", err)))
	}
	if k.registry, err = openRegistryInNetwork(dir); err != nil {
		k.kernelMaps.Close()
		return nil, explainPermission(err)
	}
	if err := k.share(); err != nil {
		k.close()
		return nil, err
	}
	return k, nil
}

// byName returns the maps that all programs share, by name.
func (m *kernelMaps) byName() map[string]*ebpf.Map {
	all := map[string]*ebpf.Map{}
	v := reflect.ValueOf(m).Elem()
	for i := range v.NumField() {
		all[v.Type().Field(i).Tag.Get("ebpf")] = v.Field(i).Interface().(*ebpf.Map)
	}
	return all
}

// share maps the shared arrays into memory.
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
	if k.owners, err = shared[[2]uint64](k.MonitorOwners, int(maxLimits)); err != nil {
		return err
	}
	if k.monitors, err = shared[kernelMonitorPair](k.Monitors, 1); err != nil {
		return err
	}
	if k.leases, err = shared[kernelLeaseSlot](k.Leases, 1); err != nil {
		return err
	}
	if k.coldFloors, err = shared[uint64](k.ColdFloors, 1); err != nil {
		return err
	}
	if k.bursts, err = shared[uint64](k.SharedBursts, 1); err != nil {
		return err
	}
	if k.hotLines, err = shared[kernelHotLine](k.HotTags, 1); err != nil {
		return err
	}
	k.hotBuckets, err = shared[kernelHotBucket](k.kernelMaps.HotBuckets, 1)
	return err
}

// shared maps an array into memory, each element of which is n values of T.
func shared[T any](m *ebpf.Map, n int) ([]T, error) {
	n *= int(m.MaxEntries())
	var zero T
	memory, err := unix.Mmap(m.FD(), 0, n*int(unsafe.Sizeof(zero)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %v into memory: %w", m, err)
	}
	return unsafe.Slice((*T)(unsafe.Pointer(&memory[0])), n), nil
}

// unshare unmaps an array, once: later its addresses may be those of another one.
func unshare[T any](s *[]T) {
	if a := *s; a != nil {
		*s = nil
		_ = unix.Munmap(unsafe.Slice((*byte)(unsafe.Pointer(&a[0])), len(a)*int(unsafe.Sizeof(a[0]))))
	}
}

// close closes the maps. Pinned maps stay.
func (k *kernel) close() {
	unshare(&k.buckets)
	unshare(&k.floors)
	unshare(&k.slots)
	unshare(&k.calendars)
	unshare(&k.owners)
	unshare(&k.monitors)
	unshare(&k.leases)
	unshare(&k.coldFloors)
	unshare(&k.bursts)
	unshare(&k.hotLines)
	unshare(&k.hotBuckets)
	_ = k.store.Close()
	_ = k.kernelMaps.Close()
}

// bucketLines returns the number of lines for the buckets of the given number of keys: with
// twice the slots, as in a half-full table fewer than one key in 100,000 finds no slot.
func bucketLines(keys int) uint32 {
	slots := len(kernelBucketLine{}.Tag)
	return uint32(max(1, (2*keys+slots-1)/slots))
}

// heartbeat tells the programs that a daemon runs.
func (k *kernel) heartbeat() error {
	return k.Heartbeats.Put(uint32(0), uint64(monotonic()/leaky.FromDuration(1)))
}

// load loads programs for an attachment.
func (k *kernel) load(at kernelConfig, variables map[string]any, objects any) error {
	spec := k.spec.Copy()
	set := func(name string, value any) error { return spec.Variables[name].Set(value) }
	if err := set(kernelVarCfg, at); err != nil {
		return err
	}
	if err := set(kernelVarSlotLines, k.ConnSlots.MaxEntries()); err != nil {
		return err
	}
	if err := set(kernelVarEarlyDropThreshold, uint64(k.Connections.MaxEntries()/2)); err != nil {
		return err
	}
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return fmt.Errorf("count processors: %w", err)
	}
	if err := set(kernelVarOtherCpus, uint32(cpus-1)); err != nil {
		return err
	}
	if err := set(kernelVarControlBand, u32(kernelBefore(6, 7))); err != nil {
		return err
	}
	for name, value := range variables {
		if err := set(name, value); err != nil {
			return err
		}
	}
	err = spec.LoadAndAssign(objects, &ebpf.CollectionOptions{MapReplacements: k.byName()})
	return explainPermission(err)
}

// tableCounts returns the counters of the bucket table.
func (k *kernel) tableCounts() (kernelTableCount, error) {
	var cpus []kernelTableCount
	if err := k.TableCounts.Lookup(uint32(0), &cpus); err != nil {
		return kernelTableCount{}, fmt.Errorf("read %s: %w", kernelMapTableCounts, err)
	}
	var sum kernelTableCount
	for _, c := range cpus {
		sum.EvictedDrained += c.EvictedDrained
		sum.EvictedBacklogged += c.EvictedBacklogged
		sum.InsertFailed += c.InsertFailed
	}
	return sum, nil
}
