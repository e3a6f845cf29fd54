package bpf

import (
	"iter"
	"math"
	"unsafe"

	"shaperd.dev/shaperd/shaper"
	"shaperd.dev/shaperd/shaper/segments"
)

// indexThreshold is the number of lines from which an index by the upper 16 bits of a
// number, of 512 KiB, pays.
const indexThreshold = 512

// segments4 encodes segments of 32-bit numbers.
func (im *image) segments4(all iter.Seq2[uint32, shaper.Class]) kernelSegments {
	s := kernelSegments{Line: uint32(len(im.lines))}
	var last *kernelLine4
	var first shaper.Class
	var starts []uint32 // first numbers of the lines
	n := 0
	for start, c := range all {
		if n == 0 {
			first = c
		}
		if n%len(last.Start) == 0 {
			im.lines = append(im.lines, kernelLine{})
			starts = append(starts, start)
		}
		last = (*kernelLine4)(unsafe.Pointer(&im.lines[len(im.lines)-1]))
		last.Start[last.Used] = start
		last.Asn[last.Used] = c.ASN
		last.Set[last.Used] = im.setNumber(c.Set)
		last.Used++
		n++
	}
	if n == 1 && first.ASN == 0 {
		im.lines = im.lines[:s.Line]
		return kernelSegments{Set: uint64(first.Set)}
	}
	s.Lines = uint32(len(im.lines)) - s.Line
	if s.Lines >= indexThreshold {
		s.Index = uint32(len(im.lines))
		im.index(starts)
	}
	return s
}

// index encodes, for each value of the upper 16 bits, the range of lines that may contain
// such a number: the first line, and the one after the last.
func (im *image) index(starts []uint32) {
	low, high := 0, 0
	for upper := uint64(0); upper < 1<<16; upper++ {
		if upper%8 == 0 {
			im.lines = append(im.lines, kernelLine{})
		}
		for low+1 < len(starts) && uint64(starts[low+1]) <= upper<<16 {
			low++
		}
		for high < len(starts) && uint64(starts[high]) < (upper+1)<<16 {
			high++
		}
		im.lines[len(im.lines)-1].Word[upper%8] = uint64(low) | uint64(high)<<32
	}
}

// segments6 encodes segments of 128-bit numbers, and a search tree above them.
func (im *image) segments6(all iter.Seq2[segments.Addr6, shaper.Class]) kernelSegments {
	var leaves []kernelLine6
	for start, c := range all {
		if n := len(leaves); n == 0 || leaves[n-1].Used == uint64(len(leaves[n-1].Start)) {
			leaves = append(leaves, kernelLine6{})
		}
		last := &leaves[len(leaves)-1]
		last.Start[last.Used] = [2]uint64{start.Hi, start.Lo}
		last.Asn[last.Used] = c.ASN
		last.Set[last.Used] = im.setNumber(c.Set)
		last.Used++
	}
	if len(leaves) == 1 && leaves[0].Used == 1 && leaves[0].Asn[0] == 0 {
		return kernelSegments{Set: uint64(im.setList[leaves[0].Set[0]])}
	}
	s := kernelSegments{Line: uint32(len(im.lines)), Lines: uint32(len(leaves))}
	starts := make([][2]uint64, len(leaves))
	for i := range leaves {
		starts[i] = leaves[i].Start[0]
	}
	im.tree(starts)
	for i := range leaves {
		im.lines = append(im.lines, *(*kernelLine)(unsafe.Pointer(&leaves[i])))
	}
	return s
}

// tree encodes the search tree above lines that begin with starts, level by level from the
// root. Children without a line have the highest address.
func (im *image) tree(starts [][2]uint64) {
	const children = len(kernelNode6{}.Start)
	all := 1 // lines that the tree can address
	for all < len(starts) {
		all *= children
	}
	for below := all / children; below >= 1; below /= children { // lines below a child
		for at := 0; at < all; {
			var n kernelNode6
			for i := range n.Start {
				n.Start[i] = [2]uint64{math.MaxUint64, math.MaxUint64}
				if at < len(starts) {
					n.Start[i] = starts[at]
				}
				at += below
			}
			im.lines = append(im.lines, *(*kernelLine)(unsafe.Pointer(&n)))
		}
	}
}

// setNumber returns the number of a set.
func (im *image) setNumber(set shaper.Set) uint32 {
	n, ok := im.sets[set]
	if !ok {
		n = uint32(len(im.setList))
		im.sets[set] = n
		im.setList = append(im.setList, set)
	}
	return n
}

// asClasses yields segments without an ASN.
func asClasses[K any](all iter.Seq2[K, shaper.Set]) iter.Seq2[K, shaper.Class] {
	return func(yield func(K, shaper.Class) bool) {
		for start, set := range all {
			if !yield(start, shaper.Class{Set: set}) {
				return
			}
		}
	}
}

// countryClasses yields segments of countries in place of ASNs.
func countryClasses[K any](all iter.Seq2[K, shaper.Country]) iter.Seq2[K, shaper.Class] {
	return func(yield func(K, shaper.Class) bool) {
		for start, c := range all {
			if !yield(start, shaper.Class{ASN: uint32(c)}) {
				return
			}
		}
	}
}

// portClasses yields segments of ports as segments of 32-bit numbers.
func portClasses(all iter.Seq2[uint16, shaper.Set]) iter.Seq2[uint32, shaper.Class] {
	return func(yield func(uint32, shaper.Class) bool) {
		for start, c := range asClasses(all) {
			if !yield(uint32(start), c) {
				return
			}
		}
	}
}
