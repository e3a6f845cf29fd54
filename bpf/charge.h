/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What a packet is charged under one limit, and how that is taken back. */
#pragma once

#include "calendar.h"
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

/* The instant that the buckets of a limit are charged for: when the packet leaves. A limit
 * with many buckets, of packets that others hold for longer, charges it on arrival; so do
 * all where packets are policed, as it leaves now. */
static __always_inline __u64 charged_for(const struct policy *p, const struct scratch *s, __u32 number)
{
	if (number & OF_NEW || here.mode == MODE_POLICE || p->crossed >> number % MAX_LIMITS & 1)
		return load_word(&s->now);
	return load_word(&s->decision.depart);
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
					      second_line(p, c->hash[meter]), s->now, m->most);
		bucket = bucket_at(c->place[meter], tag_of(m, c->hash[meter]));
		if (bucket)
			return bucket_charge(bucket, c->cost[meter], charged_for(p, s, number));
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
	__u64 depart = load_word(&s->now), at = charged_for(p, s, number);

#pragma unroll
	for (int j = 0; j < METERS; j++) {
		const struct meter *m = &l->meter[j];
		__u64 before, own, *bucket;
		int charged;

		if (!of_new(number, j) || c->place[j] == NOWHERE)
			continue;
		bucket = bucket_at(c->place[j], tag_of(m, c->hash[j]));
		charged = bucket && bucket_try(bucket, c->cost[j], at, &before);
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

/* Gives up the places of a limit in its calendars. */
__noinline int release(const struct policy *p, struct scratch *s, __u32 number)
{
	__u64 bit = 1ULL << number % MAX_LIMITS;

	if (!p || !s)
		return 0;
#pragma unroll
	for (int j = 0; j < PACED; j++) {
		if (s->held[j] & bit)
			calendar_return(p, s, number % MAX_LIMITS * PACED + j);
		s->held[j] &= ~bit;
	}
	return 0;
}

/* Takes back what was charged. */
__noinline int refund(const struct policy *p, struct scratch *s, __u32 number)
{
	const struct limit *l;
	const struct charge *c;

	if (!p || !s)
		return 0;
	l = &p->limit[number % MAX_LIMITS];
	c = &s->charge[number % MAX_LIMITS];
	if (!(number & OF_NEW) && p->calendars >> number % MAX_LIMITS & 1) {
		release(p, s, number);
		count(l, s, c->waits & 1, -1);
		return 0;
	}
#pragma unroll
	for (int j = 0; j < METERS; j++) {
		__u64 *bucket;

		if (!of_new(number, j))
			continue;
		bucket = bucket_at(c->place[j], tag_of(&l->meter[j], c->hash[j]));
		if (bucket && j < WATCHED)
			watch_overtaken(l, j, c->cost[j]);
		if (bucket)
			bucket_refund(bucket, c->cost[j]);
	}
	if (!(number & OF_NEW))
		count(l, s, c->waits & 1, -1);
	return 0;
}

/* Takes back what the limits of set were charged for a packet, and those of opening
 * for a connection. */
__noinline int refund_all(const struct policy *p, struct scratch *s, __u64 set, __u64 opening)
{
	if (!p || !s)
		return 0;
	for (int i = 0; i < here.limits && set; i++, set &= set - 1)
		refund(p, s, lowest(set));
	for (int i = 0; i < here.limits && opening; i++, opening &= opening - 1)
		refund(p, s, lowest(opening) | OF_NEW);
	return 0;
}
