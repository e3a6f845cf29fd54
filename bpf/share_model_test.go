package bpf

import (
	"math/big"

	"shaperd.dev/shaperd/leaky"
	"shaperd.dev/shaperd/shaper"
)

// vessel is the oracle of a bucket of a shared limit: it leaks at the parts that it has, exactly. Its
// level is in ticks at the whole rate, times shaper.Whole; below 0 it is credit. at is by CLOCK_BOOTTIME.
type vessel struct {
	level    *big.Int
	burst    uint64
	parts    uint64 // given
	at       uint64
	notDrawn uint64 // until then what was enqueued under fewer parts is drawn
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

// spans returns those of a vessel from an instant on.
func (v *vessel) spans(l *kernelLease, from uint64) (all []span) {
	for _, s := range []span{{0, l.End, v.parts}, {l.End, l.AloneAt, min(v.parts, l.Between)}, {l.AloneAt, uint64(leaky.Never), l.Alone}} {
		if s.to > from {
			all = append(all, span{max(s.from, from), s.to, s.parts})
		}
	}
	return all
}

// leak advances v to an instant, and returns how much it could leak until then.
func (v *vessel) leak(l *kernelLease, to uint64) *big.Int {
	total := new(big.Int)
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
	if least := new(big.Int).Neg(product(v.burst, parts)); v.level.Cmp(least) < 0 {
		v.level = least
	}
}

// draws returns when the next unit may leave, and the parts that v has then.
func (v *vessel) draws(l *kernelLease) (when, parts uint64) {
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

// sharedBuckets are the vessels of a limit: for bytes and for packets.
type sharedBuckets struct {
	limit    sharedLimit
	idle     [2]*vessel // of a key that has never sent
	byKey    map[shaper.Key]*[2]*vessel
	hot      map[shaper.Key]bool
	maxDelay uint64
}

func (b *sharedBuckets) of(k shaper.Key) *[2]*vessel {
	if b.byKey[k] == nil {
		b.byKey[k] = &[2]*vessel{b.idle[0].clone(), b.idle[1].clone()}
	}
	return b.byKey[k]
}

// shareModel is the oracle of shared limits.
type shareModel struct {
	lease  kernelLease
	limits []*sharedBuckets
}

// set gives v parts at boot, from lease next on. told is whether programs are told so.
func (s *shareModel) set(v *vessel, next *kernelLease, told bool, parts, maxDelay, boot uint64) {
	was := s.lease.partsAt(v.parts, boot)
	v.leak(&s.lease, boot)
	if told && v.level.Sign() > 0 && was > 0 {
		when, _ := v.draws(&s.lease)
		v.notDrawn = max(v.notDrawn, min(when, boot+maxDelay))
	}
	v.parts = parts
	v.cap(next.partsAt(parts, boot))
}

func newShareModel(p *shaper.Policy, n numbers, h hashes) (*shareModel, map[uint64]sharedMeter) {
	s, meters := &shareModel{}, map[uint64]sharedMeter{}
	for i := range p.Len() {
		k := encodeLimit(p, i, n.limits[p.Limit(i).Name], h)
		l := &sharedBuckets{
			limit: sharedLimit{kernelLimit: k, key: p.Limit(i).Key}, maxDelay: k.MaxDelay,
			byKey: map[shaper.Key]*[2]*vessel{}, hot: map[shaper.Key]bool{},
		}
		for j := range l.idle {
			l.idle[j] = &vessel{level: new(big.Int), burst: k.Meter[j].Burst}
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
		next.Between, next.Alone = parts(), parts()
	}
	cold := s.lease.Cold.Parts
	if m.IntN(4) == 0 {
		cold = parts()
	}
	next.Cold = kernelShare{Parts: cold}
	c := &shareChange{lease: next, hot: map[uint64]hotParts{}, reset: m.IntN(10) == 0, meters: meters}
	ended := boot >= s.lease.End || boot >= next.End
	for _, l := range s.limits {
		for _, v := range l.idle {
			s.set(v, &next, false, cold, l.maxDelay, boot)
		}
		for k, pair := range l.byKey {
			given, told, wasHot := pair[0].parts, ended, l.hot[k]
			tags := l.limit.tags(b.hashKey(l.limit.key, &k, 3), false)
			switch {
			case m.IntN(4) == 0:
				given, told, l.hot[k] = parts(), true, true
				for tag, hash := range tags {
					c.hot[tag] = hotParts{given, hash}
				}
			case l.hot[k] && (c.reset || m.IntN(8) == 0):
				l.hot[k] = false
				for tag := range tags {
					c.cold = append(c.cold, tag)
				}
			}
			if !l.hot[k] {
				given = cold
			}
			for j, v := range pair {
				s.set(v, &next, told, given, l.maxDelay, boot)
				if l.hot[k] {
					continue
				}
				v.notDrawn = 0
				if wasHot && v.level.Cmp(l.idle[j].level) < 0 { // a cold bucket has no more credit than an idle one
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
	depart, sure = boot, true
	for i, l := range s.limits {
		own := boot
		for _, v := range l.of(p.Key(i, f, r)) {
			v.leak(&s.lease, boot)
			when, parts := v.draws(&s.lease)
			if shaped {
				when = max(when, v.notDrawn)
			}
			own = max(own, when)
			slack = max(slack, roundings*shaper.Whole/parts)
		}
		wait, most := own-boot, l.maxDelay
		sure = sure && (wait+slack < most || wait > most+slack || wait == 0)
		if wait > most {
			return own, slack, false, sure
		}
		depart = max(depart, own)
	}
	return depart, slack, true, sure
}

// charge adds a packet that leaves at depart.
func (s *shareModel) charge(p *shaper.Policy, f *shaper.Flow, r shaper.Route, k *sample, boot, depart uint64) {
	for i, l := range s.limits {
		at := depart
		if p.ChargedOnArrival()&(1<<i) != 0 {
			at = boot
		}
		bytes, packets := p.Shape(i).Cost(k.bytes, k.segments)
		for j, cost := range []leaky.Time{bytes, packets} {
			if cost > 0 {
				l.of(p.Key(i, f, r))[j].charge(&s.lease, uint64(cost), at)
			}
		}
	}
}
