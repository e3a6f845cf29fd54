// Owner: Plane.mu.

package bpf

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// swap activates a policy with one map update: each packet meets either the old policy
// or the new one. It returns when no packet meets the old one any more.
func (k *kernel) swap(im *image, changes map[uint64]rateChange, carries []migration, now func() leaky.Time) error {
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
			changes[meter] = rateChange{c[1], c[0]}
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
// the first to the second of a pair.
func (k *kernel) rescale(meters map[uint64]rateChange, now func() leaky.Time) {
	lease := k.lease()
	timeOf := func(s kernelShare) func() leaky.Time {
		return func() leaky.Time {
			s, _ := lease.advance(s, 0, 0, uint64(boottime()))
			return leaky.Time(s.Vtime)
		}
	}
	shared := timeOf(lease.Cold)
	begun, sharedBegun := now(), shared()
	for i := range k.buckets {
		for j := range k.buckets[i].Tag {
			tag := atomic.LoadUint64(&k.buckets[i].Tag[j])
			change, ok := meters[meterOf(tag)]
			if ok && tag&sharedTag == 0 {
				rescaleBucket(&k.buckets[i].DrainedAt[j], change, begun, now)
			} else if ok {
				rescaleBucket(&k.buckets[i].DrainedAt[j], change, sharedBegun, shared)
			}
		}
	}
	for i := range k.hotBuckets {
		b := &k.hotBuckets[i]
		if change, ok := meters[meterOf(*k.hotTag(i))]; ok {
			rescaleBucket(&b.Value, change, 0, timeOf(b.share().Share))
		}
	}
}

// rescaleBucket rescales a bucket, unless it had drained at begun. Packets may be charged meanwhile, so the
// time is read again for each bucket with a backlog: walking the table may take longer than any backlog.
func rescaleBucket(bucket *uint64, change rateChange, begun leaky.Time, now func() leaky.Time) {
	for {
		until := atomic.LoadUint64(bucket)
		if leaky.Time(until) <= begun {
			return
		}
		now := now()
		if leaky.Time(until) <= now || atomic.CompareAndSwapUint64(bucket, until, uint64(change.rescale(leaky.Time(until), now))) {
			return
		}
	}
}

// setReplySeen sets whether a responder has replied at an attachment.
func (k *kernel) setReplySeen(attachment uint32, seen bool) error {
	return k.ReplySeen.Put(attachment, u32(seen))
}

// installPolicy activates p and rescales the buckets of changed rates. The caller saves the registry.
func (k *kernel) installPolicy(p *shaper.Policy, n numbers, now func() leaky.Time) error {
	changes := map[uint64]rateChange{}
	for i := range p.Len() {
		l := p.Limit(i)
		known := k.Limits[l.Name]
		if known == nil {
			continue
		}
		was, is := known.Rates.meters(), ratesOf(l).meters()
		for j := range is {
			if was[j] != is[j] {
				changes[meterNumber(known.Number, j)] = rateChange{was[j], is[j]}
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
