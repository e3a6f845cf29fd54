/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Decides over a packet, as Shaper.Shape does, or Shaper.Decide where packets are policed:
 * all limits of a set take it, or the first that does not refuses it and none is charged.
 *
 * First every limit without a calendar is asked, which writes nothing; then those that have
 * one book it; then all others are charged, for when it leaves. Another CPU may have charged
 * one of them in between: what a charge finds is what counts, and when that is beyond
 * max_delay after all, everything is refunded. So a bucket never admits more than its rate,
 * whoever else is at it, and one that is full is only read.
 *
 * What every packet passes is inlined: to return from a function takes 10 ns on a
 * processor that has to guard its returns (AMD's up to Zen 4), a third of what a limit
 * takes. What few pass is in functions that are not static, which the verifier checks
 * once and by themselves. The time is read from the scratch again and again, as the
 * verifier would follow all that comparisons tell about one that is in a register. */
#pragma once

#include "begin.h"
#include "classify.h"
#include "waiting.h"

/* Takes note that a limit lets the packet leave at depart, and what came before it at ready. */
static __always_inline void weigh(struct scratch *s, __u32 number, __u64 depart, __u64 ready)
{
	struct decision *d = &s->decision;

	if (depart <= ready)
		return;
	s->charge[number].waits = here.mode != MODE_POLICE;
	if (depart - ready > s->wait) {
		s->wait = depart - ready;
		d->limit = number;
		d->reason = REASON_RATE;
	}
	d->depart = time_max(d->depart, depart);
}

/* Books the packet under a limit with calendars, if it has no place there that holds. */
__noinline int book_limit(const struct policy *p, struct scratch *s, __u32 number)
{
	__u64 bit, latest, from, slot;
	const struct limit *l;
	struct charge *c;
	int result = BOOK_HELD, booked;

	if (!p || !s)
		return BOOK_REFUSED;
	number %= MAX_LIMITS;
	bit = 1ULL << number;
	l = &p->limit[number];
	c = &s->charge[number];
	if (!((s->held[0] | s->held[1]) & bit))
		c->waits = 0;
	latest = time_add(here.mode == MODE_POLICE ? s->now : s->ready, l->max_delay);
	if (latest - s->now > l->longest)
		latest = s->now + l->longest;
#pragma unroll
	for (int j = 0; j < PACED; j++) {
		const struct meter *m = &l->meter[j];
		__u64 n = s->parser.packet.segments;

		if (!m->rate.mult)
			continue;
		from = here.mode == MODE_POLICE ? s->now : s->decision.depart;
		if (s->held[j] & bit) {
			if (c->booking[j].slot >= from >> (m->shift & 63))
				continue;
			calendar_return(p, s, number * PACED + j);
			s->held[j] &= ~bit;
		}
		if (j == METER_BYTES)
			n = s->parser.packet.bytes + n * l->overhead;
		c->cost[j] = rate_cost(&m->rate, n);
		s->from = from;
		slot = calendar_find(p, s, number * PACED + j);
		booked = calendar_take(p, s, number * PACED + j, latest, slot);
		if (booked == BOOK_SPREAD) {
			booked = calendar_spread(p, s, number * PACED + j);
			/* What it took goes back if another CPU was faster. */
			s->held[j] |= bit;
			if (c->booking[j].depart > latest)
				booked = BOOK_REFUSED;
			/* Its last part is behind what another CPU has booked by then. */
			if (booked == BOOK_PARTED)
				watch_overtaken(l, j, c->cost[j]);
		}
		if (booked == BOOK_REFUSED) {
			refuse(&s->decision, number, REASON_QUEUE_FULL, c->booking[j].depart);
			return BOOK_REFUSED;
		}
		s->held[j] |= bit;
		if (c->booking[j].depart > from && ((s->held[0] | s->held[1]) != bit || s->held[0] & s->held[1]))
			result = BOOK_MOVED;
		weigh(s, number, c->booking[j].depart, from);
	}
	return result;
}

/* Books the packet under those limits of set under which it has no place that holds. */
__noinline int book_round(const struct policy *p, struct scratch *s, __u64 set)
{
	int result = BOOK_HELD;

	if (!p || !s)
		return BOOK_REFUSED;
	for (int i = 0; i < here.limits && set; i++, set &= set - 1) {
		int one = book_limit(p, s, lowest(set));

		if (one == BOOK_REFUSED)
			return one;
		if (one == BOOK_MOVED)
			result = one;
	}
	return exceeded(s, set) ? BOOK_REFUSED : result;
}

__noinline int release_all(const struct policy *p, struct scratch *s)
{
	__u64 held;

	if (!p || !s)
		return 0;
	held = s->held[0] | s->held[1];
	for (int i = 0; i < here.limits && held; i++, held &= held - 1)
		release(p, s, lowest(held));
	return 0;
}

/* Takes note of when a limit lets the packet leave, where it is asked before all that have
 * calendars: without a branch, as in is_watched. */
static __always_inline void weigh_first(struct scratch *s, __u32 number, __u64 depart)
{
	struct decision *d = &s->decision;
	__u64 later = (load_word(&d->depart) - depart) >> 63, wait = depart - load_word(&s->now);
	__u64 waits = (wait | -wait) >> 63 & (here.mode != MODE_POLICE);

	hide(later);
	hide(waits);
	s->charge[number].waits = waits;
	d->limit ^= (d->limit ^ number) & -later;
	d->depart += (depart - d->depart) & -later;
}

/* Counts a packet under the limits of set, which have calendars, and has it noted if one of
 * those is watched. */
__noinline int count_booked(const struct policy *p, struct scratch *s, __u64 set)
{
	const struct watch_owners *w = watch_owners();

	if (!p || !s || !w)
		return 0;
	for (int i = 0; i < here.limits && set; i++, set &= set - 1) {
		__u32 number = lowest(set) % MAX_LIMITS;
		const struct limit *l = &p->limit[number];

		count(l, s, s->charge[number].waits & 1, 1);
#pragma unroll
		for (int j = 0; j < PACED; j++) {
			s->charge[number].hash[j] = 1; /* it is one for all */
			if (l->meter[j].rate.mult)
				s->watched[j] |= is_watched(w, p, l, j, 1) * (set & -set);
		}
	}
	return 0;
}

/* Takes note that another CPU was faster at a bucket of a limit: the packet leaves later
 * than all thought. */
__noinline int overtaken(const struct policy *p, struct scratch *s, __u32 number, __u64 depart)
{
	if (!p || !s)
		return 0;
	number %= MAX_LIMITS;
	if (depart - s->now > p->limit[number].max_delay)
		refuse(&s->decision, number, REASON_QUEUE_FULL, depart);
	else if (s->decision.verdict != VERDICT_REFUSE)
		weigh(s, number, depart, s->now);
	return 1;
}

/* Asks the limits of set, which have no calendars, and those of opening. Returns 0 when one
 * refuses the packet. */
__noinline int ask(const struct policy *p, struct scratch *s, __u64 set, __u64 opening)
{
	struct decision *d;

	if (!p || !s)
		return 0;
	d = &s->decision;
	d->depart = s->now;
	d->verdict = VERDICT_PASS;
	d->reason = REASON_NONE;
	d->limit = NO_LIMIT;
	s->held[0] = s->held[1] = 0;
	for (int i = 0; i < here.limits && set; i++, set &= set - 1) {
		__u32 number = lowest(set) % MAX_LIMITS;
		__u64 depart = quote(p, s, number);

		if (!depart || depart - load_word(&s->now) > p->limit[number].max_delay) {
			refuse(d, number, depart ? REASON_QUEUE_FULL : REASON_MEMORY_FULL, depart ?: s->now);
			return 0;
		}
		weigh_first(s, number, depart);
	}
	if (exceeded(s, set))
		return 0;
	s->ready = d->depart;
	s->wait = d->depart - s->now;
	if (s->wait)
		d->reason = REASON_RATE;
	return !opening || ask_new(p, s, opening);
}

/* Charges the limits of set, which have no calendars. Returns whether another CPU was
 * faster at one of their buckets; the decision says if it refuses the packet then. */
__noinline int charge_all(const struct policy *p, struct scratch *s, __u64 set)
{
	const struct watch_owners *w = watch_owners();
	int overtook = 0;

	if (!p || !s || !w)
		return 0;
	for (int i = 0; i < here.limits && set; i++, set &= set - 1) {
		__u32 number = lowest(set) % MAX_LIMITS;
		__u64 depart = charge(p, s, number, w);

		if (depart > s->decision.depart)
			overtook |= overtaken(p, s, number, depart);
		count(&p->limit[number], s, s->charge[number].waits & 1, 1);
	}
	return overtook;
}

#define ROUNDS 8   /* how often limits are asked for an instant that suits all of them */
#define ATTEMPTS 3 /* how often a packet that other CPUs overtake is charged before it is refused */

/* The limits that are asked, those with calendars and the others. They are read again and
 * again: on the stack there is no room for them. */
static __always_inline __u64 with_calendars(const struct policy *p, const struct scratch *s)
{
	return load_word(&s->asked) & p->calendars;
}

static __always_inline __u64 with_buckets(const struct policy *p, const struct scratch *s)
{
	return load_word(&s->asked) & p->paced & ~p->calendars;
}

/* Has the paced limits that are asked take the scratch's packet, bytes and packets. Returns
 * whether they were charged; the decision says if one of them refuses it nevertheless.
 *
 * Those with calendars are asked when it is known when the others let it leave, and take it
 * at the first instant at which all of them have room. */
__noinline int take(const struct policy *p, struct scratch *s, __u64 opening)
{
	if (!p || !s)
		return 0;
	for (int i = 0; i < ATTEMPTS; i++) {
		int result = BOOK_HELD, overtook;

		if (!ask(p, s, with_buckets(p, s), opening))
			return 0;
		for (int j = 0; j < ROUNDS && with_calendars(p, s); j++) {
			result = book_round(p, s, with_calendars(p, s));
			if (result != BOOK_MOVED)
				break;
		}
		if (result == BOOK_MOVED)
			refuse(&s->decision, lowest(with_calendars(p, s)), REASON_QUEUE_FULL, s->decision.depart);
		if (result != BOOK_HELD || (is_queued(s) && !has_room(p, s))) {
			release_all(p, s);
			return 0;
		}
		overtook = charge_all(p, s, with_buckets(p, s));
		if (!with_calendars(p, s))
			return 1;
		count_booked(p, s, with_calendars(p, s));
		if (!overtook || here.mode == MODE_POLICE)
			return 1;
		refund_all(p, s, with_buckets(p, s) | with_calendars(p, s), 0);
	}
	refuse(&s->decision, lowest(with_calendars(p, s)), REASON_QUEUE_FULL, s->decision.depart);
	return 0;
}

/* Decides over the scratch's packet under the limits of set; see package shaper for
 * what becomes of it. When it is the first SYN of a connection, all limits that count
 * it take it too, or it is refused and nothing is charged. */
static __always_inline void decide(const struct policy *p, struct scratch *s, __u64 set)
{
	__u64 paced = set & p->paced, opening, new;
	struct opening *o = &s->opening;
	struct decision *d = &s->decision;

	opening = o->first ? set & p->counted : 0;
	new = o->late ? 0 : opening;
	d->depart = s->now;
	d->verdict = VERDICT_PASS;
	d->reason = REASON_NONE;
	d->limit = NO_LIMIT;
	d->mark = 0;
	s->asked = set;
	s->watched[METER_BYTES] = s->watched[METER_PACKETS] = 0;

	if (set & p->blocks) {
		refuse(d, lowest(set & p->blocks), REASON_BLOCKED, s->now);
		if (begins(&s->parser.packet))
			refused_connection(p, s);
		count_refused(p, s);
		return;
	}
	/* What may be a SYN, and cannot be counted. */
	if (s->parser.packet.hidden && set & p->counted) {
		refuse(d, lowest(set & p->counted), o->stray ? REASON_MEMORY_FULL : REASON_CONNECTIONS, s->now);
		goto refused;
	}
	if (opening && !take_slots(p, s, opening))
		goto refused;
	if (opening && o->fast && !o->observe) {
		refuse(d, lowest(opening), REASON_CONNECTIONS, s->now);
		refused_connection(p, s);
		o->silent = 1;
		goto refused;
	}
	if (paced | new ? !take(p, s, new) : is_queued(s) && !has_room(p, s))
		goto refused;
	if (o->first && d->verdict != VERDICT_REFUSE)
		begin(p, s, opening);
	if (d->verdict == VERDICT_REFUSE) {
		refund_all(p, s, paced, 0);
		goto refused;
	}
	if (d->depart > s->now) {
		d->verdict = VERDICT_DELAY;
		if (d->reason == REASON_RATE)
			delayed(p, s, d->depart - s->now);
	}
	if (is_queued(s))
		enter_queue(p, s);
	if (set & ~paced)
		count_free(p, s, set & ~paced);
	return;
refused:
	if (o->first && !o->observe)
		drop_slots(o);
	count_refused(p, s);
}
