// Owner: Plane.mu. The programs change slots at the same time.

package bpf

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
)

// Parts of a word of conn_slots: a count, and above it the tag of a key.
const (
	slotBits  = kernelSlotBitsSLOT_COUNT_BITS
	slotCount = 1<<slotBits - 1
	slotMax   = 1 << (slotBits - 1) // larger counts are claims
)

const (
	noSlot     = uint32(kernelBucketIndexNO_INDEX)
	connClosed = uint64(kernelConnFlagCLOSED)
)

// slotWord identifies a key's word in the slot table.
type slotWord struct {
	index uint32
	tag   uint64
}

// eachConnection calls yield for every connection. Connections that begin or end meanwhile
// may be missing or included.
func (k *kernel) eachConnection(yield func(*kernelTuple, *kernelConn)) error {
	const batch = 4096 // must hold a whole bucket of the map
	keys := make([]kernelTuple, batch)
	values := make([]kernelConn, batch)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := k.Connections.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			yield(&keys[i], &values[i])
		}
		switch {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			return nil
		case err != nil:
			return fmt.Errorf("read %s: %w", kernelMapConnections, err)
		}
	}
}

// heldSlots returns the number of connections that hold each slot word. Those that were closed at
// since or later count as holding their slots.
func (k *kernel) heldSlots(since uint64) (map[slotWord]uint32, error) {
	held := map[slotWord]uint32{}
	err := k.eachConnection(func(_ *kernelTuple, c *kernelConn) {
		if c.State&connClosed != 0 && c.LastSeen < since {
			return
		}
		for i, index := range c.SlotIndex {
			if index != noSlot {
				held[slotWord{index, c.Slot[i] >> slotBits}]++
			}
		}
	})
	return held, err
}

// settlingTime bounds the time between taking a slot and inserting its connection, and between
// reading the clock and releasing slots when connections are closed. Programs do so at once,
// or after a thousand other connections; only preemption takes longer.
const settlingTime = 5 * time.Millisecond

// reconcile compares the slot counts with the connections that hold slots, and releases
// slots that no connection held in this walk and the one before. No cause is known that
// would make it necessary. It returns the number of released slots. now is the programs' time,
// in ns.
//
// A closed connection stays in the map, with its slots and the time, for longer than a
// walk takes: so the counts at the start of the walk are known exactly, however many
// connections begin and end.
func (k *kernel) reconcile(now uint64) (repaired int, err error) {
	start := time.Now()
	words := make(map[slotWord]uint32)
	claims := make(map[slotWord]uint32)
	for i := range k.slots {
		word := atomic.LoadUint64(&k.slots[i])
		switch n := uint32(word & slotCount); {
		case n > slotMax:
			claims[slotWord{uint32(i), word >> slotBits}] = n
		case n > 0:
			words[slotWord{uint32(i), word >> slotBits}] = n
		}
	}
	time.Sleep(settlingTime)
	held, err := k.heldSlots(now - min(now, uint64(settlingTime)))
	if err != nil {
		return 0, err
	}
	if time.Since(start) > k.closedRetention-settlingTime {
		return 0, nil // too slow: closed connections may be gone
	}
	excess := map[slotWord]uint32{}
	for s, n := range words {
		if held := held[s]; n > held {
			excess[s] = n - held
		}
	}
	for s, n := range excess {
		if n = min(n, k.excess[s]); n > 0 {
			repaired += k.subtract(s, n)
			excess[s] -= n
		}
	}
	for s, n := range claims {
		if k.claims[s] == n && atomic.CompareAndSwapUint64(&k.slots[s.index], s.tag<<slotBits|uint64(n), s.tag<<slotBits) {
			repaired++
		}
	}
	k.excess, k.claims = excess, claims
	return repaired, nil
}

// subtract lowers the count of s by up to n, and returns by how much.
func (k *kernel) subtract(s slotWord, n uint32) int {
	for {
		word := atomic.LoadUint64(&k.slots[s.index])
		count := uint32(word & slotCount)
		if word>>slotBits != s.tag || count == 0 || count > slotMax {
			return 0
		}
		n = min(n, count)
		if atomic.CompareAndSwapUint64(&k.slots[s.index], word, word-uint64(n)) {
			return int(n)
		}
	}
}
