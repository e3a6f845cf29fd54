package shaper

import (
	"fmt"
	"iter"
	"slices"
	"sort"
	"strconv"
	"strings"
)

// DSCP is a differentiated services codepoint, 0 to 63 (RFC 2474).
type DSCP uint8

// NumDSCP is the number of codepoints.
const NumDSCP = 64

// dscpNames are the names of codepoints in the registry of IANA, in lower case.
var dscpNames = [NumDSCP]string{
	0: "cs0", 8: "cs1", 16: "cs2", 24: "cs3", 32: "cs4", 40: "cs5", 48: "cs6", 56: "cs7",
	10: "af11", 12: "af12", 14: "af13", 18: "af21", 20: "af22", 22: "af23",
	26: "af31", 28: "af32", 30: "af33", 34: "af41", 36: "af42", 38: "af43",
	46: "ef", 44: "voice-admit", 1: "le", 5: "nqb",
}

// DSCPNames returns the names of codepoints, in the order of their numbers.
func DSCPNames() []string {
	return slices.DeleteFunc(slices.Clone(dscpNames[:]), func(name string) bool { return name == "" })
}

// String returns the name of d, or its number if it has none.
func (d DSCP) String() string {
	if d < NumDSCP && dscpNames[d] != "" {
		return dscpNames[d]
	}
	return strconv.Itoa(int(d))
}

// ParseDSCP parses a name or a decimal number.
func ParseDSCP(s string) (DSCP, error) {
	if i := slices.Index(dscpNames[:], strings.ToLower(s)); i >= 0 && s != "" {
		return DSCP(i), nil
	}
	n, err := strconv.ParseUint(s, 10, 8)
	if err != nil || n >= NumDSCP {
		return 0, fmt.Errorf("%q is not a DSCP: write a number from 0 to %d, or a name such as \"ef\" or \"af41\"", s, NumDSCP-1)
	}
	return DSCP(n), nil
}

// Mark selects packets by their mark (SO_MARK, nftables' meta mark): those whose bits in Mask are Value, which has no
// others. A Mask of 0 is invalid.
type Mark struct{ Value, Mask uint32 }

// AnyMark is the mask of all bits.
const AnyMark = 1<<32 - 1

func (m Mark) String() string {
	if m.Mask == AnyMark {
		return fmt.Sprintf("%#x", m.Value)
	}
	return fmt.Sprintf("%#x/%#x", m.Value, m.Mask)
}

// ParseMark parses "0x10", "16" or "0x10/0xff".
func ParseMark(s string) (Mark, error) {
	value, mask, masked := strings.Cut(s, "/")
	m := Mark{Mask: AnyMark}
	v, err := strconv.ParseUint(value, 0, 32)
	if masked && err == nil {
		var bits uint64
		bits, err = strconv.ParseUint(mask, 0, 32)
		m.Mask = uint32(bits)
	}
	m.Value = uint32(v)
	switch {
	case err != nil:
		return Mark{}, fmt.Errorf("%q is not a mark of 32 bits such as \"0x10\", or one with a mask such as \"0x10/0xff\"", s)
	case !m.valid():
		return Mark{}, fmt.Errorf("%q: the mask must not be 0, and must have all bits of the value", s)
	}
	return m, nil
}

func (m Mark) valid() bool { return m.Mask != 0 && m.Value&^m.Mask == 0 }

// overlaps reports whether a mark may match both m and o.
func (m Mark) overlaps(o Mark) bool { return (m.Value^o.Value)&m.Mask&o.Mask == 0 }

// covers reports whether m matches all that o does.
func (m Mark) covers(o Mark) bool { return m.Mask&^o.Mask == 0 && o.Value&m.Mask == m.Value }

// MaxMarkMasks is the maximum number of different masks of all marks of a policy: each is a search of its own.
const MaxMarkMasks = 4

// MarkMask is the limits by the bits of a mark in one mask: segments of these numbers, as in [Policy.Ports].
type MarkMask struct {
	Mask   uint32
	starts []uint32
	sets   []Set
}

// All yields the segments.
func (m *MarkMask) All() iter.Seq2[uint32, Set] {
	return func(yield func(uint32, Set) bool) {
		for i, start := range m.starts {
			if !yield(start, m.sets[i]) {
				return
			}
		}
	}
}

func (m *MarkMask) set(mark uint32) Set {
	i := sort.Search(len(m.starts), func(i int) bool { return m.starts[i] > mark&m.Mask })
	return m.sets[i-1]
}

// markMasks returns the different masks of limits.
func markMasks(limits []Limit) (masks []uint32) {
	for i := range limits {
		for _, m := range limits[i].Match.Mark {
			masks = append(masks, m.Mask)
		}
	}
	slices.Sort(masks)
	return slices.Compact(masks)
}

// buildMarks classifies packets by DSCP, mark and control group.
func (p *Policy) buildMarks() {
	for i := range p.limits {
		m := &p.limits[i].Match
		if len(m.DSCP) > 0 {
			p.withDSCP |= 1 << i
		}
		if len(m.Mark) > 0 {
			p.withMark |= 1 << i
		}
		if len(m.Cgroup) > 0 {
			p.withCgroup |= 1 << i
		}
		for d := range p.dscp {
			if len(m.DSCP) == 0 || slices.Contains(m.DSCP, DSCP(d)) {
				p.dscp[d] |= 1 << i
			}
		}
	}
	for _, mask := range markMasks(p.limits) {
		sets := map[uint32]Set{}
		for i := range p.limits {
			for _, m := range p.limits[i].Match.Mark {
				if m.Mask == mask {
					sets[m.Value] |= 1 << i
				}
			}
		}
		p.marks = append(p.marks, newMarkMask(mask, sets))
	}
}

// newMarkMask returns the segments of single values with sets, and of those between, which match nothing.
func newMarkMask(mask uint32, sets map[uint32]Set) MarkMask {
	m := MarkMask{Mask: mask, starts: []uint32{0}, sets: []Set{sets[0]}}
	var starts []uint32
	for value := range sets {
		if starts = append(starts, value); value != AnyMark {
			starts = append(starts, value+1)
		}
	}
	slices.Sort(starts)
	for _, start := range starts {
		if set := sets[start]; set != m.sets[len(m.sets)-1] {
			m.starts, m.sets = append(m.starts, start), append(m.sets, set)
		}
	}
	return m
}

// ByPacket returns the limits that match some packets of a flow only, by DSCP or mark, or by what replies do not tell, as
// the control group.
func (p *Policy) ByPacket() Set { return p.withDSCP | p.withMark | p.withCgroup }

// DSCPSet returns the limits that match a codepoint.
func (p *Policy) DSCPSet(d DSCP) Set { return p.dscp[d%NumDSCP] }

// Marks returns the limits that match marks, and what they match, by mask: a limit matches a mark by any of them.
func (p *Policy) Marks() (Set, []MarkMask) { return p.withMark, p.marks }

// markSet returns the limits that match a mark.
func (p *Policy) markSet(mark uint32) Set {
	set := ^p.withMark
	for i := range p.marks {
		set |= p.marks[i].set(mark)
	}
	return set
}
