package main

import (
	"net/netip"
	"slices"
	"time"

	"shaperd.dev/shaperd/test/lab"
)

// A flow is the arrivals of all sources, and of each.
type flow struct {
	all      []lab.Event
	bySource [len(sources)][]lab.Event
}

func (f *flow) add(source int, e lab.Event) {
	f.all = append(f.all, e)
	f.bySource[source] = append(f.bySource[source], e)
}

// attribute returns the arrivals by source: TCP payload bytes, and datagrams. Behind the
// shaper all packets have its address, so the source is identified by the tag, the first
// byte of a connection or datagram.
func attribute(list []lab.Arrival) (bytes, datagrams flow) {
	sourceOf := map[netip.AddrPort]int{}
	for _, a := range list {
		if a.Outgoing {
			continue
		}
		if a.Flags&lab.SYN != 0 {
			delete(sourceOf, a.From)
		}
		if a.Payload == 0 {
			continue
		}
		of, known := sourceOf[a.From]
		if !known || a.Flags == 0 {
			of = slices.IndexFunc(sources[:], func(s source) bool { return s.tag == a.Head[0] })
		}
		switch {
		case of < 0: // unknown tag
		case a.Flags != 0:
			sourceOf[a.From] = of
			bytes.add(of, lab.Event{At: a.At, N: a.Payload})
		default:
			datagrams.add(of, lab.Event{At: a.At, N: 1})
		}
	}
	return bytes, datagrams
}

// bins sums events by source in intervals of the given width, up to end.
func (f *flow) bins(width, end time.Duration) [][len(sources)]int {
	b := make([][len(sources)]int, int((end+width-1)/width))
	for source, events := range f.bySource {
		for _, e := range events {
			if i := int(e.At / width); e.At >= 0 && i < len(b) {
				b[i][source] += e.N
			}
		}
	}
	return b
}

// levelBins returns the highest level in each interval of the given width, up to end.
func levelBins(levels []lab.Event, width, end time.Duration) []int {
	b := make([]int, int((end+width-1)/width))
	for i := range b {
		b[i] = lab.MaxLevel(levels, time.Duration(i)*width, time.Duration(i+1)*width)
	}
	return b
}
