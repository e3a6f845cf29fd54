package conn

import "shaperd/leaky"

// roster is the UDP flows that hold something of which there is only so much: the places
// of a listener's table, or one source's places in it, the connections of a downstream,
// the slots of a gate. Where it has run out the flow that would be missed least makes room
// for a new one. One with datagrams queued never does, so that nothing is dropped to the
// benefit of somebody else.
type roster [numRanks]placeList

// rank is how much a flow would be missed.
type rank uint8

const (
	unanswered rank = iota // nothing has come back: what a flood of forged sources leaves behind
	answered               // and its source has sent nothing since: most often a question that is done
	known                  // its source went on after an answer
	engaged                // it had datagrams queued when it was last looked at
	numRanks
)

// place is the entry of a flow in a roster.
type place struct {
	flow       *udpFlow
	roster     *roster
	next, prev *place // of the same rank
}

// placeList is a list of places, the longest idle first, to within fileEvery.
type placeList struct{ first, last *place }

const (
	// muteGrace is how long a flow is left alone by those of other sources: an answer takes
	// its time, and a flood of sources must not push out one that waits for it, or has just
	// got it.
	muteGrace = leaky.Second / 2

	// ownGrace is how long a flow that was answered is left alone by those of its own
	// source: an answer may be of several datagrams.
	ownGrace = leaky.Second / 50

	// knownGrace is the part of udp_idle_timeout for which a flow is left alone whose source
	// went on.
	knownGrace = 4

	// fileEvery is how often a flow that moves is put at the end of its lists. To do it for
	// each datagram would cost as much as to forward it.
	fileEvery = leaky.Second / 10
)

func (l *placeList) push(p *place) {
	p.prev, p.next = l.last, nil
	if l.last == nil {
		l.first = p
	} else {
		l.last.next = p
	}
	l.last = p
}

func (l *placeList) remove(p *place) {
	if p.prev == nil {
		l.first = p.next
	} else {
		p.prev.next = p.next
	}
	if p.next == nil {
		l.last = p.prev
	} else {
		p.next.prev = p.prev
	}
	p.next, p.prev = nil, nil
}

// candidate returns the flow that would make room for one of source, or nil.
func (r *roster) candidate(source *udpSource, now leaky.Time) *udpFlow {
	for rank := range engaged {
		for p := r[rank].first; p != nil; p = r[rank].first {
			f := p.flow
			if f.queued != nil {
				f.file(now)
				continue
			}
			if now.Sub(f.seen) >= f.grace(source) {
				return f
			}
			if f.seen <= f.filed {
				break
			}
			f.file(now) // it has moved since: it is not the one that is idle longest
		}
	}
	return nil
}

// all returns the flows of r.
func (r *roster) all() (flows []*udpFlow) {
	for rank := range r {
		for p := r[rank].first; p != nil; p = p.next {
			flows = append(flows, p.flow)
		}
	}
	return flows
}

// grace is how long f is left alone by flows of source when nothing comes or goes.
func (f *udpFlow) grace(source *udpSource) leaky.Time {
	switch {
	case f.rank == answered && f.source == source:
		return ownGrace
	case f.rank != known:
		return muteGrace
	}
	return max(leaky.FromDuration(f.site.config.Load().IdleTimeout)/knownGrace, muteGrace)
}

// enlist puts f on the rosters of all that it holds.
func (f *udpFlow) enlist(now leaky.Time) {
	f.delist()
	f.rank, f.filed = f.standing(), now
	f.places = make([]place, 0, 3+len(f.slots.held))
	join := func(r *roster) {
		f.places = append(f.places, place{flow: f, roster: r})
		r[f.rank].push(&f.places[len(f.places)-1])
	}
	join(&f.site.flows)
	join(&f.source.flows)
	join(&f.downstream.flows)
	for _, gt := range f.slots.held {
		join(&gt.flows)
	}
}

func (f *udpFlow) delist() {
	for i := range f.places {
		p := &f.places[i]
		p.roster[f.rank].remove(p)
	}
	f.places = nil
}

// file puts f at the end of its lists, by the rank that it has now.
func (f *udpFlow) file(now leaky.Time) {
	was := f.rank
	f.rank, f.filed = f.standing(), max(f.seen, now)
	for i := range f.places {
		p := &f.places[i]
		p.roster[was].remove(p)
		p.roster[f.rank].push(p)
	}
}

func (f *udpFlow) standing() rank {
	switch {
	case f.queued != nil:
		return engaged
	case f.mute:
		return unanswered
	case !f.known:
		return answered
	}
	return known
}

// touch notes that a datagram of f came or went.
func (f *udpFlow) touch(now leaky.Time) {
	f.seen = now
	if now.Sub(f.filed) > fileEvery {
		f.file(now)
	}
}
