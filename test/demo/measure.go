package main

import (
	"net/netip"
	"slices"
	"time"

	"shaperd/test/lab"
)

// A flow is what came in of all sources, and of each.
type flow struct {
	all []lab.Event
	of  [len(sources)][]lab.Event
}

func (f *flow) add(source int, e lab.Event) {
	f.all = append(f.all, e)
	f.of[source] = append(f.of[source], e)
}

// attribute returns what came in: payload bytes by TCP, and datagrams. Behind the
// shaper all packets come from its address, so the tag tells the source: a
// connection's first byte, or a datagram's.
func attribute(list []lab.Arrival) (bytes, datagrams flow) {
	owners := map[netip.AddrPort]int{}
	for _, a := range list {
		if a.Outgoing {
			continue
		}
		if a.Flags&lab.SYN != 0 {
			delete(owners, a.From)
		}
		if a.Payload == 0 {
			continue
		}
		of, known := owners[a.From]
		if !known || a.Flags == 0 {
			of = slices.IndexFunc(sources[:], func(s source) bool { return s.tag == a.Head[0] })
		}
		switch {
		case of < 0: // nobody's
		case a.Flags != 0:
			owners[a.From] = of
			bytes.add(of, lab.Event{At: a.At, N: a.Payload})
		default:
			datagrams.add(of, lab.Event{At: a.At, N: 1})
		}
	}
	return bytes, datagrams
}

// bins adds up events by source in intervals of that width, up to end.
func (f *flow) bins(width, end time.Duration) [][len(sources)]int {
	b := make([][len(sources)]int, int((end+width-1)/width))
	for source, events := range f.of {
		for _, e := range events {
			if i := int(e.At / width); e.At >= 0 && i < len(b) {
				b[i][source] += e.N
			}
		}
	}
	return b
}

// levelBins is the highest level in each interval of that width, up to end.
func levelBins(levels []lab.Event, width, end time.Duration) []int {
	b := make([]int, int((end+width-1)/width))
	for i := range b {
		b[i] = lab.Highest(levels, time.Duration(i)*width, time.Duration(i+1)*width)
	}
	return b
}
