// Package segments maps addresses to numbers. The address space of a family is cut into
// segments of one number each: a lookup is one binary search, whatever the number of prefixes
// and ranges that a map was built from.
package segments

import (
	"iter"
	"net/netip"
	"slices"
)

// Map maps addresses to numbers. The zero Map maps all to 0. Once its families are built it is
// immutable: any number of goroutines may read it.
type Map struct {
	V4 Family[Addr4]
	V6 Family[Addr6]
}

// Family maps the addresses of a family. It takes 8 bytes per IPv4 segment and 20 per IPv6 one,
// and at most 256 KiB for an index.
type Family[A Address[A]] struct {
	start []A
	value []uint32 // from start to the address before the next start, or to the end of the space
	index index
}

// Set gives v to all addresses from start on. Calls must be in ascending order; the later of two
// with the same start counts.
func (f *Family[A]) Set(start A, v uint32) {
	if n := len(f.start); n > 0 && f.start[n-1] == start {
		f.start, f.value = f.start[:n-1], f.value[:n-1]
	}
	if n := len(f.value); n == 0 || f.value[n-1] != v {
		f.start, f.value = append(f.start, start), append(f.value, v)
	}
}

// Build completes the family after the last Set. It drops unused capacity.
func (f *Family[A]) Build() {
	f.start, f.value = slices.Clone(f.start), slices.Clone(f.value)
	if len(f.start) >= minIndexed {
		f.index = makeIndex(f.start)
	}
}

// All yields the start of each segment with its number. Adjacent segments have different
// numbers; addresses below the first start have 0.
func (f *Family[A]) All() iter.Seq2[A, uint32] {
	return func(yield func(A, uint32) bool) {
		for i, start := range f.start {
			if !yield(start, f.value[i]) {
				return
			}
		}
	}
}

// Lookup returns the number of an address, which must be valid. Its zone is ignored.
func (m *Map) Lookup(addr netip.Addr) uint32 {
	if addr.Is4() {
		return m.lookup4(ToAddr4(addr))
	}
	return m.lookup6(ToAddr6(addr))
}

// lookup4 and lookup6 are separate, since in one generic function every comparison
// would be a call. The result is the last segment that starts at or below a.
func (m *Map) lookup4(a Addr4) uint32 {
	lo, hi := 0, len(m.V4.start)
	if hi >= minIndexed {
		lo, hi = m.V4.index.find(a.top())
	}
	for lo < hi {
		mid := lo + (hi-lo)/2
		if m.V4.start[mid] <= a {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == 0 {
		return 0
	}
	return m.V4.value[lo-1]
}

func (m *Map) lookup6(a Addr6) uint32 {
	lo, hi := 0, len(m.V6.start)
	if hi >= minIndexed {
		lo, hi = m.V6.index.find(a.top())
	}
	for lo < hi {
		mid := lo + (hi-lo)/2
		if s := m.V6.start[mid]; s.Hi < a.Hi || s.Hi == a.Hi && s.Lo <= a.Lo {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == 0 {
		return 0
	}
	return m.V6.value[lo-1]
}
