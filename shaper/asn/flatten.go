package asn

import (
	"cmp"
	"fmt"

	"shaperd.dev/shaperd/shaper/segments"
)

// flatten turns the entries of a family, which it sorts and changes in place,
// into segments. The rules:
//
//   - Ranges that overlap must have the same ASN. Overlapping or adjacent ranges of
//     one ASN count as one range.
//   - Equal prefixes must have the same ASN. Otherwise the more specific prefix wins.
//   - A range and a prefix that overlap must have the same ASN, unless the prefix is
//     smaller than the range and inside it; then the prefix wins.
func flatten[A segments.Address[A]](b *builder, f family[A], highest A) (segments.Family[A], error) {
	sortEntries(f.prefixes)
	sortEntries(f.ranges)
	ranges, err := mergeRanges(b, f.ranges)
	if err != nil {
		return segments.Family[A]{}, err
	}

	s := sweep[A]{b: b, highest: highest}
	for prefixes := f.prefixes; len(ranges) > 0 || len(prefixes) > 0; {
		// With equal first addresses the range comes first, as prefixes are checked
		// against it.
		if len(prefixes) == 0 || len(ranges) > 0 && ranges[0].first.Compare(prefixes[0].first) <= 0 {
			err, ranges = s.addRange(ranges[0]), ranges[1:]
		} else {
			err, prefixes = s.addPrefix(prefixes[0]), prefixes[1:]
		}
		if err != nil {
			return segments.Family[A]{}, err
		}
	}
	s.advance(highest)
	s.out.Build()
	return s.out, nil
}

// mergeRanges merges overlapping and adjacent ranges of one ASN. The input is sorted. The
// result has the source of the lowest range.
func mergeRanges[A segments.Address[A]](b *builder, ranges []entry[A]) ([]entry[A], error) {
	out := ranges[:0]
	var reach entry[A] // range with the highest end so far
	for i, r := range ranges {
		overlap := i > 0 && r.first.Compare(reach.last) <= 0
		switch {
		case overlap && (b.strict || r.asn != reach.asn):
			return nil, overlapError(b, reach, r)
		case overlap && r.last.Compare(reach.last) <= 0:
		case overlap, i > 0 && r.first == reach.last.Next() && r.asn == reach.asn:
			reach, out[len(out)-1].last = r, r.last
		default:
			reach, out = r, append(out, r)
		}
	}
	return out, nil
}

// sweep walks up the address space and outputs segments. Ranges and prefixes are added in
// the order of their first addresses.
type sweep[A segments.Address[A]] struct {
	b       *builder
	highest A
	out     segments.Family[A]
	pos     A // everything below pos is in out

	inRange bool
	cur     entry[A]   // range that contains pos, if inRange
	stack   []entry[A] // prefixes that contain pos, the most specific last
}

// dropEnded drops the range and prefixes that end below pos.
func (s *sweep[A]) dropEnded() {
	for n := len(s.stack); n > 0 && s.stack[n-1].last.Compare(s.pos) < 0; n-- {
		s.stack = s.stack[:n-1]
	}
	s.inRange = s.inRange && s.cur.last.Compare(s.pos) >= 0
}

// advance outputs everything from pos to last, and moves pos beyond it. At
// the end of the address space pos wraps around, and the sweep ends.
func (s *sweep[A]) advance(last A) {
	for {
		s.dropEnded()
		top := s.cur
		if n := len(s.stack); n > 0 {
			top = s.stack[n-1]
		} else if !s.inRange {
			s.pos = last.Next()
			return
		}
		end := top.last
		if last.Compare(end) < 0 {
			end = last
		}
		s.out.Set(s.pos, top.asn)
		if end != s.highest {
			s.out.Set(end.Next(), 0)
		}
		s.pos = end.Next()
		if end == last {
			return
		}
	}
}

func (s *sweep[A]) moveTo(first A) {
	if s.pos.Compare(first) < 0 {
		s.advance(first.Prev())
	}
	s.dropEnded()
}

func (s *sweep[A]) addRange(r entry[A]) error {
	s.moveTo(r.first)
	for _, p := range s.stack {
		if p.asn != r.asn {
			return overlapError(s.b, p, r)
		}
	}
	s.cur, s.inRange = r, true
	return nil
}

func (s *sweep[A]) addPrefix(p entry[A]) error {
	s.moveTo(p.first)
	if r := s.cur; s.inRange && r.asn != p.asn {
		if c := p.last.Compare(r.last); c > 0 || c == 0 && p.first == r.first {
			return overlapError(s.b, r, p)
		}
	}
	if n := len(s.stack); n > 0 && s.stack[n-1].first == p.first && s.stack[n-1].last == p.last {
		if q := s.stack[n-1]; q.asn != p.asn {
			return overlapError(s.b, q, p)
		}
		return nil
	}
	s.stack = append(s.stack, p)
	return nil
}

// overlapError returns an error at the later entry of the input that names the earlier one.
func overlapError[A segments.Address[A]](b *builder, x, y entry[A]) error {
	if x.src.compare(y.src) > 0 {
		x, y = y, x
	}
	text := func(n uint32) string {
		if b.noun != "" {
			return Country(n).String()
		}
		return fmt.Sprint("AS", n)
	}
	return fmt.Errorf("%s: %s-%s %s overlaps %s-%s %s of %s; an address must have one %s",
		b.location(y.src), y.first.Addr(), y.last.Addr(), text(y.asn),
		x.first.Addr(), x.last.Addr(), text(x.asn), b.location(x.src), cmp.Or(b.noun, "ASN"))
}
