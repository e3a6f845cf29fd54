package conn

import (
	"net/netip"

	"shaperd/shaper"
)

// share is a source in a line, for as long as it has flows, and until virtual time has come
// to its tag: who leaves and comes back goes on where he was. Flows that nobody has
// answered yet, whose sources may be forged, are one source together: no number of
// them takes more than one turn from those that are known.
type share struct {
	node
	source netip.Addr // the zero address for strangers
	flows  int
	parted bool // in line.parted
	first  node // of strangers: where a flow waits that has sent but once
}

// maxParted bounds the shares without flows that a line keeps.
const maxParted = 4096

// shareOf returns the source whose share f has in a line.
func shareOf(f *shaper.Flow, stranger bool) (source netip.Addr) {
	if !stranger {
		source = turnAddr(f.Source)
	}
	return source
}

// stop adds a flow to l.
func (l *line) stop(f *shaper.Flow, fifo, stranger bool) stop {
	l.refs++
	if fifo {
		return stop{line: l, leaf: &l.root}
	}
	source := shareOf(f, stranger)
	sh := l.shares[source]
	if sh == nil {
		sh = &share{source: source, node: node{parent: &l.root}}
		if l.shares == nil {
			l.shares = map[netip.Addr]*share{}
		}
		l.shares[source] = sh
	}
	sh.flows++
	if stranger {
		sh.first.parent = &sh.node
		return stop{line: l, share: sh, leaf: &sh.first}
	}
	return stop{line: l, share: sh, leaf: &node{parent: &sh.node}}
}

// apart has a stranger that has sent again, and of which nothing is queued, take turns of its
// own. Those that have sent but once share a queue: of a flood of forged sources each comes
// once, and together they take one turn from who goes on without an answer.
func apart(path []stop) {
	for i := range path {
		if sh := path[i].share; sh != nil && path[i].leaf == &sh.first {
			path[i].leaf = &node{parent: &sh.node}
		}
	}
}

// part forgets sh, which has no flows any more, and others before it, when virtual time has
// come to their tags. If there are too many, virtual time moves on: who comes has a little
// less than he should, nobody who is there has.
func (l *line) part(sh *share) {
	if !sh.parted {
		sh.parted = true
		l.parted = append(l.parted, sh)
	}
	for len(l.parted) > 0 {
		first := l.parted[0]
		if first.flows == 0 && first.start > l.root.virtual {
			if len(l.parted) <= maxParted {
				return
			}
			l.root.virtual = first.start
		}
		first.parted = false
		l.parted[0] = nil
		l.parted = l.parted[1:]
		if first.flows == 0 {
			delete(l.shares, first.source)
		}
	}
}
