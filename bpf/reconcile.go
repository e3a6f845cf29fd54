package bpf

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
)

// Slots, as slots.h has them.
const (
	slotBits  = 21
	slotCount = 1<<slotBits - 1
	slotMost  = 1 << 20 // what is above is a claim
	nowhere   = 1<<32 - 1
)

// Flags of a connection, as conns.h has them.
const (
	flightEstablished = 1 << 6
	flightClosed      = 1 << 7
)

// slot is a key's word in the table of slots.
type slot struct {
	place uint32
	tag   uint64
}

// eachConnection calls yield with every connection there is. Some of those that come
// or go meanwhile are among them.
func (k *kernel) eachConnection(yield func(*kernelTuple, *kernelFlight)) error {
	const batch = 4096 // a bucket of the map has to fit
	keys := make([]kernelTuple, batch)
	values := make([]kernelFlight, batch)
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

// census is what a walk over the connections found.
type census struct {
	held     map[slot]uint32  // slots, by the connections that hold them
	inFlight map[uint32]int64 // connections that hold a slot, by the number of the limit
	live     int              // connections that are not closed
	gone     int              // those that are only remembered
}

// count walks over the connections. Those that were closed at since or later hold
// their slots in what it finds.
func (k *kernel) count(since uint64) (*census, error) {
	c := &census{held: map[slot]uint32{}, inFlight: map[uint32]int64{}}
	err := k.eachConnection(func(_ *kernelTuple, f *kernelFlight) {
		closed := f.Word&flightClosed != 0
		if closed {
			c.gone++
		} else {
			c.live++
		}
		for i, place := range f.SlotPlace {
			if place == nowhere || closed && f.Seen < since {
				continue
			}
			c.held[slot{place, f.Slot[i] >> slotBits}]++
			if !closed {
				c.inFlight[uint32(f.Slot[i]&slotCount)]++
			}
		}
	})
	return c, err
}

// settling is how long a program that has taken a slot may need to enter its
// connection, or one that closes connections from looking at the clock to giving back
// their slots; it does so at once, or after a thousand others, and nothing else but the
// processor's being taken away comes between.
const settling = 5 * time.Millisecond

// reconcile compares the counts of slots with the connections that hold them, and
// takes away what no connection has held in this walk and the one before. Nothing
// is known that would make that needed. It returns how many slots it took away, and
// how many connections are in flight, by the number of the limit. now is the
// programs' time, in ns.
//
// A connection that is closed stays in the map, with its slots and the time, for
// longer than a walk takes: so what was counted when the walk began is known
// exactly, however many come and go.
func (k *kernel) reconcile(now uint64) (repaired int, inFlight map[uint32]int64, err error) {
	start := time.Now()
	words := make(map[slot]uint32)
	claims := make(map[slot]uint32)
	for i := range k.slots {
		word := atomic.LoadUint64(&k.slots[i])
		switch n := uint32(word & slotCount); {
		case n > slotMost:
			claims[slot{uint32(i), word >> slotBits}] = n
		case n > 0:
			words[slot{uint32(i), word >> slotBits}] = n
		}
	}
	time.Sleep(settling)
	c, err := k.count(now - min(now, uint64(settling)))
	if err != nil {
		return 0, nil, err
	}
	if time.Since(start) > remembered-settling {
		return 0, c.inFlight, nil // too slow to tell
	}
	excess := map[slot]uint32{}
	for s, n := range words {
		if held := c.held[s]; n > held {
			excess[s] = n - held
		}
	}
	for s, n := range excess {
		if n = min(n, k.excess[s]); n > 0 {
			repaired += k.takeAway(s, n)
			excess[s] -= n
		}
	}
	for s, n := range claims {
		if k.claims[s] == n && atomic.CompareAndSwapUint64(&k.slots[s.place], s.tag<<slotBits|uint64(n), s.tag<<slotBits) {
			repaired++
		}
	}
	k.excess, k.claims = excess, claims
	return repaired, c.inFlight, nil
}

// takeAway lowers the count of s by n, and returns by how much it did.
func (k *kernel) takeAway(s slot, n uint32) int {
	for {
		word := atomic.LoadUint64(&k.slots[s.place])
		count := uint32(word & slotCount)
		if word>>slotBits != s.tag || count == 0 || count > slotMost {
			return 0
		}
		n = min(n, count)
		if atomic.CompareAndSwapUint64(&k.slots[s.place], word, word-uint64(n)) {
			return int(n)
		}
	}
}

// remembered is how long a connection that is closed stays in the map at least, in a crowd:
// turn_interval of conns.h.
const remembered = 3 * time.Second
