package shaper

import (
	"slices"
	"sort"
)

func (p *Policy) buildPorts() {
	starts := []int{0}
	for i := range p.limits {
		for _, r := range p.limits[i].Match.Port {
			starts = append(starts, int(r.First), int(r.Last)+1)
		}
	}
	for c := range p.classes {
		for _, r := range p.classes[c].Match.Port {
			starts = append(starts, int(r.First), int(r.Last)+1)
		}
	}
	slices.Sort(starts)
	for _, start := range slices.Compact(starts) {
		if start > 65535 {
			break
		}
		var set, classes Set
		for i := range p.limits {
			if p.limits[i].Match.matchesPort(start) {
				set |= 1 << i
			}
		}
		for c := range p.classes {
			if p.classes[c].Match.matchesPort(start) {
				classes |= 1 << c
			}
		}
		if n := len(p.portSets); n > 0 && p.portSets[n-1] == set && p.portClasses[n-1] == classes {
			continue
		}
		p.ports = append(p.ports, uint16(start))
		p.portSets = append(p.portSets, set)
		p.portClasses = append(p.portClasses, classes)
	}
}

func (m *Match) matchesPort(port int) bool {
	return len(m.Port) == 0 || slices.ContainsFunc(m.Port, func(r PortRange) bool { return int(r.First) <= port && port <= int(r.Last) })
}

func (p *Policy) portSet(port uint16) Set {
	if len(p.ports) == 1 {
		return p.portSets[0]
	}
	return p.portSets[p.portSegment(port)]
}

func (p *Policy) portSegment(port uint16) int {
	return sort.Search(len(p.ports), func(i int) bool { return p.ports[i] > port }) - 1
}
