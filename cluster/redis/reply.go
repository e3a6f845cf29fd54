package redis

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	"shaperd.dev/shaperd/cluster"
)

// values takes a reply of the script apart. After the first mistake it returns zeros.
type values struct {
	left   []any
	failed bool
}

func (v *values) next() any {
	if len(v.left) == 0 {
		v.failed = true
		return nil
	}
	x := v.left[0]
	v.left = v.left[1:]
	return x
}

// done reports whether all values were taken, without mistake.
func (v *values) done() bool { return !v.failed && len(v.left) == 0 }

// signed takes an integer between -limit and limit.
func (v *values) signed(limit int64) int64 {
	n, ok := v.next().(int64)
	if !ok || n < -limit || n > limit {
		v.failed = true
		return 0
	}
	return n
}

// number takes an integer between 0 and limit.
func (v *values) number(limit int64) int64 {
	n := v.signed(limit)
	if n < 0 {
		v.failed = true
		return 0
	}
	return n
}

func (v *values) flag() bool { return v.number(1) == 1 }

// span takes a difference of two times.
func (v *values) span() cluster.Time { return cluster.Time(v.signed(maxNumber)) }

func (v *values) text() string {
	text, ok := v.next().(string)
	v.failed = v.failed || !ok
	return text
}

func (v *values) digest() uint64 {
	n, err := strconv.ParseUint(v.text(), 16, 64)
	v.failed = v.failed || err != nil
	return n
}

func (v *values) params() cluster.Params {
	return cluster.Params{
		Hosts: int(v.number(cluster.MaxHosts)), Lease: cluster.Time(v.number(maxNumber)), Step: cluster.Time(v.number(maxNumber)),
		Strict: v.flag(),
	}
}

// list takes an array, and calls each until all of its elements are taken.
func (v *values) list(each func(*values)) {
	elements, ok := v.next().([]any)
	inner := values{left: elements, failed: !ok}
	for len(inner.left) > 0 && !inner.failed {
		each(&inner)
	}
	v.failed = v.failed || inner.failed
}

// lists takes an array of arrays, and calls each for every one, which takes all of its elements.
func (v *values) lists(each func(*values)) {
	v.list(func(outer *values) {
		elements, ok := outer.next().([]any)
		inner := values{left: elements, failed: !ok}
		each(&inner)
		outer.failed = outer.failed || !inner.done()
	})
}

// gone takes the hosts that are gone. The script does not order texts: that depends on the server's locale.
func (v *values) gone() (gone []cluster.Gone) {
	v.list(func(g *values) {
		gone = append(gone, cluster.Gone{Host: g.text(), Start: g.signed(maxNumber), N: g.number(maxNumber)})
	})
	slices.SortFunc(gone, func(a, b cluster.Gone) int { return cmp.Compare(a.Host, b.Host) })
	return gone
}

// parseReply returns the reply to a call, from the script's.
func parseReply(reply any) (*cluster.Reply, error) {
	all, _ := reply.([]any)
	v := values{left: all}
	r := &cluster.Reply{N: v.number(maxNumber), Start: v.number(maxNumber), Latest: v.number(maxNumber), Epoch: v.number(maxNumber)}
	r.Refused = cluster.Refusal(v.number(int64(cluster.RefusedUnsettled)))
	if p := v.params(); r.Refused == cluster.RefusedParams {
		r.Params = p
	}
	r.Live = int(v.number(cluster.MaxHosts))
	r.Counted, r.Settled, r.AllTold, r.Resync, r.Renew = v.flag(), v.flag(), v.flag(), v.flag(), v.flag()
	r.Version, r.Differ, r.AskInfo = v.number(maxNumber), int(v.number(cluster.MaxHosts)), v.flag()
	v.list(func(e *values) {
		key, version, cold := e.text(), e.number(maxNumber), e.flag()
		r.Events = append(r.Events, cluster.Event{Version: version, Key: key, Cold: cold})
	})
	v.list(func(g *values) {
		key, parts, bits := g.text(), g.number(cluster.Whole), g.number(3)
		r.Grants = append(r.Grants, cluster.Grant{Key: key, Parts: parts, Short: bits&1 != 0, Tight: bits&2 != 0})
	})
	v.list(func(l *values) {
		r.Sales = append(r.Sales, cluster.Sale{Key: l.text(), N: l.number(cluster.MaxTickets), At: l.span(), Every: cluster.Time(l.number(maxNumber))})
	})
	r.Gone = v.gone()
	if !v.done() {
		return nil, fmt.Errorf("%w: not one of the script", errProtocol)
	}
	slices.SortFunc(r.Grants, func(a, b cluster.Grant) int { return cmp.Compare(a.Key, b.Key) })
	return r, nil
}
