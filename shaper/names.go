package shaper

import (
	"strings"
	"sync"
)

// names numbers names in the order of their first use, from 1: keys have the numbers. When numbers run out, all further
// names have the last one, and so share buckets. It is safe for concurrent use.
type names struct {
	mu     sync.RWMutex
	byName map[string]uint16
	all    []string // all[i] has the number i+1
}

const (
	maxNames   = 1<<16 - 2
	otherNames = 1<<16 - 1
)

// id returns the number of name, a new one if it has none.
func (n *names) id(name string) uint16 {
	n.mu.Lock()
	defer n.mu.Unlock()
	id := n.byName[name]
	switch {
	case id != 0:
	case len(n.all) == maxNames:
		return otherNames
	default:
		n.all = append(n.all, name)
		id = uint16(len(n.all))
		n.byName[name] = id
	}
	return id
}

// find returns the number of name, or 0.
func (n *names) find(name string) uint16 {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.byName[name]
}

// name returns the name of a number: "none" for 0, and "others" for the last one.
func (n *names) name(id uint16) string {
	n.mu.RLock()
	defer n.mu.RUnlock()
	switch {
	case id == 0:
		return "none"
	case int(id) > len(n.all):
		return "others"
	}
	return n.all[id-1]
}

// DownstreamID returns the number in keys of the downstream named name, see [Downstream.Name], in upper or lower case. It never changes. Beyond
// 65,534 names since the start, all new ones share the last number.
func (s *Shaper) DownstreamID(name string) uint16 { return s.downstreams.id(strings.ToLower(name)) }

// DownstreamID returns the number in keys of a downstream that has had one, or 0.
func (p *Policy) DownstreamID(name string) uint16 { return p.downstreams.find(strings.ToLower(name)) }
