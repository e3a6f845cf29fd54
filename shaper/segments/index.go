package segments

import "math/bits"

// maxIndexBits bounds an index to 1<<maxIndexBits buckets of 4 bytes.
const maxIndexBits = 16

// minIndexed is the number of segments from which an index pays off.
const minIndexed = 64

// index divides the space between the first and the last segment's start into equal
// buckets, about as many as segments, so that a lookup searches few segments: about 7 of
// 467,000 for the IPv4 Internet.
type index struct {
	base  uint64 // top of the lowest start
	shift uint   // log2 of a bucket's width in tops
	// below[i] is the number of segments that start below bucket i; the last
	// element, beyond all buckets, is the number of all segments.
	below []uint32
}

// makeIndex returns an index of ascending starts, of which there is at least one.
func makeIndex[A Address[A]](starts []A) index {
	x := index{base: starts[0].top()}
	span := starts[len(starts)-1].top() - x.base
	x.shift = uint(max(0, bits.Len64(span)-min(maxIndexBits, bits.Len(uint(len(starts))))))
	x.below = make([]uint32, span>>x.shift+2)
	for _, start := range starts {
		x.below[(start.top()-x.base)>>x.shift+1]++
	}
	for i := 1; i < len(x.below); i++ {
		x.below[i] += x.below[i-1]
	}
	return x
}

// find returns the bounds of the search for an address with the given top:
// segments below lo start below it, segments from hi on start above it.
func (x *index) find(top uint64) (lo, hi int) {
	if top < x.base {
		return 0, 0
	}
	last := uint64(len(x.below) - 1)
	i := min((top-x.base)>>x.shift, last)
	return int(x.below[i]), int(x.below[min(i+1, last)])
}
