package bpf

import (
	"math/big"
	"slices"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// vessel is the oracle of a bucket of a shared limit: it leaks at the parts that it has, exactly. Its
// level is in ticks at the whole rate, times shaper.Whole; below 0 it is credit. at is by CLOCK_BOOTTIME.
type vessel struct {
	meter int
	level *big.Int
	burst uint64
	parts uint64 // given
	at    uint64
	hot   bool
	own   uint64 // when the unit in hand may leave
	last  uint64 // when the last unit leaves that was shaped, if it is hot
	slack uint64 // how far roundings may have moved own and last
	error uint64 // of the level, by roundings, in ticks at the whole rate
}

func (v *vessel) clone() *vessel {
	c := *v
	c.level = new(big.Int).Set(v.level)
	return &c
}

func product(a, b uint64) *big.Int {
	return new(big.Int).Mul(new(big.Int).SetUint64(a), new(big.Int).SetUint64(b))
}

// span is a time with constant parts.
type span struct{ from, to, parts uint64 }

// between returns what v has when lease l has ended: of a hot bucket a part is withheld.
func (v *vessel) between(l *kernelLease) uint64 {
	parts := v.parts
	if v.hot {
		parts = parts * (shaper.Whole - l.Withheld) / shaper.Whole
	}
	return min(parts, l.Between)
}

// partsAt returns what v has at an instant.
func (v *vessel) partsAt(l *kernelLease, boot uint64) uint64 {
	switch {
	case boot < l.End:
		return v.parts
	case boot < l.AloneAt:
		return v.between(l)
	}
	return l.Alone
}

// spans returns those of a vessel from an instant on.
func (v *vessel) spans(l *kernelLease, from uint64) (all []span) {
	for _, s := range []span{{0, l.End, v.parts}, {l.End, l.AloneAt, v.between(l)}, {l.AloneAt, uint64(leaky.Never), l.Alone}} {
		if s.to > from {
			all = append(all, span{max(s.from, from), s.to, s.parts})
		}
	}
	return all
}

// leak advances v to an instant, and returns how much it could leak until then.
func (v *vessel) leak(l *kernelLease, to uint64) *big.Int {
	total := new(big.Int)
	if to <= v.at {
		return total
	}
	for _, s := range v.spans(l, v.at) {
		if s.from > to {
			break
		}
		d := product(min(s.to, to)-s.from, s.parts)
		total.Add(total, d)
		v.level.Sub(v.level, d)
		v.cap(s.parts)
	}
	v.at = to
	return total
}

// cap takes the credit that parts do not allow.
func (v *vessel) cap(parts uint64) {
	least := new(big.Int).Neg(product(v.burst, parts))
	if new(big.Int).Add(v.level, product(v.error, shaper.Whole)).Cmp(least) <= 0 {
		v.error = roundings
	}
	if v.level.Cmp(least) < 0 {
		v.level = least
	}
}

// draws returns when the next unit may leave that comes at boot, and the parts that v has then. None waits for other
// parts than those that v has now, unless it is hot and nothing else waits.
func (v *vessel) draws(l *kernelLease, boot uint64) (when, parts uint64) {
	if when, parts = v.reaches(l); !v.waitsAlone(boot) && parts != v.partsAt(l, boot) {
		return uint64(leaky.Never), shaper.Whole
	}
	return when, parts
}

// slackAt returns how far roundings may move a departure.
func (v *vessel) slackAt(parts uint64) uint64 { return v.error * shaper.Whole / parts }

func (v *vessel) waitsAlone(boot uint64) bool { return v.hot && v.last <= boot }

// changes returns when the parts of v change.
func (v *vessel) changes(l *kernelLease) (all []uint64) {
	between := v.between(l)
	if between != v.parts {
		all = append(all, l.End)
	}
	if between != l.Alone {
		all = append(all, l.AloneAt)
	}
	return all
}

// near reports whether v is empty about when its parts change.
func (v *vessel) near(l *kernelLease) bool {
	return slices.ContainsFunc(v.changes(l), func(at uint64) bool {
		rest := new(big.Int).Sub(v.level, v.clone().leak(l, at))
		return rest.CmpAbs(product(v.error, shaper.Whole)) <= 0
	})
}

// reaches returns when v is empty, and the parts that it has then.
func (v *vessel) reaches(l *kernelLease) (when, parts uint64) {
	rest := new(big.Int).Set(v.level)
	for _, s := range v.spans(l, v.at) {
		d := product(s.to-s.from, s.parts)
		if s.parts > 0 && rest.Cmp(d) < 0 {
			if rest.Sign() <= 0 {
				return s.from, s.parts
			}
			wait, more := new(big.Int).DivMod(rest, new(big.Int).SetUint64(s.parts), new(big.Int))
			if more.Sign() > 0 {
				wait.Add(wait, big.NewInt(1))
			}
			return s.from + wait.Uint64(), s.parts
		}
		rest.Sub(rest, d)
	}
	return uint64(leaky.Never), shaper.Whole
}

// charge adds a unit that leaves at an instant, not before v.at.
func (v *vessel) charge(l *kernelLease, cost, at uint64) {
	then := v.clone()
	v.level.Add(then.leak(l, at), then.level)
	v.level.Add(v.level, product(cost, shaper.Whole))
}

// sharedBuckets are the vessels of a limit: for bytes, for packets, or for both.
type sharedBuckets struct {
	limit    sharedLimit
	idle     []*vessel // of a key that has never sent
	byKey    map[shaper.Key][]*vessel
	keys     []shaper.Key // of byKey, in an order that does not change
	maxDelay uint64
}

func (b *sharedBuckets) of(k shaper.Key) []*vessel {
	if b.byKey[k] == nil {
		for _, v := range b.idle {
			b.byKey[k] = append(b.byKey[k], v.clone())
		}
		b.keys = append(b.keys, k)
	}
	return b.byKey[k]
}

// shareModel is the oracle of shared limits.
type shareModel struct {
	lease  kernelLease
	limits []*sharedBuckets
}

// set gives v parts at boot, from lease next on, and makes it hot or cold. A hot one has them from the departure of
// what it has let leave on.
func (s *shareModel) set(v *vessel, next *kernelLease, hot bool, parts, maxDelay, boot uint64) {
	wasHot, from := v.hot, boot
	v.leak(&s.lease, boot)
	if hot && !wasHot {
		if v.last = boot; v.level.Sign() > 0 {
			when, partsThen := v.draws(&s.lease, boot)
			v.last, v.slack = min(when, boot+maxDelay), v.slackAt(partsThen)
		}
	}
	if wasHot || hot {
		from = max(boot, v.last)
	}
	v.leak(&s.lease, from)
	if from > boot {
		v.error += v.slack
	}
	if v.parts, v.hot = parts, hot; wasHot && !hot {
		if from > boot && v.level.Sign() < 0 {
			v.level.SetUint64(0)
		}
		meanwhile := &vessel{level: new(big.Int), burst: v.burst, parts: parts, at: boot}
		v.level.Add(v.level, meanwhile.leak(next, from))
		v.at, v.last = boot, 0
	}
	v.cap(v.partsAt(next, v.at))
}

func newShareModel(p *shaper.Policy, n numbers, h hashes) (*shareModel, map[uint64]sharedMeter) {
	s, meters := &shareModel{}, map[uint64]sharedMeter{}
	for i := range p.Len() {
		k := encodeLimit(p, i, n.limits[p.Limit(i).Name], h)
		l := &sharedBuckets{
			limit: sharedLimit{kernelLimit: k, key: p.Limit(i).Key}, maxDelay: k.MaxDelay,
			byKey: map[shaper.Key][]*vessel{},
		}
		for j := range k.Meter[:meterPackets+1] {
			if k.Meter[j].Rate.Mult > 0 {
				l.idle = append(l.idle, &vessel{meter: j, level: new(big.Int), burst: k.Meter[j].Burst, error: roundings})
			}
			meters[meterOf(k.Meter[j].Tag)] = sharedMeter{burst: k.Meter[j].Burst, maxDelay: k.MaxDelay}
		}
		s.limits = append(s.limits, l)
	}
	return s, meters
}

// change draws a change, makes it here, and returns it.
func (s *shareModel) change(m *generator, b *bench, p *shaper.Policy, meters map[uint64]sharedMeter, boot uint64) *shareChange {
	parts := func() uint64 {
		switch m.IntN(5) {
		case 0:
			return 0
		case 1:
			return shaper.Whole
		}
		return 1 + m.logUniform(1e3, shaper.Whole-2)
	}
	next := s.lease
	if m.IntN(4) > 0 {
		next.End = boot + m.Uint64N(64e8)
		next.AloneAt = next.End + m.Uint64N(64e8)
	}
	if m.IntN(4) == 0 {
		next.Between, next.Alone, next.Withheld = parts(), parts(), parts()*m.Uint64N(2)
	}
	cold := s.lease.Cold.Parts
	if m.IntN(4) == 0 {
		cold = parts()
	}
	next.Cold = kernelShare{Parts: cold}
	c := &shareChange{lease: next, hot: map[uint64]hotParts{}, reset: m.IntN(10) == 0, meters: meters}
	for _, l := range s.limits {
		for _, v := range l.idle {
			s.set(v, &next, false, cold, l.maxDelay, boot)
		}
		for _, k := range l.keys {
			vessels := l.byKey[k]
			given, hot := vessels[0].parts, vessels[0].hot
			wasHot := hot
			near := !hot && slices.ContainsFunc(vessels, func(v *vessel) bool { return v.near(&s.lease) }) // roundings decide when it is empty
			tags := l.limit.tags(b.hashKey(l.limit.key, &k, 3), false)
			switch {
			case !near && m.IntN(4) == 0:
				given, hot = parts(), true
				for tag, hash := range tags {
					c.hot[tag] = hotParts{given, hash}
				}
			case hot && (c.reset || m.IntN(8) == 0):
				hot = false
				for tag := range tags {
					c.cold = append(c.cold, tag)
				}
			}
			if !hot {
				given = cold
			}
			for j, v := range vessels {
				s.set(v, &next, hot, given, l.maxDelay, boot)
				if wasHot && !hot && v.level.Cmp(l.idle[j].level) < 0 { // a cold bucket has no more credit than an idle one
					v.level.Set(l.idle[j].level)
				}
			}
		}
	}
	s.lease = next
	return c
}

// decide returns when a packet of f may leave, if the limits let it at all. sure is unset if roundings may
// decide that. shaped packets wait for those before them.
func (s *shareModel) decide(p *shaper.Policy, f *shaper.Flow, r shaper.Route, boot uint64, shaped bool) (depart, slack uint64, ok, sure bool) {
	depart, ok, sure = boot, true, true
	for i, l := range s.limits {
		own, empty := boot, true
		for _, v := range l.of(p.Key(i, f, r)) {
			fuller := v.clone()
			fuller.level.Add(fuller.level, product(v.error, shaper.Whole))
			fuller.leak(&s.lease, boot)
			empty = empty && fuller.level.Sign() <= 0
			v.leak(&s.lease, boot)
			when, parts := v.draws(&s.lease, boot)
			sure = sure && (v.waitsAlone(boot) || !v.near(&s.lease))
			if v.last+v.slack <= boot {
				v.slack = 0
			}
			sure = sure && (v.slack == 0 || v.last > boot+v.slack)
			if shaped {
				when = max(when, v.last)
			}
			v.own = max(boot, when)
			own = max(own, when)
			v.slack = max(v.slack, v.slackAt(parts))
			slack = max(slack, v.slack)
		}
		wait, most := own-boot, l.maxDelay
		sure = sure && (wait+slack < most || wait > most+slack || wait == 0 && empty)
		ok = ok && wait <= most
		depart = max(depart, own)
	}
	return depart, slack, ok, sure
}

// charge adds a packet that leaves at depart.
func (s *shareModel) charge(p *shaper.Policy, f *shaper.Flow, r shaper.Route, k *sample, boot, depart uint64, shaped bool) {
	for i, l := range s.limits {
		at := depart
		if p.ChargedOnArrival()&(1<<i) != 0 {
			at = boot
		}
		bytes, packets := p.Shape(i).Cost(k.bytes, k.segments)
		for _, v := range l.of(p.Key(i, f, r)) {
			cost := []leaky.Time{bytes, packets}[v.meter]
			v.charge(&s.lease, uint64(cost), at)
			if v.hot && shaped {
				v.last = max(v.last, min(v.own, depart))
			}
		}
	}
}
