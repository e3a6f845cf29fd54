package conn

import (
	"net/netip"
	"slices"

	"shaperd/shaper"
)

// share is a source in a line, for as long as it has flows, and until virtual time has come
// to its tag: who leaves and comes back goes on where he was. Flows that nobody has
// answered yet, whose sources may be forged, are one source together: no number of
// them takes more than one turn from those that are known. Where units leave in the order
// they came, all are one source.
type share struct {
	node
	source netip.Addr // the zero address for strangers, and for all
	lanes  []*lane
	flows  int
	parted bool // in line.parted
}

// lane is the flows of a source that go on to the same lines. Units of a lane that wait in a later
// line hold back those behind them in the lane, and nobody else.
type lane struct {
	node
	rest   []*line
	flows  int
	first  node   // where all wait, or of strangers a flow that has sent but once
	beyond uint64 // bytes of units that have gone on, and wait
}

// laneDepth is how many bytes of a lane wait in later lines at once, or one unit: with one unit alone
// small ones would get less there than large ones.
const laneDepth = fullDatagram

// maxParted bounds the shares without flows that a line keeps.
const maxParted = 4096

// shareOf returns the source whose share f has in a line.
func shareOf(f *shaper.Flow, fifo, stranger bool) (source netip.Addr) {
	if !fifo && !stranger {
		source = turnAddr(f.Source)
	}
	return source
}

// stop adds a flow to l, from which it goes on to rest.
func (l *line) stop(f *shaper.Flow, fifo, stranger bool, rest []*line) stop {
	l.refs++
	source := shareOf(f, fifo, stranger)
	sh := l.shares[source]
	if sh == nil {
		sh = &share{source: source, node: node{parent: &l.root}}
		if l.shares == nil {
			l.shares = map[netip.Addr]*share{}
		}
		l.shares[source] = sh
	}
	sh.flows++
	ln := sh.lane(rest)
	ln.flows++
	at := stop{line: l, share: sh, lane: ln, fifo: fifo, leaf: &ln.first}
	if !fifo && !stranger {
		at.leaf = &node{parent: &ln.node}
	}
	return at
}

// lane returns the one to rest, made if need be.
func (sh *share) lane(rest []*line) *lane {
	for _, ln := range sh.lanes {
		if slices.Equal(ln.rest, rest) {
			return ln
		}
	}
	ln := &lane{rest: rest, node: node{parent: &sh.node}}
	ln.first.parent = &ln.node
	sh.lanes = append(sh.lanes, ln)
	return ln
}

// quit takes a flow off its share and its lane.
func (at *stop) quit() {
	if at.lane.flows--; at.lane.flows == 0 {
		i := slices.Index(at.share.lanes, at.lane)
		at.share.lanes = slices.Delete(at.share.lanes, i, i+1)
	}
	if at.share.flows--; at.share.flows == 0 && at.line.shares[at.share.source] == at.share {
		at.part(at.share)
	}
}

// apart has a stranger that has sent again, and of which nothing is queued, take turns of its
// own. Those that have sent but once share a queue: of a flood of forged sources each comes
// once, and together they take one turn from who goes on without an answer.
func apart(path []stop) {
	for i := range path {
		if at := &path[i]; !at.fifo && at.leaf == &at.lane.first {
			at.leaf = &node{parent: &at.lane.node}
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
