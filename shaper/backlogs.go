package shaper

import (
	"cmp"
	"net/netip"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper/asn"
)

// Backlog is the backlog of one bucket in a form that does not depend on the process, to
// be saved and restored by the next one. Of a shared limit it is what the bucket owes beyond
// its burst: the next process begins without credit.
type Backlog struct {
	Limit          string
	NewConnections bool       // the bucket paces new connections
	Address        netip.Addr `json:"Source"` // source or destination in the key
	ASN            uint32
	Port           uint16
	Listen         string
	Downstream     string      `json:",omitempty"`
	TLV            uint64      `json:",omitempty"` // hash
	Country        asn.Country `json:",omitzero"`  // code of two letters as a number
	Bytes, Packets uint64

	// Of a history of new connections, by a clock that goes on: when they have passed, or the number of a window, and those in
	// it and in the one before. Packets are those that count.
	Times                     []leaky.Time `json:",omitempty"`
	Evicted                   bool         `json:",omitempty"` // of all keys whose histories were evicted
	Window, Current, Previous uint64       `json:",omitempty"`
}

// maxBacklogTimes is how many times of connections all backlogs have at most, so that a start can read the file that they are saved in.
const maxBacklogTimes = 4 << 20

// Backlogs returns at most n backlogs at now, and at most 4,194,304 times of connections, those that drain last first. Buckets of
// single connections are left out, as those end with the process.
func (s *Shaper) Backlogs(n int, now leaky.Time) []Backlog {
	s.mu.Lock()
	defer s.mu.Unlock()
	type entry struct {
		backlog   Backlog
		drainedAt leaky.Time
	}
	byID := map[uint32]*LimitState{}
	for _, st := range s.states {
		byID[st.ID] = st
	}
	listeners := map[uint16]string{}
	for _, l := range s.listeners {
		listeners[l.ID] = l.Name
	}
	var all []entry
	s.table.each(func(k *Key, b *leaky.Bucket) {
		st := byID[k.Limit&^1]
		if b.Drained(now) || k.Connection != 0 || st == nil {
			return
		}
		l := s.table.limit(k.Limit)
		if l.whole == nil {
			return
		}
		d := s.newBacklog(k, st, listeners)
		if l.shared {
			d.Bytes, d.Packets = b.Debt(&l.share.Shape, now)
		} else {
			d.Bytes, d.Packets = b.Backlog(l.shapeOf(k), now)
		}
		if d.Bytes|d.Packets != 0 {
			all = append(all, entry{d, b.DrainedAt()})
		}
	})
	for _, st := range s.states {
		if st.histories == nil {
			continue
		}
		add := func(k *Key, h leaky.History, evicted bool) {
			used := h.Used(now)
			if used == 0 {
				return
			}
			d := s.newBacklog(k, st, listeners)
			d.Packets, d.Evicted = used, evicted
			switch h := h.(type) {
			case *leaky.SlidingLog:
				d.Times = h.Times()
			case *leaky.SlidingWindow:
				d.Window, d.Current, d.Previous = uint64(h.Window), h.Current, h.Previous
			}
			all = append(all, entry{d, h.EmptyAt()})
		}
		for _, e := range st.histories.soonest {
			add(&e.key, e.history, false)
		}
		add(&Key{Limit: st.ID + 1}, st.histories.floor, true)
	}
	slices.SortFunc(all, func(a, b entry) int { return cmp.Compare(b.drainedAt, a.drainedAt) })
	var backlogs []Backlog
	times := 0
	for _, e := range all[:min(len(all), n)] {
		if n := len(e.backlog.Times); times+n > maxBacklogTimes {
			e.backlog.Times = nil // restored as if all had passed when it was saved
		} else {
			times += n
		}
		backlogs = append(backlogs, e.backlog)
	}
	return backlogs
}

// newBacklog returns that of a key of the limit with a state, with nothing in it yet.
func (s *Shaper) newBacklog(k *Key, st *LimitState, listeners map[uint16]string) Backlog {
	d := Backlog{Limit: st.Name, NewConnections: k.Limit&1 != 0, ASN: k.ASN, Country: k.Country, TLV: k.TLV, Port: k.Port, Listen: listeners[k.Origin]}
	if k.Downstream != 0 {
		d.Downstream = s.downstreams.name(k.Downstream)
	}
	if k.Address != [16]byte{} {
		d.Address = netip.AddrFrom16(k.Address)
	}
	return d
}

// Restore adds the backlogs that buckets had ago before now, less what has drained since.
// Backlogs of limits that p does not have are dropped.
func (s *Shaper) Restore(p *Policy, backlogs []Backlog, ago, now leaky.Time) {
	for _, d := range backlogs {
		i := p.Find(d.Limit)
		if i < 0 {
			continue
		}
		k := Key{Limit: p.states[i].ID, ASN: d.ASN, Country: d.Country, TLV: d.TLV, Port: d.Port}
		shape := &p.shapes[i]
		if d.NewConnections {
			k.Limit++
			shape = &p.newConns[i]
		}
		if d.Address.IsValid() {
			k.Address = d.Address.As16()
		}
		if d.Downstream != "" {
			k.Downstream = s.DownstreamID(d.Downstream)
		}
		if d.Listen != "" {
			k.Origin = s.Listener(d.Listen).ID
		}
		if d.NewConnections && p.limits[i].Algorithm.HasHistory() {
			l := p.LimitFor(i, &k)
			if d.Evicted {
				l = p.largestCount(i)
			}
			s.restoreHistory(p, i, l, k, l.restoreHistory(&d, now.Sub(ago), now), d.Evicted, now)
			continue
		}
		if d.Evicted {
			continue // the limit has buckets now
		}
		var keyed *keyedShapes
		if p.tiered&(1<<i) != 0 {
			keyed = &keyedShapes{p, i, d.NewConnections}
		}
		s.restore(&k, shape, keyed, p.limits[i].Shared, d, ago, now)
	}
}

// restoreHistory adds a history of l, limit i of p, to that of k, or to what new keys inherit.
func (s *Shaper) restoreHistory(p *Policy, i int, l *Limit, k Key, h leaky.History, evicted bool, now leaky.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := p.historiesOf(i)
	if evicted {
		kept.floor.Inherit(h, now)
	} else {
		kept.put(k, l, h, now)
	}
}

// restoreHistory returns the history of a key of l that had a backlog at saved, an instant of a clock that has gone on.
func (l *Limit) restoreHistory(d *Backlog, saved, now leaky.Time) leaky.History {
	h := l.newHistory()
	w, isWindow := h.(*leaky.SlidingWindow)
	switch {
	case len(d.Times) > 0:
		for _, t := range d.Times {
			h.Charge(1, min(t, now))
		}
	case isWindow && d.Current+d.Previous > 0 && leaky.Time(d.Window) <= now/w.Per && (leaky.Time(d.Window)+1)*w.Per > saved:
		w.Window, w.Current, w.Previous = leaky.Time(d.Window), d.Current, d.Previous
	default:
		h.Charge(d.Packets, saved)
	}
	return h
}

func (s *Shaper) restore(k *Key, shape *leaky.Shape, keyed *keyedShapes, shared bool, d Backlog, ago, now leaky.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.table.limit(k.Limit); known.whole == nil {
		known.keyed = keyed
	}
	l := s.table.learn(k.Limit, shape, shared, now)
	b := l.fresh
	share := l.shareOf(k)
	if shape.Window > 0 {
		b.Charge(&share.Shape, 0, d.Packets, now.Sub(ago)) // it drains at the end of the window in which it was saved
	} else {
		b.Charge(&share.Shape, d.Bytes, 0, now)
		b.Charge(&share.Shape, 0, d.Packets, now)
		b.Drain(ago) // the backlog has been draining since
	}
	if !b.Drained(now) {
		s.table.add(k, b, now)
	}
}
