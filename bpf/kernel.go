package bpf

import (
	"fmt"

	"github.com/cilium/ebpf"
)

// kernel is the maps that all programs share, and the policy in them.
type kernel struct {
	kernelMaps
	spec *ebpf.CollectionSpec
	slot uint32 // of the table in force
}

// newKernel makes the maps, with room for the buckets of so many keys. Nothing is
// enforced before the first swap.
func newKernel(keys int) (*kernel, error) {
	spec, err := loadKernel()
	if err != nil {
		return nil, err
	}
	k := &kernel{spec: spec}
	lines := bucketLines(keys)
	spec.Maps[kernelMapBuckets].MaxEntries = lines
	spec.Maps[kernelMapFloors].MaxEntries = lines
	if err := spec.LoadAndAssign(&k.kernelMaps, nil); err != nil {
		return nil, fmt.Errorf("create maps: %w", err)
	}
	return k, nil
}

// bucketLines returns how many lines hold the buckets of so many keys: twice the
// places, as hardly one key in 100,000 finds no room in a table half full.
func bucketLines(keys int) uint32 {
	places := len(kernelBucketLine{}.Tag)
	return uint32(max(1, (2*keys+places-1)/places))
}

// swap puts a policy in force with one update of a map: each packet meets the old
// policy or the new one. It returns when no packet meets the old one any more.
func (k *kernel) swap(im *image) error {
	slot := 1 - k.slot
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
	if err := k.Tables.Put(slot, lines); err != nil {
		return fmt.Errorf("add table: %w", err)
	}
	policy, err := ebpf.NewMap(k.spec.Maps[kernelMapPolicies].InnerMap.Copy())
	if err != nil {
		return fmt.Errorf("create policy: %w", err)
	}
	defer policy.Close()
	im.policy.Slot = slot
	if err := policy.Put(uint32(0), &im.policy); err != nil {
		return fmt.Errorf("fill policy: %w", err)
	}
	if err := k.Policies.Put(uint32(0), policy); err != nil {
		return fmt.Errorf("swap policy: %w", err)
	}
	k.slot = slot
	// What is left of the old policy takes memory alone.
	_ = k.Tables.Delete(1 - slot)
	return nil
}

// load loads the programs, for where they are to be attached.
func (k *kernel) load(at kernelAttachment, variables map[string]any, objects any) error {
	spec := k.spec.Copy()
	set := func(name string, value any) error { return spec.Variables[name].Set(value) }
	if err := set(kernelVarHere, at); err != nil {
		return err
	}
	for name, value := range variables {
		if err := set(name, value); err != nil {
			return err
		}
	}
	return spec.LoadAndAssign(objects, &ebpf.CollectionOptions{MapReplacements: k.shared()})
}

// shared returns the maps that all instances of a program share.
func (k *kernel) shared() map[string]*ebpf.Map {
	return map[string]*ebpf.Map{
		kernelMapBuckets:     k.Buckets,
		kernelMapFloors:      k.Floors,
		kernelMapFragments:   k.Fragments,
		kernelMapHeartbeats:  k.Heartbeats,
		kernelMapPolicies:    k.Policies,
		kernelMapScratches:   k.Scratches,
		kernelMapStates:      k.States,
		kernelMapTableCounts: k.TableCounts,
		kernelMapTables:      k.Tables,
	}
}

// tableCounts returns what has become of places in the table of buckets.
func (k *kernel) tableCounts() (kernelTableCount, error) {
	var cpus []kernelTableCount
	if err := k.TableCounts.Lookup(uint32(0), &cpus); err != nil {
		return kernelTableCount{}, fmt.Errorf("read %s: %w", kernelMapTableCounts, err)
	}
	var sum kernelTableCount
	for _, c := range cpus {
		sum.Entries += c.Entries
		sum.EvictedDrained += c.EvictedDrained
		sum.EvictedIndebted += c.EvictedIndebted
		sum.Lost += c.Lost
	}
	return sum, nil
}
