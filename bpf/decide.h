/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Decides over a packet, as Shaper.Decide does: all limits of a set take it, or the
 * first that does not refuses it and none is charged.
 *
 * First every limit is asked, which writes nothing; then all are charged. Another
 * CPU may have charged one of them in between: what a charge finds is what counts,
 * and when that is beyond max_delay after all, everything is refunded. So a bucket
 * never admits more than its rate, whoever else is at it, and one that is full is
 * only read.
 *
 * What every packet passes is inlined: to return from a function takes 10 ns on a
 * processor that has to guard its returns (AMD's up to Zen 4), a third of what a limit
 * takes. What few pass is in functions that are not static, which the verifier checks
 * once and by themselves. The time is read from the scratch again and again, as the
 * verifier would follow all that comparisons tell about one that is in a register. */
#pragma once

#include "classify.h"
#include "count.h"
#include "key.h"
#include "watch.h"

/* What is returned for a bucket that there is no place for: it drains never. */
#define NO_BUCKET (~0ULL)

/* Added to a limit's number for what it holds new connections to, instead of bytes
 * and packets. */
#define OF_NEW MAX_LIMITS

static __always_inline int of_new(__u32 number, int meter)
{
	return !(number & OF_NEW) == (meter != METER_NEW);
}

/* Finds what limit number is to charge for the scratch's packet, and when it lets it
 * leave. Returns 0 when there is no place for one of its buckets. */
static __always_inline __u64 quote(const struct policy *p, struct scratch *s, __u32 number)
{
	const struct limit *l = &p->limit[number % MAX_LIMITS];
	struct charge *c = &s->charge[number % MAX_LIMITS];
	__u64 hash[2], depart = load_word(&s->now);

	hash_key(p, l, &s->parser.packet, hash);
#pragma unroll
	for (int j = 0; j < METERS; j++) {
		const struct meter *m = &l->meter[j];
		__u64 n = s->parser.packet.segments, *bucket;

		if (!of_new(number, j))
			continue;
		c->place[j] = NOWHERE;
		if (!m->rate.mult)
			continue;
		if (j == METER_BYTES)
			n = s->parser.packet.bytes + n * l->overhead;
		c->cost[j] = rate_cost(&m->rate, n);
		c->hash[j] = join(m, hash);
		c->place[j] = place_of(p, s, m, c->hash[j]);
		if (c->place[j] == NOWHERE)
			return 0;
		/* One that has just been ended, in favour of another of the same key, is found
		 * when it is charged. */
		bucket = bucket_at(c->place[j], tag_of(m, c->hash[j]));
		if (bucket)
			depart = time_max(depart, bucket_depart(load_word(bucket), m->burst, load_word(&s->now)));
	}
	return depart;
}

/* Charges the bucket of a meter that charge could not: it had drained and made room
 * for a key of this very packet or on another CPU, or another CPU has just charged it.
 * If it was charged when it had made room already, who has that now gets it back.
 * Returns it as it was before, or NO_BUCKET when there is no place for it. */
__noinline __u64 charge_again(const struct policy *p, struct scratch *s, __u32 number, __u32 meter, int charged)
{
	const struct meter *m;
	struct charge *c;
	__u64 *bucket;

	if (!p || !s || meter >= METERS)
		return NO_BUCKET;
	m = &p->limit[number % MAX_LIMITS].meter[meter];
	c = &s->charge[number % MAX_LIMITS];
	bucket = any_bucket(c->place[meter]);
	/* Who took the place may have wiped out the charge with the rest. */
	if (bucket && charged && load_word(bucket) >= s->now + c->cost[meter]) {
		watch_refund_of(load_word(bucket - PLACES), c->cost[meter]);
		bucket_refund(bucket, c->cost[meter]);
	}
	for (int i = 0; i < 4; i++) {
		c->place[meter] = table_place(tag_of(m, c->hash[meter]), first_line(p, c->hash[meter]),
					      second_line(p, c->hash[meter]), s->now, most_of(m, s));
		bucket = bucket_at(c->place[meter], tag_of(m, c->hash[meter]));
		if (bucket)
			return bucket_charge(bucket, c->cost[meter], s->now);
	}
	c->place[meter] = NOWHERE; /* there is nothing to take back */
	return NO_BUCKET;
}

/* Charges what was quoted, and returns when the packet may leave after all. A bucket that
 * is still its key's when it has been charged keeps that: who takes its place looks at what
 * it owes after taking it. */
static __always_inline __u64 charge(const struct policy *p, struct scratch *s, __u32 number,
				    const struct watch_owners *w)
{
	const struct limit *l = &p->limit[number % MAX_LIMITS];
	struct charge *c = &s->charge[number % MAX_LIMITS];
	__u64 depart = load_word(&s->now);

#pragma unroll
	for (int j = 0; j < METERS; j++) {
		const struct meter *m = &l->meter[j];
		__u64 before, own, *bucket;
		int charged;

		if (!of_new(number, j) || c->place[j] == NOWHERE)
			continue;
		bucket = bucket_at(c->place[j], tag_of(m, c->hash[j]));
		charged = bucket && bucket_try(bucket, c->cost[j], load_word(&s->now), &before);
		if (!charged || !is_of(bucket, tag_of(m, c->hash[j])))
			before = charge_again(p, s, number, j, charged);
		/* NO_BUCKET is beyond any delay: what cannot be charged does not pass. */
		own = bucket_depart(before, m->burst, load_word(&s->now));
		depart = time_max(depart, own);
		if (j < WATCHED) {
			c->own[j] = own;
			s->watched[j] |= is_watched(w, p, l, j, c->hash[j]) << (number % MAX_LIMITS);
		}
	}
	return depart;
}

/* Takes back what was charged. */
__noinline int refund(const struct policy *p, const struct scratch *s, __u32 number)
{
	const struct limit *l;
	const struct charge *c;

	if (!p || !s)
		return 0;
	l = &p->limit[number % MAX_LIMITS];
	c = &s->charge[number % MAX_LIMITS];
#pragma unroll
	for (int j = 0; j < METERS; j++) {
		__u64 *bucket;

		if (!of_new(number, j))
			continue;
		bucket = bucket_at(c->place[j], tag_of(&l->meter[j], c->hash[j]));
		if (bucket && j < WATCHED)
			watch_refund(l, j, c->cost[j]);
		if (bucket)
			bucket_refund(bucket, c->cost[j]);
	}
	if (!(number & OF_NEW))
		count(l, s, c->waits & 1, -1);
	return 0;
}

/* A limit has refused a connection, and not just a packet. */
static __always_inline void refused_connection(const struct policy *p, struct scratch *s)
{
	s->opening.refused = 1;
	s->opening.silent = p->limit[s->decision.limit % MAX_LIMITS].silent;
}

/* Takes a slot for the scratch's packet under limit number, beside those that it has.
 * Returns an enum slot_result. */
__noinline int take_slot(const struct policy *p, struct scratch *s, __u32 number)
{
	const struct limit *l;
	const struct meter *m;
	__u64 hash[2], answer;
	struct opening *o;
	struct state *to;
	__u32 held;

	if (!p || !s)
		return SLOT_LOST;
	o = &s->opening;
	l = &p->limit[number % MAX_LIMITS];
	to = state_of(l);
	held = o->held;
	if (!to || held >= MAX_HELD)
		return SLOT_LOST;
	hash_key(p, l, &s->parser.packet, hash);
	m = &l->meter[METER_NEW];
	hash[0] = join(m, hash);
	answer = slot_take(hash[0], o->adopt ? SLOT_MOST : l->connections);
	if (answer >> 32 == SLOT_FULL && o->observe) {
		to->over_connections++;
		o->over |= 1ULL << (number % MAX_LIMITS);
		answer = slot_take(hash[0], SLOT_MOST);
	}
	if (answer >> 32 == SLOT_TAKEN) {
		o->flight.slot[held] = hash[0] << SLOT_BITS | l->state;
		o->flight.slot_place[held] = answer;
		o->held = held + 1;
		to->in_flight++;
		to->adopted += o->adopt;
	} else if (o->observe) {
		to->connections_memory_full++;
	}
	return answer >> 32;
}

/* Takes slots under the limits of set, or none: see refuse. */
__noinline int take_slots(const struct policy *p, struct scratch *s, __u64 set)
{
	if (!p || !s)
		return 0;
	for (int i = 0; i < MAX_LIMITS && set; i++, set &= set - 1) {
		__u32 number = lowest(set) % MAX_LIMITS, result;

		if (!p->limit[number].connections)
			continue;
		result = take_slot(p, s, number);
		if (result == SLOT_TAKEN || s->opening.observe)
			continue;
		refuse(&s->decision, number, result == SLOT_FULL ? REASON_CONNECTIONS : REASON_MEMORY_FULL, s->now);
		refused_connection(p, s);
		return 0;
	}
	return 1;
}

/* Takes back what the limits of set were charged for a packet, and those of opening
 * for a connection. */
__noinline int refund_all(const struct policy *p, const struct scratch *s, __u64 set, __u64 opening)
{
	if (!p || !s)
		return 0;
	for (int i = 0; i < MAX_LIMITS && set; i++, set &= set - 1)
		refund(p, s, lowest(set));
	for (int i = 0; i < MAX_LIMITS && opening; i++, opening &= opening - 1)
		refund(p, s, lowest(opening) | OF_NEW);
	return 0;
}

/* Gives back the slots that were taken for a connection that does not begin. */
static __always_inline void drop_slots(struct opening *o)
{
	give_back(&o->flight, o->held);
	o->held = 0;
}

/* Enters the connection that the scratch's packet begins. */
static __always_inline int insert(struct scratch *s)
{
	struct opening *o = &s->opening;
	const struct packet *k = &s->parser.packet;
	__u64 depart = here.mode == MODE_SHAPE ? s->decision.depart : s->now;
	__u32 end = sequence_after(k);

	o->flight.via = k->via;
	o->flight.hops = o->late ? UNCONFIRMED : k->hops;
	o->flight.next[0] = end;
	o->flight.ack[1] = o->late ? k->tcp_seq : end;
	o->flight.next[1] = o->flight.ack[0] = o->late ? k->tcp_ack : 0;
	return open_connection(o, o->late ? SYNS | ESTABLISHED : SYN_OF, s->now / TICKS_PER_NANO,
			       depart / TICKS_PER_NANO);
}

/* Whether a packet or a connection that may leave at depart waits until then. It does
 * not where packets are policed: it passes at once, or not at all. */
static __always_inline int waits_until(const struct scratch *s, __u64 depart)
{
	return here.mode != MODE_POLICE && depart > load_word(&s->now);
}

/* Has the decision say what a limit makes of a packet that may leave at depart, and
 * waits for most at most. */
static __always_inline void weigh(struct scratch *s, __u32 number, __u64 depart, __u64 most, __u32 full, __u32 rate)
{
	struct decision *d = &s->decision;

	if (depart - load_word(&s->now) > most) {
		refuse(d, number, full, depart);
	} else if (d->verdict != VERDICT_REFUSE && depart > d->depart) {
		d->depart = depart;
		d->limit = number;
		d->reason = rate;
	}
}

__noinline __u64 quote_new(const struct policy *p, struct scratch *s, __u32 number)
{
	return p && s ? quote(p, s, number % MAX_LIMITS | OF_NEW) : 0;
}

__noinline __u64 charge_new(const struct policy *p, struct scratch *s, __u32 number)
{
	return p && s ? charge(p, s, number % MAX_LIMITS | OF_NEW, 0) : 0;
}

/* Asks the limits of set for the connection that the packet begins. Returns 0 when one
 * refuses it. */
static __always_inline int ask_new(const struct policy *p, struct scratch *s, __u64 set)
{
	__u64 rest = set;

	if (!p || !s)
		return 0;
	for (int i = 0; i < MAX_LIMITS && rest; i++, rest &= rest - 1) {
		__u32 number = lowest(rest) % MAX_LIMITS;
		__u64 depart = quote_new(p, s, number);

		if (depart && depart - load_word(&s->now) <= p->limit[number].max_wait)
			continue;
		refuse(&s->decision, number, depart ? REASON_NEW : REASON_MEMORY_FULL, depart ?: s->now);
		refused_connection(p, s);
		return 0;
	}
	return 1;
}

/* Has the limits of set take the scratch's packet, bytes and packets. Returns whether
 * they were charged; the decision says if one of them refuses it nevertheless. */
__noinline int take(const struct policy *p, struct scratch *s, __u64 set, __u64 opening)
{
	const struct watch_owners *w = watch_owners();
	__u64 rest = set;

	if (!p || !s || !w)
		return 0;
	for (int i = 0; i < MAX_LIMITS && rest; i++, rest &= rest - 1) {
		__u32 number = lowest(rest) % MAX_LIMITS;
		__u64 depart = quote(p, s, number);

		if (depart && depart - load_word(&s->now) <= p->limit[number].max_delay)
			continue;
		refuse(&s->decision, number, depart ? REASON_QUEUE_FULL : REASON_MEMORY_FULL, depart ?: s->now);
		return 0;
	}
	if (opening && !ask_new(p, s, opening))
		return 0;
	for (int i = 0; i < MAX_LIMITS && set; i++, set &= set - 1) {
		__u32 number = lowest(set) % MAX_LIMITS;
		struct charge *c = &s->charge[number];
		__u64 depart = charge(p, s, number, w);

		c->waits = waits_until(s, depart);
		count(&p->limit[number], s, c->waits & 1, 1);
		weigh(s, number, depart, p->limit[number].max_delay, REASON_QUEUE_FULL, REASON_RATE);
	}
	return 1;
}

/* Has the limits of set take the connection. */
__noinline int take_new(const struct policy *p, struct scratch *s, __u64 set)
{
	if (!p || !s)
		return 0;
	s->opening.waits = 0;
	for (int i = 0; i < MAX_LIMITS && set; i++, set &= set - 1) {
		__u32 number = lowest(set) % MAX_LIMITS;
		__u64 depart = charge_new(p, s, number);

		s->opening.waits |= (__u64)waits_until(s, depart) << number;
		weigh(s, number, depart, p->limit[number].max_wait, REASON_NEW, REASON_NEW);
	}
	if (s->decision.verdict == VERDICT_REFUSE)
		refused_connection(p, s);
	return 1;
}

/* Has the limits of set take the connection that the scratch's packet begins, and enters
 * it. The decision says if one of them refuses it; then none is charged. */
__noinline int begin(const struct policy *p, struct scratch *s, __u64 set)
{
	struct opening *o;
	struct decision *d;
	int result;

	if (!p || !s)
		return 0;
	o = &s->opening;
	d = &s->decision;
	if (set)
		take_new(p, s, set);
	if (o->insert && d->verdict != VERDICT_REFUSE) {
		result = insert(s);
		if (result == OPEN_FAILED && set && !o->observe) {
			refuse(d, lowest(set), REASON_MEMORY_FULL, s->now);
			refused_connection(p, s);
		} else if (result != OPENED) {
			/* Another CPU has met its first SYN just now; or nobody minds. */
			drop_slots(o);
			return refund_all(p, s, 0, set);
		}
	}
	if (d->verdict == VERDICT_REFUSE)
		return refund_all(p, s, 0, set);
	return set ? count_opened(p, s, set & ~o->over) : 0;
}

/* Decides over the scratch's packet under the limits of set; see package shaper for
 * what becomes of it. When it is the first SYN of a connection, all limits that count
 * it take it too, or it is refused and nothing is charged. */
static __always_inline void decide(const struct policy *p, struct scratch *s, __u64 set)
{
	__u64 paced = set & p->paced, opening;
	struct opening *o = &s->opening;
	struct decision *d = &s->decision;

	opening = o->first ? set & p->counted : 0;
	d->depart = s->now;
	d->verdict = VERDICT_PASS;
	d->reason = REASON_NONE;
	d->limit = NO_LIMIT;
	d->mark = 0;
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
		refuse(d, lowest(set & p->counted), REASON_CONNECTIONS, s->now);
		goto refused;
	}
	if (opening && !take_slots(p, s, opening))
		goto refused;
	if (paced | opening && !take(p, s, paced, opening))
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
	if (set & ~paced)
		count_free(p, s, set & ~paced);
	return;
refused:
	if (o->first && !o->observe)
		drop_slots(o);
	count_refused(p, s);
}
