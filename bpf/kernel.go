// Owner: Plane.mu. Heartbeats and marks of sockets need none; load needs Plane.changeMu alone.

package bpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// kernel holds the maps that all programs share, with the policy in them.
type kernel struct {
	kernelMaps
	*registry
	spec      *ebpf.CollectionSpec
	buckets   []kernelBucketLine // this and the following slices are mapped from the kernel
	floors    []uint64
	slots     []uint64
	calendars []kernelCalendar
	owners    [][2]uint64 // owners of the monitors
	monitors  []kernelMonitorPair

	closedRetention time.Duration       // minimum time for which a closed connection stays in the map, when that is crowded
	excess, claims  map[slotWord]uint32 // found by the last reconcile
}

// abi is the version of the map layout. Maps of another version are not used.
const abi = 8

// pinDir returns the directory of maps for the given number of keys. Maps of another size are
// other maps.
func pinDir(pins string, keys int) string {
	return filepath.Join(pins, fmt.Sprintf("v%d-%d", abi, keys))
}

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
	k := &kernel{spec: spec}
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
	k.monitors, err = shared[kernelMonitorPair](k.Monitors, 1)
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

func unshare[T any](s []T) {
	if s != nil {
		_ = unix.Munmap(unsafe.Slice((*byte)(unsafe.Pointer(&s[0])), len(s)*int(unsafe.Sizeof(s[0]))))
	}
}

// close closes the maps. Pinned maps stay.
func (k *kernel) close() {
	unshare(k.buckets)
	unshare(k.floors)
	unshare(k.slots)
	unshare(k.calendars)
	unshare(k.owners)
	unshare(k.monitors)
	_ = k.store.Close()
	_ = k.kernelMaps.Close()
}

// makePinDir creates a directory on a bpf file system.
func makePinDir(dir string) error {
	parent := dir
	var fs unix.Statfs_t
	for unix.Statfs(parent, &fs) != nil && parent != "/" {
		parent = filepath.Dir(parent)
	}
	if fs.Type != unix.BPF_FS_MAGIC {
		return fmt.Errorf("%s is not on a bpf file system: run \"mount -t bpf bpf /sys/fs/bpf\", or name a directory on one", dir)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return explainPermission(err)
	}
	return nil
}

// bucketLines returns the number of lines for the buckets of the given number of keys: with
// twice the slots, as in a half-full table fewer than one key in 100,000 finds no slot.
func bucketLines(keys int) uint32 {
	slots := len(kernelBucketLine{}.Tag)
	return uint32(max(1, (2*keys+slots-1)/slots))
}

// swap activates a policy with one map update: each packet meets either the old policy
// or the new one. It returns when no packet meets the old one any more.
func (k *kernel) swap(im *image, changes map[uint64][2]leaky.Rate, carries []migration, now func() leaky.Time) error {
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
	im.policy.Table, im.policy.Generation = slot, k.Generation+1
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
	// Just before the swap: charges after it are at the new rate.
	if len(changes) > 0 {
		k.rescale(changes, now)
	}
	for i := range carries {
		k.migrate(&carries[i], now())
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
		k.finishMigration(&carries[i])
	}
	k.resetMeasurements() // programs that have just refunded a charge end before the old table is deleted
	for other := range k.kernelMaps.Tables.MaxEntries() {
		if other != slot {
			_ = k.kernelMaps.Tables.Delete(other) // otherwise it only costs memory
		}
	}
	return nil
}

// freeSlot returns a free slot of the tables, and the slot of the current policy by the ID of
// its map. Only the map of policies tells which one is current: a daemon may have been killed
// before a swap, or after it.
func (k *kernel) freeSlot() (current map[uint32]uint32, free uint32, err error) {
	current = map[uint32]uint32{}
	var id uint32
	err = k.Policies.Lookup(uint32(0), &id)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return current, 0, nil
	}
	if err != nil {
		return nil, 0, fmt.Errorf("current policy: %w", err)
	}
	slot := k.registry.Tables[id]
	current[id] = slot
	return current, (slot + 1) % k.kernelMaps.Tables.MaxEntries(), nil
}

// rescale keeps the backlog of each bucket, in units, when the rates of meters change from
// the first to the second of a pair. Packets may be charged meanwhile, so the time is read
// again for each bucket with a backlog: walking the table may take longer than any backlog.
func (k *kernel) rescale(meters map[uint64][2]leaky.Rate, now func() leaky.Time) {
	begun := now()
	for i := range k.buckets {
		for j := range k.buckets[i].Tag {
			change, ok := meters[meterOf(atomic.LoadUint64(&k.buckets[i].Tag[j]))]
			if !ok {
				continue
			}
			for {
				until := atomic.LoadUint64(&k.buckets[i].DrainedAt[j])
				if leaky.Time(until) <= begun {
					break
				}
				now := now()
				backlog := leaky.Time(until).Sub(now)
				if backlog == 0 || atomic.CompareAndSwapUint64(&k.buckets[i].DrainedAt[j], until,
					uint64(now.Add(change[0].Rescale(backlog, change[1])))) {
					break
				}
			}
		}
	}
}

// setReplySeen sets whether a responder has replied at an attachment.
func (k *kernel) setReplySeen(attachment uint32, seen bool) error {
	return k.ReplySeen.Put(attachment, u32(seen))
}

// installPolicy activates p and rescales the buckets of changed rates. The caller saves the registry.
func (k *kernel) installPolicy(p *shaper.Policy, n numbers, now func() leaky.Time) error {
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
	if err := k.swap(im, changes, k.migrations(p, im), now); err != nil {
		return err
	}
	for _, attachment := range n.moved { // learned at its former interfaces, or by an earlier attachment with this number
		if err := k.setReplySeen(attachment, false); err != nil {
			return err
		}
	}
	k.recordPolicy(n, p)
	return nil
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
