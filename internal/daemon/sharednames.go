package daemon

import (
	"strings"

	"shaperd.dev/shaperd/cluster"
	"shaperd.dev/shaperd/shaper"
)

// sharedNames names the shared buckets and pools of the current policy: the name of a bucket, with what package
// cluster tells pools of slots and buckets of tickets by.
type sharedNames struct {
	*shaper.Shaper
	cluster.Params
}

func (n sharedNames) Name(k shaper.Key, slots bool) string { return n.nameOf(n.Policy(), k, slots) }

func (n sharedNames) Key(name string) (k shaper.Key, plane int, ok bool) {
	p := n.Policy()
	k, limit, ok := n.parse(p, name)
	if ok && p.Limit(limit).InPacketPlane() {
		plane = 1
	}
	return k, plane, ok
}

func (n sharedNames) Always() []string { return n.Policy().UnkeyedShares() }

// nameOf returns the name of a bucket or pool of p.
func (n sharedNames) nameOf(p *shaper.Policy, k shaper.Key, slots bool) string {
	switch name := p.ShareName(k); {
	case name == "":
		return ""
	case slots:
		return cluster.SlotsPrefix + name
	case n.byTickets(p, k):
		return cluster.TicketsPrefix + name
	default:
		return name
	}
}

// byTickets reports whether a bucket is that of new connections that pass by tickets.
func (n sharedNames) byTickets(p *shaper.Policy, k shaper.Key) bool {
	i := p.LimitOf(k)
	return i >= 0 && k.Limit&1 != 0 && p.Limit(i).NeedsTickets(n.Hosts, n.Lease.Duration())
}

// parse returns the key of a bucket or pool of p, and the index of its limit, or false if p has none with this name.
func (n sharedNames) parse(p *shaper.Policy, name string) (k shaper.Key, limit int, ok bool) {
	slots := cluster.IsSlots(name)
	k, limit, err := p.ParseShareName(strings.TrimLeft(name, cluster.SlotsPrefix+cluster.TicketsPrefix))
	ok = err == nil && n.nameOf(p, k, slots) == name && (!slots || k.Limit&1 == 0 && p.Limit(limit).HasPool())
	return k, limit, ok
}
